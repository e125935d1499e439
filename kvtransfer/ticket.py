"""Transfer tickets: the router mints one per try, both workers and the data plane check it (protocol.md §3).

What lives here: the facts of a ticket, their one canonical encoding, the HMAC-SHA256 over it and the hash
that binds a ticket to a request. What does not: where the fleet's secret comes from, tombstones, sockets.
A ticket carries its facts in the clear; they mean nothing before `verify` has checked the MAC.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from pdserve.errors import PermissionRefused
from pdserve.types import HandoverMode, Key, SamplingParams

MAGIC = b"PDT1"
MAC_BYTES = 32
MAX_TICKET_BYTES = 4096
MIN_SECRET_BYTES = 16
_NUM_FIELDS = 13
_MAC_PURPOSE = b"pdserve transfer ticket v1\0"
_HASH_PERSON = b"pdserve-request"


class Side(StrEnum):
    """Whose clock and incarnation a ticket is checked against."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketFacts:
    """What a ticket says.

    prefill_incarnation: 0 in local mode. emitter: id of the one worker that emits tokens in this epoch.
    request_hash: see `request_hash`. page_budget: KV pages at most. num_choices: the field's `n`.
    prefill_expires, decode_expires: seconds on that worker's own monotonic clock.
    """

    key: Key
    prefill_incarnation: int
    decode_incarnation: int
    emitter: str
    mode: HandoverMode
    tenant: str
    request_hash: bytes
    page_budget: int
    num_choices: int
    prefill_expires: float
    decode_expires: float

    def incarnation(self, side: Side) -> int:
        """The incarnation the ticket names for `side`."""
        return self.prefill_incarnation if side is Side.PREFILL else self.decode_incarnation

    def expires(self, side: Side) -> float:
        """Expiry on `side`'s monotonic clock, seconds."""
        return self.prefill_expires if side is Side.PREFILL else self.decode_expires


def mint(secret: bytes, facts: TicketFacts) -> bytes:
    """A ticket for `facts`, at most MAX_TICKET_BYTES. Raises ValueError for facts that can not be encoded."""
    body = _encode(facts)
    if len(body) + MAC_BYTES > MAX_TICKET_BYTES:
        raise ValueError("ticket facts are too long")
    return body + _mac(secret, body)


def verify(
    secret: bytes,
    ticket: bytes,
    *,
    now: float,
    side: Side,
    key: Key | None = None,
    incarnation: int | None = None,
    emitter: str | None = None,
    mode: HandoverMode | None = None,
    tenant: str | None = None,
    request_hash: bytes | None = None,
) -> TicketFacts:
    """The facts of a genuine, unexpired ticket that says what the caller expects; None expects nothing.

    now: seconds on the checking worker's monotonic clock. incarnation: the checking worker's own.
    Raises PermissionRefused, whose message names what does not fit but none of its values.
    """
    facts = _open(secret, ticket)
    if not now < facts.expires(side):
        raise PermissionRefused("The transfer ticket has expired; the router must mint a new one.")
    expectations = (
        ("request key", key, facts.key),
        ("worker incarnation", incarnation, facts.incarnation(side)),
        ("emitting worker", emitter, facts.emitter),
        ("handover mode", mode, facts.mode),
        ("tenant", tenant, facts.tenant),
        ("request content", request_hash, facts.request_hash),
    )
    for what, wanted, found in expectations:
        if wanted is not None and wanted != found:
            raise PermissionRefused(f"The transfer ticket was minted for another {what}.")
    return facts


