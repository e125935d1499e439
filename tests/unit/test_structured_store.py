"""Compiled grammars by tenant: made once, one at a time for a tenant, dropped least recently used first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InternalError, InvalidRequest, Overloaded, UnsupportedFeature
from pdserve.structured.cache import CacheKey, CacheLimits, GrammarCache
from pdserve.structured.refusal import Refused
from pdserve.structured.store import MAX_WAITING, GrammarStore
from pdserve.types import Grammar, GrammarKind

LIMIT_S = 20.0


def _grammar(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


class Gated:
    """A compile that waits for its gate where a text begins with "slow". begun: one came. calls: in order."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.calls: list[str] = []

    def __call__(self, grammar: Grammar) -> str:
        self.begun.set()
        if grammar.text.startswith("slow"):
            assert self.gate.wait(LIMIT_S)
        self.calls.append(grammar.text)
        if "bad" in grammar.text:
            raise Refused("it is bad.")
        if "broken" in grammar.text:
            raise RuntimeError
        if "none" in grammar.text:
            raise UnsupportedFeature("not here")
        return grammar.text.upper()


def _run(test: Callable[[Gated, GrammarStore[str]], object]) -> None:
    async def main() -> None:
        gated = Gated()
        store: GrammarStore[str] = GrammarStore(gated, lambda g: len(g.text))
        try:
            await asyncio.wait_for(test(gated, store), LIMIT_S)  # type: ignore[arg-type]
        finally:
            gated.gate.set()
            store.close()

    asyncio.run(main())


def test_a_grammar_is_compiled_once_for_a_tenant_however_many_ask() -> None:
    async def test(gated: Gated, store: GrammarStore[str]) -> None:
        asked = [asyncio.create_task(store.get("a", _grammar("slow"))) for _ in range(5)]
        assert await asyncio.to_thread(gated.begun.wait, LIMIT_S)
        asked[0].cancel()  # the others still get it
        gated.gate.set()
        assert await asyncio.gather(*asked[1:]) == ["SLOW"] * 4
        assert await store.get("a", _grammar("slow")) == "SLOW"
        assert gated.calls == ["slow"]
        assert await store.get("b", _grammar("slow")) == "SLOW"
        assert gated.calls == ["slow"] * 2

    _run(test)


def test_a_refusal_is_kept_but_no_fault_of_ours() -> None:
    async def test(gated: Gated, store: GrammarStore[str]) -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"sampling\.grammar: it is bad") as caught:
                await store.get("a", _grammar("bad"))
            assert caught.value.violations[0].field == "sampling.grammar"
            with pytest.raises(UnsupportedFeature):
                await store.get("a", _grammar("none"))
        assert gated.calls == ["bad", "none", "none"]
        with pytest.raises(InternalError):
            await store.get("a", _grammar("broken"))

    _run(test)


def test_a_slow_compile_ends_its_request_and_holds_up_its_own_tenant_only() -> None:
    async def test(gated: Gated, store: GrammarStore[str]) -> None:
        with pytest.raises(InvalidRequest, match="more than 2 s to compile"):
            await store.get("a", _grammar("slow"))
        behind = asyncio.create_task(store.get("a", _grammar("quick")))
        assert await store.get("b", _grammar("quick")) == "QUICK"
        assert not behind.done()
        assert gated.calls == ["quick"]
        gated.gate.set()
        assert await behind == "QUICK"
        assert await store.get("a", _grammar("slow")) == "SLOW"  # it was compiled meanwhile
        assert gated.calls == ["quick", "slow", "quick"]

    _run(test)


def test_what_is_prepared_is_so_once_and_outside_of_the_time() -> None:
    async def main() -> None:
        gate, prepared, gated = threading.Event(), [], Gated()

        def prepare() -> None:
            prepared.append(gate.wait(LIMIT_S))

        store: GrammarStore[str] = GrammarStore(gated, lambda _: 1, prepare=prepare, compile_s=LIMIT_S)
        asked = [asyncio.create_task(store.get(tenant, _grammar("x"))) for tenant in "ab"]
        asyncio.get_running_loop().call_soon(gate.set)
        assert await asyncio.gather(*asked) == ["X", "X"]
        assert prepared == [True]
        store.close()

    asyncio.run(main())


def test_a_model_that_can_not_follow_grammars_says_so_each_time() -> None:
    async def main() -> None:
        def prepare() -> None:
            raise UnsupportedFeature("no end token")

        store: GrammarStore[str] = GrammarStore(Gated(), lambda _: 1, prepare=prepare)
        for _ in range(2):
            with pytest.raises(UnsupportedFeature, match="no end token"):
                await store.get("a", _grammar("x"))
        store.close()

    asyncio.run(main())


def test_a_tenants_line_is_bounded() -> None:
    async def test(gated: Gated, store: GrammarStore[str]) -> None:
        waiting = [asyncio.create_task(store.get("a", _grammar(f"slow {i}"))) for i in range(MAX_WAITING + 1)]
        assert await asyncio.to_thread(gated.begun.wait, LIMIT_S)
        with pytest.raises(Overloaded) as caught:
            await store.get("a", _grammar("one more"))
        assert caught.value.retry_after_s
        assert await store.get("b", _grammar("one more")) == "ONE MORE"
        gated.gate.set()
        await asyncio.gather(*waiting)
        assert await store.get("a", _grammar("one more")) == "ONE MORE"

    _run(test)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(1, 40)), max_size=40),
    st.integers(1, 6),
    st.integers(10, 100),
)
def test_a_cache_stays_within_its_limits_and_keeps_what_was_used_last(
    puts: list[tuple[str, int, int]], entries: int, size: int
) -> None:
    limits = CacheLimits(
        tenant_entries=entries, tenant_bytes=size, entries=2 * entries - 1, all_bytes=2 * size - 1
    )
    cache: GrammarCache[int] = GrammarCache(limits)
    kept: dict[CacheKey, int] = {}
    for tenant, number, cost in puts:
        key = CacheKey.of(tenant, _grammar(str(number)))
        cache.put(key, number, cost)
        kept[key] = cost
        assert (cache.get(key) == number) == (cost <= size)
        kept = {each: kept[each] for each in kept if cache.get(each) is not None}
        own = [cost for each, cost in kept.items() if each.tenant == tenant]
        assert len(own) <= entries
        assert sum(own) <= size
        assert len(cache) == len(kept) <= limits.entries
        assert sum(kept.values()) <= limits.all_bytes
