"""Content keys: equal for equal prefixes under equal terms, and different for everything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvcache.prefix import KeyChain, content_keys, page_keys, tail_key

TERMS = {"salt": b"tenant", "model": "m", "numerics": "n"}
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
sizes = st.integers(1, 9)


@given(a=tokens, b=tokens, size=sizes)
def test_keys_agree_exactly_as_far_as_the_pages_do(a: list[int], b: list[int], size: int) -> None:
    keys_a, keys_b = (content_keys(each, size, **TERMS) for each in (a, b))
    assert len(keys_a) == len(a) // size
    assert all(len(key) == 16 for key in keys_a)
    for index, (key_a, key_b) in enumerate(zip(keys_a, keys_b, strict=False)):
        end = (index + 1) * size
        assert (key_a == key_b) == (a[:end] == b[:end])


@pytest.mark.parametrize("change", [{"salt": b"other"}, {"model": "x"}, {"numerics": "x"}])
def test_tenant_model_and_numerics_are_in_every_key(change: dict[str, object]) -> None:
    ids = list(range(8))
    ours = page_keys([*ids, 1], 4, **TERMS)
    theirs = page_keys([*ids, 1], 4, **{**TERMS, **change})  # type: ignore[arg-type]
    assert not set(ours) & set(theirs)


def test_terms_do_not_run_into_each_other() -> None:
    one = content_keys([1], 1, salt=b"ab", model="c", numerics="")
    other = content_keys([1], 1, salt=b"a", model="bc", numerics="")
    assert one != other


@given(ids=tokens, size=st.integers(2, 9))
def test_a_tail_is_neither_a_full_page_nor_another_tail(ids: list[int], size: int) -> None:
    rows = len(ids) % size
    if not rows:
        with pytest.raises(ValueError, match="no tail"):
            tail_key(ids, size, **TERMS)
        return
    key = tail_key(ids, size, **TERMS)
    assert key not in content_keys(ids, size, **TERMS)
    assert key not in content_keys(ids, rows, **TERMS)  # the same rows as a full page of another size
    longer = [*ids, 0]
    if len(longer) % size:
        assert tail_key(longer, size, **TERMS) != key
    assert page_keys(ids, size, **TERMS) == (*content_keys(ids, size, **TERMS), key)


@given(ids=tokens, size=sizes, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_a_chain_grows_to_the_same_keys(ids: list[int], size: int, cuts: list[int]) -> None:
    chain = KeyChain(size, salt=b"tenant", model="m", numerics="n")
    for cut in sorted(cuts):
        chain.extend(ids[:cut])
    assert tuple(chain.extend(ids)) == content_keys(ids, size, **TERMS)
