"""Three ways to end a request early. Usage: python examples/cancel.py [HOST:PORT]

Workers stop computing within a step, and the request's pages are free again.
"""

import sys

from pdserve.client import Client
from pdserve.errors import Cancelled, DeadlineExpired

PROMPT = "Count to one thousand: 1, 2, 3,"


def main(address: str) -> None:
    """Leaves a stream, cancels one, and lets a deadline pass."""
    with Client(address) as client:
        with client.generate(PROMPT, max_tokens=500, ignore_eos=True) as stream:
            print("left after:", next(stream).text)

        stream = client.generate(PROMPT, max_tokens=500, ignore_eos=True)
        next(stream)
        stream.cancel()  # from any thread
        try:
            stream.result()
        except Cancelled as error:
            print("cancelled:", error)

        try:
            client.generate(PROMPT, max_tokens=500, ignore_eos=True, deadline_s=0.5).result()
        except DeadlineExpired as error:
            print("deadline:", error)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
