"""`pdserve chat`: a conversation in the terminal. The history lives here; the server keeps none."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from pdserve.cli.connection import Router
from pdserve.client import Client
from pdserve.errors import PdserveError, PromptTooLong

PROMPT = "> "
HELP = "Ctrl-C stops an answer; /reset forgets the conversation; /exit or Ctrl-D ends."


def run(router: Router, system: str, max_tokens: int, temperature: float, seed: int | None) -> int:
    """Reads lines and streams answers until the end of input; returns the exit code. Raises PdserveError."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    opening = [{"role": "system", "content": system}] if system else []
    history = list(opening)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing for input()
    with router.client() as client:
        print(f"{client.get_model().model}. {HELP}", file=sys.stderr)
        while (line := _read()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                history = list(opening)
            elif line:
                history = _turn(client, history, line, options)
    return 0


def _read() -> str | None:
    while True:
        try:
            return input(PROMPT).strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()


def _turn(
    client: Client, history: list[dict[str, str]], line: str, options: dict[str, Any]
) -> list[dict[str, str]]:
    """Streams one answer; returns the history with it, or as it was if the request failed."""
    asked = [*history, {"role": "user", "content": line}]
    said: list[str] = []
    try:
        with client.generate(messages=asked, **options) as stream:
            for chunk in stream:
                said.append(chunk.text)
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except PromptTooLong:
        print("The conversation is longer than the model's context; /reset starts anew.", file=sys.stderr)
        return history
    except PdserveError as err:
        print(f"\nerror: {err.label}: {err.message}", file=sys.stderr)
        return history
    print()
    return [*asked, {"role": "assistant", "content": "".join(said)}]
