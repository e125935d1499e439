"""`pdserve generate`: one prompt, streamed, or a file of them with several under way at once."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.cli.answers import answer, failure
from pdserve.cli.bar import progress_bar
from pdserve.cli.connection import Router
from pdserve.cli.prompts import PromptLine, read_prompts
from pdserve.client import AsyncClient
from pdserve.errors import InvalidRequest, PdserveError

EXIT_OK, EXIT_ERROR = 0, 1


def run_one(prompt: str | None, router: Router, options: dict[str, Any], *, chat: bool, as_json: bool) -> int:
    """Streams one answer to stdout, or prints it as one JSON object. Raises PdserveError."""
    if prompt is None:
        raise InvalidRequest.field("prompt", "give a text, or --prompts with a file.")
    text = sys.stdin.read() if prompt == "-" else prompt
    source: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with router.client() as client, client.generate(**source, **options) as stream:
        if as_json:
            print(json.dumps(answer(stream.result()), ensure_ascii=False))
            return EXIT_OK
        try:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        finally:
            print()  # an error has a line of its own
    return EXIT_OK


def run_many(file: Path, router: Router, options: dict[str, Any], concurrency: int) -> int:
    """Answers a file's requests in order, one JSON object a line. 1 if any failed. Raises PdserveError."""
    lines = read_prompts(file)
    with progress_bar(len(lines)) as advance:
        failed = asyncio.run(_answer_all(lines, router, options, concurrency, advance))
    return EXIT_ERROR if failed else EXIT_OK


async def _answer_all(
    lines: list[PromptLine],
    router: Router,
    options: dict[str, Any],
    concurrency: int,
    advance: Callable[[bool], None],
) -> int:
    """Runs `concurrency` at a time; prints each answer as soon as all before it are printed."""
    slots = asyncio.Semaphore(concurrency)
    async with router.async_client() as client:

        async def one(line: PromptLine) -> dict[str, Any]:
            async with slots:
                found = await _answer(client, line, options)
            advance("error" in found)
            return found

        tasks = [asyncio.create_task(one(line)) for line in lines]
        failed = 0
        for task in tasks:
            found = await task
            failed += "error" in found
            print(json.dumps(found, ensure_ascii=False), flush=True)
    return failed


async def _answer(client: AsyncClient, line: PromptLine, options: dict[str, Any]) -> dict[str, Any]:
    own = {} if line.max_tokens is None else {"max_tokens": line.max_tokens}
    label = line.id if isinstance(line.id, str) else ""
    try:
        stream = client.generate(
            line.prompt,
            messages=line.messages,
            token_ids=line.token_ids,
            client_request_id=label[:128],
            **{**options, **own},
        )
        return answer(await stream.result(), line.id)
    except PdserveError as err:
        return failure(err, line.id)
