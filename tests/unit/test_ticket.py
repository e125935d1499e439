"""Tickets: what is minted verifies and reads back; anything else is refused before it is parsed."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.ticket import MAX_TICKET_BYTES, Side, TicketFacts, mint, request_hash, verify
from pdserve.errors import PermissionRefused
from pdserve.types import Grammar, GrammarKind, HandoverMode, Key, SamplingParams

SECRET = b"a secret of the fleet, 32 bytes."
FACTS = TicketFacts(
    key=Key(request_id="r-1", term=2, epoch=3),
    prefill_incarnation=2**64 - 1,
    decode_incarnation=7,
    emitter="decode-0",
    mode=HandoverMode.DISAGGREGATED,
    tenant="team",
    request_hash=bytes(range(32)),
    page_budget=40,
    num_choices=1,
    prefill_expires=100.0,
    decode_expires=2000.5,
)
u64 = st.integers(0, 2**64 - 1)
seconds = st.floats(1, 1e9)
facts_strategy = st.builds(
    TicketFacts,
    key=st.builds(Key, request_id=st.text(max_size=40), term=u64, epoch=u64),
    prefill_incarnation=u64,
    decode_incarnation=u64,
    emitter=st.text(max_size=40),
    mode=st.sampled_from(HandoverMode),
    tenant=st.text(max_size=40),
    request_hash=st.binary(max_size=32),
    page_budget=u64,
    num_choices=u64,
    prefill_expires=seconds,
    decode_expires=seconds,
)


@given(facts_strategy, st.sampled_from(Side))
def test_what_is_minted_reads_back(facts: TicketFacts, side: Side) -> None:
    assert verify(SECRET, mint(SECRET, facts), now=0.5, side=side) == facts


@given(facts_strategy, facts_strategy)
def test_two_facts_never_share_a_ticket(one: TicketFacts, other: TicketFacts) -> None:
    assert (mint(SECRET, one) == mint(SECRET, other)) == (one == other)


def test_a_byte_moved_between_fields_gives_another_ticket() -> None:
    one = dataclasses.replace(FACTS, emitter="ab", tenant="c")
    other = dataclasses.replace(FACTS, emitter="a", tenant="bc")
    assert mint(SECRET, one)[:-32] != mint(SECRET, other)[:-32]


def test_every_flipped_bit_is_refused() -> None:
    ticket = mint(SECRET, FACTS)
    for at in range(len(ticket) * 8):
        forged = bytearray(ticket)
        forged[at // 8] ^= 1 << at % 8
        with pytest.raises(PermissionRefused, match="not genuine"):
            verify(SECRET, bytes(forged), now=0, side=Side.DECODE)


@given(st.binary(max_size=600))
def test_garbage_is_refused(ticket: bytes) -> None:
    with pytest.raises(PermissionRefused):
        verify(SECRET, ticket, now=0, side=Side.DECODE)


@pytest.mark.parametrize("size", [0, 31, 32, 35, 36, MAX_TICKET_BYTES + 1])
def test_any_size_is_refused_without_a_mac(size: int) -> None:
    with pytest.raises(PermissionRefused):
        verify(SECRET, bytes(size), now=0, side=Side.PREFILL)


def test_another_secret_is_refused() -> None:
    with pytest.raises(PermissionRefused, match="not genuine"):
        verify(SECRET[::-1], mint(SECRET, FACTS), now=0, side=Side.DECODE)


def test_a_short_secret_mints_nothing() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        mint(b"short", FACTS)


def test_each_side_has_its_own_expiry() -> None:
    ticket = mint(SECRET, FACTS)
    assert verify(SECRET, ticket, now=99.9, side=Side.PREFILL) == FACTS
    with pytest.raises(PermissionRefused, match="expired"):
        verify(SECRET, ticket, now=100.0, side=Side.PREFILL)
    assert verify(SECRET, ticket, now=100.0, side=Side.DECODE) == FACTS


def test_what_is_expected_must_be_there() -> None:
    ticket = mint(SECRET, FACTS)
    fitting = {
        "key": FACTS.key,
        "incarnation": 7,
        "emitter": "decode-0",
        "mode": HandoverMode.DISAGGREGATED,
        "tenant": "team",
        "request_hash": bytes(range(32)),
    }
    assert verify(SECRET, ticket, now=0, side=Side.DECODE, **fitting) == FACTS
    wrong = {
        "key": Key(request_id="r-1", term=2, epoch=4),
        "incarnation": 2**64 - 1,
        "emitter": "prefill-0",
        "mode": HandoverMode.LOCAL,
        "tenant": "",
        "request_hash": bytes(32),
    }
    for name, value in wrong.items():
        with pytest.raises(PermissionRefused, match="minted for another") as refused:
            verify(SECRET, ticket, now=0, side=Side.DECODE, **(fitting | {name: value}))
        assert "team" not in refused.value.message


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_expires": float("nan")},
        {"decode_expires": float("inf")},
        {"page_budget": -1},
        {"prefill_incarnation": 2**64},
        {"tenant": "t" * 5000},
    ],
)
def test_facts_that_can_not_be_encoded_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="ticket"):
        mint(SECRET, dataclasses.replace(FACTS, **change))


def test_the_request_hash_depends_on_every_parameter() -> None:
    base = SamplingParams()
    changes = (
        {"temperature": 0.5},
        {"top_k": 1},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"seed": 1},
        {"max_tokens": 17},
        {"stop_token_ids": (3,)},
        {"ignore_eos": True},
        {"typical_p": 0.5},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": ((3, 1.0),)},
        {"logit_bias": ((3, 2.0),)},
        {"min_tokens": 1},
        {"bad_words": ((1, 2),)},
        {"bad_words": ((1,), (2,))},
        {"logprobs": 0},
        {"grammar": Grammar(kind=GrammarKind.REGEX, text="a")},
        {"grammar": Grammar(kind=GrammarKind.LARK, text="a")},
    )
    assert {name for change in changes for name in change} == {f.name for f in dataclasses.fields(base)}
    hashes = {request_hash((1, 2), dataclasses.replace(base, **change)) for change in changes}
    hashes |= {request_hash(ids, base) for ids in ((1, 2), (2, 1), (1,), (1, 2, 0), ())}
    hashes |= {request_hash((1, 2), base, salt) for salt in ("a", "b")}
    assert len(hashes) == len(changes) + 7


def test_a_token_moved_to_the_stop_ids_changes_the_hash() -> None:
    one = request_hash((1, 2), SamplingParams(stop_token_ids=(3,)))
    assert one != request_hash((1,), SamplingParams(stop_token_ids=(2, 3)))


def test_the_request_hash_survives_single_precision() -> None:
    (rounded,) = struct.unpack("f", struct.pack("f", 0.7))
    assert rounded != 0.7
    assert request_hash([5], SamplingParams(temperature=0.7)) == request_hash(
        (5,), SamplingParams(temperature=rounded)
    )


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**31), max_size=50))
def test_list_and_tuple_hash_alike(ids: list[int]) -> None:
    assert request_hash(ids, SamplingParams()) == request_hash(tuple(ids), SamplingParams())


@pytest.mark.parametrize("params", [{"temperature": 1e300}, {"top_k": 2**63}, {"max_tokens": 2**63}])
def test_values_no_message_carries_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        request_hash((1,), SamplingParams(**params))


def test_token_ids_beyond_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        request_hash((2**63,), SamplingParams())
