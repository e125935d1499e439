"""Page digests: every input counts, the place of the bytes does not."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.digest import DIGEST_BYTES, digest_of_digests, page_digest

BASE = {"layout": "ab12", "layer_first": 0, "layer_last": 29, "shard": 0, "index": 4, "valid_rows": 16}
digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)


@given(st.binary(max_size=300), st.integers(0, 64))
def test_a_digest_is_independent_of_where_the_bytes_lie(payload: bytes, offset: int) -> None:
    arena = memoryview(bytes(offset) + payload + b"tail")
    moved = arena[offset : offset + len(payload)]
    assert page_digest(moved, **BASE) == page_digest(memoryview(payload), **BASE)


def test_every_input_counts() -> None:
    payload = memoryview(bytes(1000))
    changes = (
        {"layout": "ab13"},
        {"layer_first": 1},
        {"layer_last": 30},
        {"shard": 1},
        {"index": 5},
        {"valid_rows": 15},
    )
    found = {page_digest(payload, **(BASE | change)) for change in changes}
    found |= {page_digest(payload, **BASE), page_digest(payload[:-1], **BASE)}
    assert len(found) == len(changes) + 2
    assert {len(digest) for digest in found} == {DIGEST_BYTES}


@given(st.integers(0, 999), st.integers(1, 255))
def test_any_flipped_bits_show(at: int, mask: int) -> None:
    page = bytearray(1000)
    before = page_digest(memoryview(page), **BASE)
    page[at] ^= mask
    assert page_digest(memoryview(page), **BASE) != before


def test_a_layout_name_can_not_pass_for_payload() -> None:
    one = page_digest(memoryview(b"cpayload"), **(BASE | {"layout": "ab"}))
    assert one != page_digest(memoryview(b"payload"), **(BASE | {"layout": "abc"}))


def test_the_header_comes_first() -> None:
    header = b"PDP2" + b"".join(n.to_bytes(4, "big") for n in (0, 29, 0))
    header += (4).to_bytes(8, "big") + (16).to_bytes(4, "big") + (4).to_bytes(2, "big") + b"ab12"
    assert page_digest(memoryview(b"xyz"), **BASE) == xxhash.xxh3_128_digest(
        header.ljust(1024, b"\0") + b"xyz"
    )


def test_a_layout_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="layout"):
        page_digest(memoryview(b"xyz"), **(BASE | {"layout": "a" * 1000}))


@given(st.dictionaries(st.integers(0, 2**40), digests, max_size=12), st.randoms(use_true_random=False))
def test_the_digest_of_digests_ignores_order(found: dict[int, bytes], random) -> None:
    pairs = list(found.items())
    shuffled = random.sample(pairs, len(pairs))
    assert digest_of_digests(shuffled) == digest_of_digests(pairs)
    assert digest_of_digests(pairs, b"a token") != digest_of_digests(pairs)


@given(st.dictionaries(st.integers(0, 9), digests), st.dictionaries(st.integers(0, 9), digests))
def test_the_digest_of_digests_tells_sets_apart(one: dict[int, bytes], other: dict[int, bytes]) -> None:
    assert (digest_of_digests(one.items()) == digest_of_digests(other.items())) == (one == other)


@pytest.mark.parametrize("pairs", [[(1, bytes(16)), (1, bytes(16))], [(0, bytes(15))], [(-1, bytes(16))]])
def test_what_is_no_set_of_digests_is_refused(pairs: list[tuple[int, bytes]]) -> None:
    with pytest.raises(ValueError, match="page digests"):
        digest_of_digests(pairs)
