"""A conversation in the terminal; an empty line ends it. Usage: python examples/chat_loop.py [HOST:PORT]

The server keeps no history: each turn sends all of it, and the prefix cache makes that cheap.
"""

import sys

from pdserve.client import ChatMessage, Client
from pdserve.errors import PdserveError


def main(address: str) -> None:
    """Reads lines and streams answers."""
    history = [ChatMessage(role="system", content="You answer in one short sentence.")]
    with Client(address) as client:
        while line := input("> "):
            turn = [*history, ChatMessage(role="user", content=line)]
            try:
                with client.generate(messages=turn, max_tokens=24) as stream:
                    for chunk in stream:
                        print(chunk.text, end="", flush=True)
                    said = stream.result()
            except PdserveError as error:
                print(f"[{error.label}: {error}]")
                continue
            print(
                f"\n[{said.usage.cached_tokens} of {said.usage.prompt_tokens} prompt tokens from the cache]"
            )
            history = [*turn, ChatMessage(role="assistant", content=said.text)]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