def request_hash(token_ids: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> bytes:
    """32 bytes that bind a ticket to a request: blake2b over the token ids, the request's own cache salt and
    every sampling parameter.

    Floats count as single precision, which is what the wire carries, so that each hop gets the same hash.
    Raises ValueError for values that no wire message can carry.
    """
    digest = hashlib.blake2b(digest_size=32, person=_HASH_PERSON)
    try:
        for part in (_ids(token_ids), cache_salt.encode(), *_sampling(sampling)):
            digest.update(struct.pack(">Q", len(part)))
            digest.update(part)
    except (OverflowError, struct.error) as error:
        raise ValueError("a token id or sampling parameter is out of range") from error
    return digest.digest()


def _ids(token_ids: Sequence[int]) -> bytes:
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


_FLOATS = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
_WHOLE = ("top_k", "max_tokens", "ignore_eos", "min_tokens")


def _sampling(sampling: SamplingParams) -> Iterator[bytes]:
    """All parameters; a test proves that none is left out."""
    floats = [getattr(sampling, name) for name in _FLOATS]
    biases = [bias for _, bias in sampling.logit_bias]
    # Adding 0.0 turns -0.0 into 0.0: equal parameters must hash equally.
    yield struct.pack(f">{len(floats) + len(biases)}f", *(value + 0.0 for value in (*floats, *biases)))
    yield struct.pack(">Q", sampling.seed & 0xFFFFFFFFFFFFFFFF)
    logprobs = -1 if sampling.logprobs is None else sampling.logprobs
    yield _ids([*(getattr(sampling, name) for name in _WHOLE), logprobs])
    yield _ids(sampling.stop_token_ids)
    yield _ids([token_id for token_id, _ in sampling.logit_bias])
    yield _ids([len(sampling.bad_words), *(len(word) for word in sampling.bad_words)])
    yield from map(_ids, sampling.bad_words)
    if sampling.grammar is not None:
        yield f"{sampling.grammar.kind}:{sampling.grammar.text}".encode()


def _mac(secret: bytes, body: bytes) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the fleet secret must have at least {MIN_SECRET_BYTES} bytes")
    return hmac.digest(secret, _MAC_PURPOSE + body, "sha256")


def _encode(facts: TicketFacts) -> bytes:
    if not (math.isfinite(facts.prefill_expires) and math.isfinite(facts.decode_expires)):
        raise ValueError("a ticket's expiry must be a finite number of seconds")
    try:
        fields = (
            facts.key.request_id.encode(),
            struct.pack(">Q", facts.key.term),
            struct.pack(">Q", facts.key.epoch),
            struct.pack(">Q", facts.prefill_incarnation),
            struct.pack(">Q", facts.decode_incarnation),
            facts.emitter.encode(),
            facts.mode.value.encode(),
            facts.tenant.encode(),
            facts.request_hash,
            struct.pack(">Q", facts.page_budget),
            struct.pack(">Q", facts.num_choices),
            struct.pack(">d", facts.prefill_expires),
            struct.pack(">d", facts.decode_expires),
        )
    except struct.error as error:
        raise ValueError("a ticket's counts must fit 64 unsigned bits") from error
    return MAGIC + b"".join(struct.pack(">H", len(field)) + field for field in fields)


def _open(secret: bytes, ticket: bytes) -> TicketFacts:
    """Checks size and MAC, then reads the facts. Nothing is parsed before the MAC is known to be good."""
    if not len(MAGIC) + MAC_BYTES < len(ticket) <= MAX_TICKET_BYTES:
        _refuse()
    body, mac = ticket[:-MAC_BYTES], ticket[-MAC_BYTES:]
    if not hmac.compare_digest(_mac(secret, body), mac) or not body.startswith(MAGIC):
        _refuse()
    try:
        return _decode(_split(body))
    except (struct.error, ValueError, IndexError):
        _refuse()


def _refuse() -> NoReturn:
    raise PermissionRefused("The transfer ticket is not genuine; only the fleet's routers mint tickets.")


def _split(body: bytes) -> list[bytes]:
    fields, at = [], len(MAGIC)
    while at < len(body):
        (length,) = struct.unpack_from(">H", body, at)
        at += 2 + length
        fields.append(body[at - length : at])
    if at != len(body) or len(fields) != _NUM_FIELDS:
        raise ValueError("wrong number of fields")
    return fields


def _decode(fields: list[bytes]) -> TicketFacts:
    term, epoch, prefill, decode = (struct.unpack(">Q", field)[0] for field in fields[1:5])
    page_budget, num_choices = (struct.unpack(">Q", field)[0] for field in fields[9:11])
    prefill_expires, decode_expires = (struct.unpack(">d", field)[0] for field in fields[11:13])
    return TicketFacts(
        key=Key(request_id=fields[0].decode(), term=term, epoch=epoch),
        prefill_incarnation=prefill,
        decode_incarnation=decode,
        emitter=fields[5].decode(),
        mode=HandoverMode(fields[6].decode()),
        tenant=fields[7].decode(),
        request_hash=fields[8],
        page_budget=page_budget,
        num_choices=num_choices,
        prefill_expires=prefill_expires,
        decode_expires=decode_expires,
    )
