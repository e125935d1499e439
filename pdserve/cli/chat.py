"""`pdserve chat`: a conversation in the terminal. The history lives here; the server keeps none."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdserve.cli.connection import Router
from pdserve.client import Client
from pdserve.errors import PdserveError, PromptTooLong

PROMPT = "> "
HELP = """\
/system TEXT   another system message, from the next answer on; without a text: none
/regen         the last answer once more, with another seed
/undo          forgets the last question and its answer
/history       shows the conversation so far
/reset         forgets the conversation
/help          this
/exit, Ctrl-D  ends; Ctrl-C stops an answer, and what was said of it stays"""


@dataclass(slots=True, kw_only=True)
class Chat:
    """A conversation. turns: messages of user and assistant in turn. system: empty for none."""

    client: Client
    options: dict[str, Any]
    system: str = ""
    seed: int | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What the model sees."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, line: str) -> None:
        """Streams the answer to a line. A request that failed leaves the conversation as it was."""
        self.turns.append({"role": "user", "content": line})
        answer = self._stream()
        if answer is None:
            self.turns.pop()
        else:
            self.turns.append({"role": "assistant", "content": answer})

    def again(self) -> None:
        """Answers the last question once more, with the next seed if one was given."""
        if not self.turns:
            _say("There is nothing to answer again.")
            return
        before = self.turns.pop()
        self.seed = None if self.seed is None else self.seed + 1
        answer = self._stream()
        self.turns.append(before if answer is None else {"role": "assistant", "content": answer})

    def _stream(self) -> str | None:
        """Prints an answer as it comes, and its speed; None if the request failed."""
        said: list[str] = []
        options = self.options if self.seed is None else {**self.options, "seed": self.seed}
        began, num_tokens, first = time.monotonic(), 0, 0.0
        try:
            with self.client.generate(messages=self.messages, **options) as stream:
                for chunk in stream:
                    first = first or time.monotonic()
                    num_tokens += len(chunk.token_ids)
                    said.append(chunk.text)
                    print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except PromptTooLong:
            _say("The conversation is longer than the model's context: /undo takes a turn back, /reset all.")
            return None
        except PdserveError as err:
            print(file=sys.stderr)
            _say(f"error: {err.label}: {err.message}")
            return None
        print(flush=True)
        _say(speed(num_tokens, first - began, time.monotonic() - first))
        return "".join(said)


def speed(num_tokens: int, first_s: float, rest_s: float) -> str:
    """How fast an answer came. first_s: until its first token; rest_s: from then on."""
    if not num_tokens:
        return "[no tokens]"
    if num_tokens == 1 or rest_s <= 0:
        return f"[{num_tokens} tokens, first after {first_s * 1e3:.0f} ms]"
    return (
        f"[{num_tokens} tokens, first after {first_s * 1e3:.0f} ms, {(num_tokens - 1) / rest_s:.1f} tokens/s]"
    )


def run(router: Router, system: str, max_tokens: int, temperature: float, seed: int | None) -> int:
    """Reads lines and streams answers until the end of input; returns the exit code. Raises PdserveError."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and a history of lines for input()
    with router.client() as client:
        _say(f"{client.get_model().model}. Ctrl-C stops an answer, /help shows the commands, /exit ends.")
        chat = Chat(client=client, options=options, system=system, seed=seed)
        while (line := _read()) is not None and line != "/exit":
            if line.startswith("/"):
                _command(chat, line)
            elif line:
                chat.ask(line)
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


def _say(text: str) -> None:
    """What is not the model's goes to stderr, so that answers can be piped."""
    print(text, file=sys.stderr, flush=True)


def _command(chat: Chat, line: str) -> None:
    name, _, text = line.partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        _say(f"There is no command {name}; /help shows them.")
        return
    command(chat, text.strip())


def _system(chat: Chat, text: str) -> None:
    chat.system = text
    _say("The system message is changed." if text else "There is no system message now.")


def _undo(chat: Chat, text: str) -> None:
    del chat.turns[-2:]
    _say(f"{len(chat.turns) // 2} turns are left.")


def _reset(chat: Chat, text: str) -> None:
    chat.turns.clear()
    _say("The conversation is forgotten.")


def _history(chat: Chat, text: str) -> None:
    for message in chat.messages:
        _say(f"{message['role']}: {message['content']}")


_COMMANDS: dict[str, Callable[[Chat, str], None]] = {
    "/system": _system,
    "/regen": lambda chat, text: chat.again(),
    "/undo": _undo,
    "/history": _history,
    "/reset": _reset,
    "/help": lambda chat, text: _say(HELP),
}
