"""The runs of one HTTP request: one for each of its prompts, their events in one stream.

What does not live here: what events become (one module for each API), the socket (`answer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pdserve.api import GenerateInput, StreamEvent
from router.caller import Caller
from router.hub import Hub

Numbered = tuple[int, StreamEvent]
"""The prompt's number, and an event of its run."""

_AHEAD = 16
"""Events that may wait for a slow reader; then the runs wait, and what comes meanwhile is joined there."""


async def run(hub: Hub, inputs: Sequence[GenerateInput], caller: Caller) -> AsyncGenerator[Numbered, None]:
    """All events. Closing cancels all runs. Raises the first PdserveError of any, which ends all."""
    if len(inputs) == 1:
        async with aclosing(hub.generate(inputs[0], None, caller)) as events:  # type: ignore[type-var]
            async for event in events:
                yield 0, event
        return
    merged: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue(_AHEAD)
    tasks = [asyncio.ensure_future(_feed(hub, i, one, caller, merged)) for i, one in enumerate(inputs)]
    try:
        left = len(tasks)
        while left:
            item = await merged.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    hub: Hub,
    index: int,
    source: GenerateInput,
    caller: Caller,
    merged: asyncio.Queue[Numbered | BaseException | None],
) -> None:
    try:
        async with aclosing(hub.generate(source, None, caller)) as events:  # type: ignore[type-var]
            async for event in events:
                await merged.put((index, event))
    except Exception as error:
        await merged.put(error)
    else:
        await merged.put(None)
