"""A ledger put together on the router's clock: the path adds up, hidden work does not count, gaps show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.stamps import MAX_CHUNKS, ComputeLog, PageLog
from pdserve.api import Explanation
from pdserve.cli.explain import render
from pdserve.obs.ledger import path_seconds
from pdserve.types import ClockOffset, Ledger, Phase, Span, TransferStats
from router.explain import Explained
from router.ledger import Journal, assemble
from router.metrics import RouterMetrics

P_AHEAD, D_BEHIND = 3600.0, -500.0
CLOCKS = (
    ClockOffset(worker="p", offset_s=-P_AHEAD, uncertainty_s=0.001),
    ClockOffset(worker="d", offset_s=-D_BEHIND, uncertainty_s=0.001),
)


def p(at: float) -> float:
    return at + P_AHEAD


def d(at: float) -> float:
    return at + D_BEHIND


def journal() -> Journal:
    """Came at 100, could be queued at 100.01, was sent at 100.03; its first token came at 101."""
    made = Journal(came_at=100.0, queued_at=100.01, waiting_since=100.01)
    made.sent(100.03)
    return made


def told() -> Ledger:
    """Two chunks (100.1 to 100.4, 100.45 to 100.8) on p; four pages, two during each chunk's end, to d."""
    compute = ComputeLog()
    compute.ready(p(100.05))
    compute.chunk(p(100.1), p(100.4), 64)
    compute.chunk(p(100.45), p(100.8), 40)
    pages = PageLog()
    for index, sealed, announced, arrived in (
        (0, 100.4, 100.41, 100.43), (1, 100.4, 100.42, 100.44),
        (2, 100.8, 100.82, 100.85), (3, 100.8, 100.83, 100.9),
    ):  # fmt: skip
        pages.announced(index, p(sealed), d(announced))
        pages.ended(index, arrived=d(arrived), verified=d(arrived + 0.01), good=True)
    of_d = {"begin_clock": "d", "end_clock": "d"}
    admit = Span(phase=Phase.ADMIT, begin_s=d(100.91), end_s=d(100.95), on_path=True, **of_d)
    step = Span(phase=Phase.FIRST_STEP, begin_s=d(100.97), end_s=d(101.0), **of_d)
    spans = [*compute.spans("p", p(101)), *pages.spans("d", "p"), *pages.path("d", "p"), admit, step]
    moved = TransferStats(path="shm", pages=4, bytes=4000)
    return Ledger(prefill_worker="p", decode_worker="d", spans=tuple(spans), transfer=moved)


def whole() -> Ledger:
    made = journal()
    made.token(told(), 101.0, CLOCKS)
    return assemble(made, told(), CLOCKS, 105.0)


def test_the_path_adds_up_to_ttft_whatever_the_clocks_say() -> None:
    ledger = whole()
    assert ledger.ttft_s == pytest.approx(1.0)
    assert ledger.residual_s == pytest.approx(0.0, abs=1e-6)
    expected = {
        Phase.TOKENISE: 0.01, Phase.QUEUE: 0.02, Phase.DISPATCH: 0.02, Phase.PREFILL_QUEUE: 0.1,
        Phase.COMPUTE: 0.65, Phase.ANNOUNCE: 0.03, Phase.WIRE: 0.07, Phase.VERIFY: 0.01, Phase.ADMIT: 0.04,
        Phase.RETURN: 0.05, Phase.FIRST_STEP: 0.03,
    }  # fmt: skip
    assert path_seconds(ledger) == pytest.approx(expected, abs=1e-6)


def test_what_is_hidden_behind_compute_and_the_handover_are_told() -> None:
    ledger = whole()
    runs = [s for s in ledger.spans if s.phase is Phase.WIRE and not s.on_path]
    assert [(s.count, s.begin_s, s.end_s) for s in runs] == [
        (2, pytest.approx(0.41), pytest.approx(0.44)), (2, pytest.approx(0.82), pytest.approx(0.9)),
    ]  # fmt: skip
    assert ledger.wire_hidden == pytest.approx(0.03 / 0.11, abs=1e-6)
    assert ledger.handover_s == pytest.approx(0.17, abs=1e-6)


def test_sums_between_two_clocks_are_put_right() -> None:
    ledger = whole()
    announced = next(s for s in ledger.spans if s.phase is Phase.ANNOUNCE and not s.on_path)
    assert announced.count == 4
    assert announced.sum_s == pytest.approx(0.01 + 0.02 + 0.02 + 0.03, abs=1e-6)


@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.ADMIT, Phase.WIRE])
def test_a_phase_that_nobody_stamped_is_in_the_residual(phase: Phase) -> None:
    full = told()
    known = [s for s in full.spans if s.phase is not phase or not s.on_path]
    made = journal()
    made.token(replace(full, spans=tuple(known)), 101.0, CLOCKS)
    ledger = assemble(made, full, CLOCKS, 105.0)
    assert ledger.residual_s is not None
    assert ledger.residual_s > 0.03


