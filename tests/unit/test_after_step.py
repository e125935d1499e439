"""Hooks on the compute thread after a step: what they find comes first, what they fail at is done later."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.effects import AnswerPrefill, ComputeDigest, ToDecoder
from kvtransfer.port import AfterStep, Input
from pdserve.messages import Finish, Grant
from pdserve.sched.plan import StepPlan, StepResult
from pdserve.worker.driver import Driver
from prefill_worker.digests import last_pages
from tests.unit.role_kit import SIZE, Prefill, digest, key, prefill_call, prompt

PAGES = -(-len(prompt()) // SIZE)


class Sampling:
    """A runner that samples token 5 wherever a token is asked for."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(step_id=plan.step_id, tokens={s.seq_id: 5 for s in plan.seqs if s.sample})


async def run(hook: AfterStep, prefill: Prefill) -> tuple[list[Any], list[int]]:
    """One prompt, to its Finish: what was said to decode, and which pages were digested elsewhere."""
    said: list[Any] = []
    digested: list[int] = []
    parts: Any = SimpleNamespace(pages=prefill.pages, pool=SimpleNamespace(set_generation=lambda *_: None))

    def compute(effect: ComputeDigest) -> None:
        digested.append(effect.index)
        found = (effect.key, effect.index, effect.page, digest(effect.index))
        driver.feed_soon(lambda now: prefill.role.digested(*found, now))

    with ThreadPoolExecutor(1) as pool:
        loop = asyncio.get_running_loop()
        driver = Driver(loop, parts, Sampling(), pool, pytest.fail, pytest.fail)
        driver.core = prefill.core
        driver.on(ToDecoder, lambda effect: said.append(effect.message))
        driver.on(AnswerPrefill, lambda effect: None)
        driver.on(ComputeDigest, compute)
        driver.after_step(hook)
        call = prefill_call(key(), expires=1e9)
        grant = Grant(key=key(), want=tuple(range(PAGES)), credit=PAGES, ticket=call.ticket)
        driver.feed(lambda now: prefill.role.prefill(call, now))
        driver.feed(lambda now: prefill.said(grant, now))
        async with asyncio.timeout(30):
            await driver.until(lambda: any(isinstance(message, Finish) for message in said))
        driver.close()
    return said, digested


async def test_what_a_hook_finds_is_known_when_the_step_is_told_of() -> None:
    prefill = Prefill()
    rows: list[int] = []

    def hook(plan: StepPlan, result: StepResult) -> Input:
        written = list(last_pages(plan, result, prefill.role.owns, SIZE))
        rows.extend(valid_rows for _, _, valid_rows in written)
        return lambda now: prefill.role.computed([(page, i, digest(i)) for page, i, _ in written])

    said, digested = await run(hook, prefill)
    assert [type(message).__name__ for message in said] == ["Announce"] * PAGES + ["Finish"]
    assert digested == list(range(PAGES - 1)), "chunks before the last one are digested elsewhere"
    assert rows == [len(prompt()) % SIZE]


async def test_a_hook_that_fails_costs_time_only(caplog: pytest.LogCaptureFixture) -> None:
    def hook(plan: StepPlan, result: StepResult) -> Input:
        raise RuntimeError("broken")

    said, digested = await run(hook, Prefill())
    assert [type(message).__name__ for message in said] == ["Announce"] * PAGES + ["Finish"]
    assert digested == list(range(PAGES))
    assert "a hook after a step failed" in caplog.text
