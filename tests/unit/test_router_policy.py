"""Choosing workers: distribution by outstanding tokens, local mode and its reasons, pairing, avoidance."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdserve.types import CapabilityRecord, Key, ModelLimits, PeerRef, Role, WorkerRecord
from router.inflight import InFlight
from router.policy import (
    Ask,
    Candidate,
    Choice,
    NoChoice,
    PolicyConfig,
    choose,
    choose_evaluator,
    pairing_problems,
)

CAPABILITY = CapabilityRecord(
    layout="l", numerics="n", model="m", tokenizer="t", dtype="float32", page_size=16, page_bytes=1,
    transports=("tcp",),
)  # fmt: skip
LIMITS = ModelLimits(vocab_size=10, max_context=100, end_token_ids=(), bos_token_id=None)


def worker(name: str, role: Role, *, usable: bool = True, layout: str = "l") -> Candidate:
    record = WorkerRecord(
        peer=PeerRef(worker_id=name, incarnation=sum(map(ord, name)), control="127.0.0.1:1"),
        role=role,
        capability=replace(CAPABILITY, layout=layout),
        limits=LIMITS,
        model_name="m",
        pool_pages=10,
        page_size=16,
    )
    return Candidate(record=record, usable=usable)


P0, P1 = worker("p0", Role.PREFILL), worker("p1", Role.PREFILL)
D0, D1 = worker("d0", Role.DECODE), worker("d1", Role.DECODE)
CONFIG = PolicyConfig()


class Dispatch:
    """Chooses and counts, as the dispatcher does."""

    def __init__(self, *workers: Candidate, config: PolicyConfig = CONFIG) -> None:
        self.workers, self.config, self.load = workers, config, InFlight()
        self.num = 0

    def go(self, tokens: int, ask: Ask | None = None) -> tuple[Key, Choice]:
        choice = choose(self.workers, self.load, ask or Ask(prompt_tokens=tokens), self.config)
        assert isinstance(choice, Choice), choice
        self.num += 1
        key = Key(request_id=str(self.num))
        prefill = choice.prefill or choice.decode
        self.load.add(
            key,
            decode=choice.decode.incarnation,
            prefill=prefill.incarnation,
            prefill_tokens=tokens,
            decode_tokens=tokens + 64,
        )
        return key, choice


def names(choices: list[Choice]) -> Counter[str]:
    return Counter(choice.prefill.worker_id if choice.prefill else "-" for choice in choices)


def test_eight_on_two_idle_prefill_workers_go_four_and_four() -> None:
    for tokens in ([100] * 8, [12, 15, 11, 18, 14, 13, 16, 12]):
        dispatch = Dispatch(P0, P1, D0, D1)
        choices = [dispatch.go(n)[1] for n in tokens]
        assert names(choices) == {"p0": 4, "p1": 4}
        assert Counter(c.decode.worker_id for c in choices) == {"d0": 4, "d1": 4}


def test_short_prompts_avoid_the_worker_with_a_long_one() -> None:
    dispatch = Dispatch(P0, P1, D0)
    long = dispatch.go(3000)[1].prefill
    assert long is not None
    choices = [dispatch.go(100)[1] for _ in range(8)]
    assert names(choices)[long.worker_id] <= 1


def test_one_after_the_other_takes_turns() -> None:
    dispatch = Dispatch(P0, P1, D0, D1)
    seen = []
    for _ in range(6):
        key, choice = dispatch.go(10)
        seen.append(choice.prefill.worker_id if choice.prefill else "-")
        dispatch.load.release_decode(key)
    assert seen == ["p0", "p1"] * 3
    assert dispatch.load.is_empty


@given(sizes=st.lists(st.integers(1, 2000), min_size=4, max_size=40), num=st.integers(2, 4))
def test_no_prefill_worker_is_ahead_by_more_than_the_largest_prompt(sizes: list[int], num: int) -> None:
    workers = [worker(f"p{n}", Role.PREFILL) for n in range(num)]
    dispatch = Dispatch(*workers, D0)
    for size in sizes:
        dispatch.go(size)
    loads = [dispatch.load.load(w.incarnation) for w in workers]
    costs = [load.prefill_tokens + 64 * load.prefill_requests for load in loads]
    assert max(costs) - min(costs) <= max(sizes) + 64


def test_local_with_the_reason_in_words() -> None:
    cases = [
        ((D0,), CONFIG, "no prefill worker"),
        ((P0, D0), PolicyConfig(local_prefill_threshold=50), "below 50"),
        ((worker("p0", Role.PREFILL, usable=False), D0), CONFIG, "no prefill worker"),
        ((worker("p0", Role.PREFILL, layout="x"), D0), CONFIG, "page layout"),
        ((worker("a", Role.AGGREGATED),), CONFIG, "does both"),
    ]
    for workers, config, words in cases:
        choice = Dispatch(*workers, config=config).go(49)[1]
        assert choice.prefill is None
        assert words in choice.reason


def test_the_threshold_is_exact_and_off_by_default() -> None:
    config = PolicyConfig(local_prefill_threshold=50)
    assert Dispatch(P0, D0, config=config).go(50)[1].prefill is not None
    assert Dispatch(P0, D0).go(1)[1].prefill is not None


def test_local_prompts_count_where_they_are_computed() -> None:
    dispatch = Dispatch(D0, D1)
    first = dispatch.go(3000)[1].decode.worker_id
    assert all(dispatch.go(10)[1].decode.worker_id != first for _ in range(5))


def test_a_prefill_worker_only_goes_with_a_decode_worker_that_fits() -> None:
    odd = worker("d1", Role.DECODE, layout="x")
    dispatch = Dispatch(worker("p0", Role.PREFILL), worker("p1", Role.PREFILL, layout="x"), D0, odd)
    for _ in range(6):
        choice = dispatch.go(100)[1]
        assert choice.prefill is not None
        assert choice.prefill.worker_id[1] == choice.decode.worker_id[1]


def test_avoided_workers_are_used_only_if_there_are_no_others() -> None:
    avoid = frozenset({P0.incarnation, D0.incarnation})
    ask = Ask(prompt_tokens=10, avoid=avoid)
    choice = Dispatch(P0, P1, D0, D1).go(10, ask)[1]
    assert (choice.prefill, choice.decode) == (P1.record.peer, D1.record.peer)
    choice = Dispatch(P0, D0).go(10, ask)[1]
    assert (choice.prefill, choice.decode) == (P0.record.peer, D0.record.peer)


def test_nobody_to_choose_says_what_is_missing() -> None:
    ask = Ask(prompt_tokens=10)
    missing = choose([P0], InFlight(), ask, CONFIG)
    assert isinstance(missing, NoChoice)
    assert not missing.waits
    full = choose([P0, D0], InFlight(), Ask(prompt_tokens=10, blocked=frozenset({D0.incarnation})), CONFIG)
    assert isinstance(full, NoChoice)
    assert full.waits


def test_prefill_workers_get_no_more_than_their_backlog() -> None:
    config = PolicyConfig(prefill_backlog_tokens=1000)
    dispatch = Dispatch(P0, D0, config=config)
    keys = [dispatch.go(3000)[0] for _ in range(2)]  # one computes, one waits behind it
    behind = choose(dispatch.workers, dispatch.load, Ask(prompt_tokens=10), config)
    assert isinstance(behind, NoChoice)
    assert behind.waits
    dispatch.load.release_prefill(keys[0])
    dispatch.go(10)


def test_texts_go_to_prefill_workers_first_and_to_the_one_with_the_least_to_compute() -> None:
    both = worker("both", Role.AGGREGATED)
    dispatch = Dispatch(P0, P1, D0)
    busy = dispatch.go(500)[1].prefill
    assert busy is not None

    def chosen(*workers: Candidate, avoid: frozenset[int] = frozenset(), near: int | None = None) -> str:
        found = choose_evaluator(workers, dispatch.load, avoid, near)
        return "" if found is None else found.worker_id

    assert {busy.worker_id, chosen(D0, both, P0, P1)} == {"p0", "p1"}
    assert chosen(D0, both, replace(P0, usable=False)) == "both"
    assert chosen(D0, both, avoid=frozenset({both.incarnation})) == "d0"
    assert chosen(D0, both, P0, near=D0.incarnation) == "d0"
    assert chosen(P0, avoid=frozenset({P0.incarnation}), near=P0.incarnation) == ""


def test_releasing_twice_or_unknown_keys_changes_nothing() -> None:
    dispatch = Dispatch(P0, D0)
    key, _ = dispatch.go(10)
    assert dispatch.load.release_prefill(key) == P0.incarnation
    assert dispatch.load.release_prefill(key) is None
    assert dispatch.load.release_decode(key) == D0.incarnation
    assert dispatch.load.release_decode(key) is None
    assert dispatch.load.is_empty


def test_pairing_problems_name_the_pair_and_the_reason_once() -> None:
    records = {w.incarnation: w.record for w in (P0, D0, D1, worker("p9", Role.PREFILL, layout="x"))}
    problems = pairing_problems(records, "strict")
    assert len(problems) == 2
    assert all(problem.startswith("p9 with d") for problem in problems)


def test_who_has_the_pages_computes_the_rest_however_loaded() -> None:
    dispatch = Dispatch(P0, D0, D1)
    for _ in range(3):
        dispatch.go(500, Ask(prompt_tokens=500, pinned=D1.incarnation))
    _, choice = dispatch.go(500, Ask(prompt_tokens=500, pinned=D1.incarnation))
    assert (choice.decode, choice.prefill) == (D1.record.peer, None)
    assert choice.reason == "local: its pages are there"


def test_who_has_the_pages_but_is_full_gone_or_failed_is_not_waited_for() -> None:
    gone = worker("d1", Role.DECODE, usable=False)
    full = Ask(prompt_tokens=500, pinned=D1.incarnation, blocked=frozenset({D1.incarnation}))
    failed = Ask(prompt_tokens=500, pinned=D1.incarnation, avoid=frozenset({D1.incarnation}))
    for workers, ask in (
        ((P0, D0, D1), full),
        ((P0, D0, gone), Ask(prompt_tokens=500, pinned=D1.incarnation)),
        ((P0, D0, D1), failed),
    ):
        _, choice = Dispatch(*workers).go(500, ask)
        assert (choice.decode, choice.prefill) == (D0.record.peer, P0.record.peer)