def test_a_worker_whose_clock_is_not_known_leaves_its_part_out() -> None:
    made = journal()
    made.token(told(), 101.0, CLOCKS[1:])
    ledger = assemble(made, told(), CLOCKS[1:], 105.0)
    assert all("p" not in (s.begin_clock, s.end_clock) for s in ledger.spans)
    assert ledger.residual_s is not None
    assert ledger.residual_s > 0.5


def test_the_offsets_of_the_first_token_count_for_the_whole_ledger() -> None:
    made = journal()
    made.token(told(), 101.0, CLOCKS)
    drifted = tuple(replace(c, offset_s=c.offset_s + 0.12) for c in CLOCKS)
    assert assemble(made, told(), drifted, 700.0) == whole()


def test_time_in_the_queue_counts_once_when_the_prefill_worker_is_changed() -> None:
    made = journal()
    made.sent(100.04)  # a rebind: sent again, and never back in the queue
    made.token(told(), 101.0, CLOCKS)
    ledger = assemble(made, told(), CLOCKS, 105.0)
    waits = [(span.begin_s, span.end_s) for span in ledger.spans if span.phase is Phase.QUEUE]
    assert waits == [pytest.approx((0.01, 0.03)), pytest.approx((0.03, 0.04))]
    assert ledger.residual_s == pytest.approx(0.0, abs=1e-6)


def test_a_request_that_waits_has_what_is_known() -> None:
    made = Journal(came_at=100.0, queued_at=100.01, waiting_since=100.01)
    assert [s.phase for s in assemble(made, Ledger(), (), 100.5).spans] == [Phase.TOKENISE]
    made.sent(100.2)
    ledger = assemble(made, Ledger(), CLOCKS, 100.5)
    assert [s.phase for s in ledger.spans] == [Phase.TOKENISE, Phase.QUEUE, Phase.DISPATCH]
    assert (ledger.ttft_s, ledger.residual_s) == (None, None)


def test_many_chunks_share_a_stretch_at_last() -> None:
    log = ComputeLog()
    log.ready(0.0)
    for number in range(MAX_CHUNKS + 50):
        log.chunk(number, number + 0.9, 1)
    spans = log.spans("p", 1000.0)
    chunks = [s for s in spans if s.phase is Phase.COMPUTE]
    assert len(chunks) == MAX_CHUNKS
    assert sum(s.count for s in chunks) == MAX_CHUNKS + 50
    assert sum(s.sum_s for s in chunks) == pytest.approx(0.9 * (MAX_CHUNKS + 50))


# ---- where it goes ---------------------------------------------------------------------------------------


def test_metrics_have_every_phase_the_residual_and_the_overlap() -> None:
    metrics = RouterMetrics()
    metrics.ledger(whole(), first_try=True)
    metrics.ledger(replace(whole(), residual_s=5.0), first_try=False)
    value = metrics.registry.get_sample_value
    for phase in Phase:
        assert value("pdserve_phase_seconds_count", {"phase": phase.value}) == 2
    assert value("pdserve_phase_seconds_sum", {"phase": "compute"}) == pytest.approx(1.3)
    assert value("pdserve_ledger_residual_seconds_count") == 1
    assert value("pdserve_ledger_residual_seconds_bucket", {"le": "0.002"}) == 1
    assert value("pdserve_handover_seconds_sum") == pytest.approx(0.34)
    assert value("pdserve_wire_hidden_ratio_count") == 2


def test_explanations_are_a_tenants_own_and_the_oldest_goes() -> None:
    kept = Explained(limit=2)
    for name in ("a", "b", "c"):
        kept.put("one", Explanation(request_id=name, state="done"))
    assert kept.get("one", "a") is None
    assert kept.get("one", "c") is not None
    assert kept.get("two", "c") is None


def test_a_timeline_shows_each_row_where_it_lies() -> None:
    page = render(
        Explanation(
            request_id="r1", state="done", outcome="length", prefill_worker="p", decode_worker="d",
            epochs=1, total_s=5.0, ledger=whole(),
        )
    ).splitlines()  # fmt: skip
    assert page[0] == "request r1: done, length after 5000.0 ms"
    assert "p -> d over shm: 4 pages, 0.0 MB; 0 were there, 0 came twice" in page
    assert "clocks, to the router's: p -3600.0000 s +- 1.0 ms, d +500.0000 s +- 1.0 ms" in page
    assert any(line.startswith("first token after 1000.0 ms: phases 1000.0 ms, rest ") for line in page)
    rows = {line.split()[0]: line for line in page if "|" in line and not line.startswith("phase")}
    bar = rows["admit"].split("|")[1]
    assert (bar.index("#"), len(bar)) == (int(48 * 0.91), 48)
    assert [line.count("#") for line in page if line.startswith("compute")] == [15, 17]
    assert "40 tokens" in next(line for line in reversed(page) if line.startswith("compute"))
