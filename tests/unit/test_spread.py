"""Pages of a prompt in a prefill worker's size and in ours: what is pulled, and where its rows go.

The oracle is a table of rows: which page of either size each lies in, written down one by one.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.spread import Spread
from kvtransfer.plan import Origin

LAYOUT = "of another size"


@st.composite
def spreads(draw: st.DrawFn) -> Spread:
    theirs, ours = draw(st.sampled_from([1, 2, 3, 4, 6, 8])), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    rows = draw(st.integers(1, 40))
    hits = draw(st.integers(0, (rows - 1) // ours))
    further = st.frozensets(st.integers(hits, -(-rows // ours) - 1), max_size=3)
    return Spread(
        origin=Origin(page_size=theirs, layout=LAYOUT), rows=rows, page_size=ours, hit_pages=hits,
        verified=draw(further),
    )  # fmt: skip


def missing_rows(spread: Spread) -> list[int]:
    """Rows in pages of ours that are not there."""
    return [
        row
        for row in range(spread.rows)
        if row // spread.page_size >= spread.hit_pages and row // spread.page_size not in spread.verified
    ]


@given(spreads())
def test_what_is_pulled_is_every_page_of_theirs_with_a_row_that_we_lack_and_no_other(spread: Spread) -> None:
    size = spread.origin.page_size
    wanted = {row // size for row in missing_rows(spread)}
    pulled = set(range(spread.source_hits, spread.num_source_pages)) - spread.source_verified
    assert pulled == wanted
    for index in range(spread.num_source_pages):
        rows = [row for row in missing_rows(spread) if row // size == index]
        assert spread.lacking(index) == tuple(sorted({row // spread.page_size for row in rows}))


@given(spreads())
def test_relays_write_every_row_that_lacks_once_and_no_page_that_is_there(spread: Spread) -> None:
    pages = tuple(100 + page for page in range(-(-spread.rows // spread.page_size)))
    written: list[int] = []
    size, ours = spread.origin.page_size, spread.page_size
    for index in range(spread.num_source_pages):
        if not spread.lacking(index):
            continue
        relay = spread.relay(index, pages)
        assert relay is not None
        places = dict(relay.targets)
        assert not relay.held & places.keys()
        first = index * size - relay.span_page * size  # of the span
        for row in range(size):
            at = relay.span_page * size + row
            if at >= relay.num_tokens or at // ours in relay.held:
                continue
            assert places[at // ours] == 100 + (first + at) // ours
            written.append(first + at)
    assert sorted(written) == missing_rows(spread)


@given(spreads(), st.integers(0, 40))
def test_a_verified_beginning_is_known_as_far_as_whole_pages_of_ours_go(
    spread: Spread, verified: int
) -> None:
    rows = range(min(verified * spread.origin.page_size, spread.rows))
    lacking = {row // spread.page_size for row in missing_rows(spread) if row not in rows}
    known = min(lacking, default=-(-spread.rows // spread.page_size))
    assert spread.known_pages(verified) == known


def test_equal_pages_are_taken_as_they_are() -> None:
    spread = Spread(origin=Origin(page_size=4), rows=10, page_size=4, hit_pages=1)
    assert spread.relay(1, (7, 8, 9)) is None
    assert (spread.source_hits, spread.num_source_pages, spread.lacking(2)) == (1, 3, (2,))


@given(spreads())
def test_covered_is_a_page_whose_every_row_is_in_a_page_of_theirs(spread: Spread) -> None:
    theirs = set(range(spread.num_source_pages * spread.origin.page_size))
    for page in range(-(-spread.rows // spread.page_size)):
        rows = range(page * spread.page_size, (page + 1) * spread.page_size)
        assert spread.covers(page) == theirs.issuperset(rows)
