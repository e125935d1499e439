"""Many prompts with a progress bar; those that fail do not end the others.

Usage: python examples/many_prompts.py [HOST:PORT]. The bar is rich's if that is installed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdserve.client import Client, Progress

ANIMALS = ("cat", "dog", "owl", "fox", "bee", "cow")


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """Gives what draws how far it is."""
    try:
        from rich.progress import Progress as Bar
    except ImportError:
        yield lambda now: print(f"\r{now.done} of {now.total}, {now.failed} failed", end="", file=sys.stderr)
        print(file=sys.stderr)
        return
    with Bar() as bar:
        task = bar.add_task("prompts")
        yield lambda now: bar.update(task, completed=now.done, total=now.total)


def main(address: str) -> None:
    """Prints each answer or error in the order of the prompts."""
    prompts = [f"The {animal} said:" for animal in ANIMALS]
    prompts.append("")  # is refused: an empty prompt
    with Client(address) as client, progress_bar() as progress:
        answers = list(client.generate_many(prompts, concurrency=4, progress=progress, max_tokens=6))
    for prompt, answer in zip(prompts, answers, strict=True):
        told = answer.result.text if answer.ok else f"[{answer.error}]"
        print(f"{prompt!r}: {told!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
