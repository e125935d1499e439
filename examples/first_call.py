"""The first call: one prompt, one answer. Usage: python examples/first_call.py [HOST:PORT]"""

import sys

from pdserve.client import Client


def main(address: str) -> None:
    """Prints what the model makes of a sentence's begin, and what that took."""
    with Client(address) as client:
        print(f"The router serves {client.get_model().model}.")
        result = client.generate("The capital of France is", max_tokens=8).result()
    print(result.text)
    milliseconds = 1000 * result.timings.ttft_s
    print(f"{result.usage.completion_tokens} tokens, the first after {milliseconds:.0f} ms")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
