"""Prefill ↔ decode: every message of the page protocol, in its envelope."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import InvalidRequest
from pdserve.messages import (
    Abort,
    Ack,
    Announce,
    Commit,
    Envelope,
    Finish,
    Grant,
    Nack,
    Renew,
    TransferMessage,
)
from pdserve.rpc.convert.ledger import ledger_from_pb, ledger_to_pb
from pdserve.rpc.convert.values import (
    finish_from_pb,
    finish_to_pb,
    key_from_pb,
    key_to_pb,
    logprob_from_pb,
    logprob_to_pb,
    outcome_from_pb,
    outcome_to_pb,
)
from pdserve.rpc.outbox import MAX_BATCH
from pdserve.rpc.v1 import transfer_pb2 as pb
from pdserve.types import PageName


def page_name_to_pb(value: PageName) -> pb.PageName:
    return pb.PageName(pool_id=value.pool_id, page=value.page, generation=value.generation)


def page_name_from_pb(message: pb.PageName) -> PageName:
    return PageName(pool_id=message.pool_id, page=message.page, generation=message.generation)


def envelope_to_pb(value: Envelope) -> pb.Envelope:
    """One of an ExchangeRequest (D → P) or an ExchangeResponse (P → D)."""
    out = pb.Envelope(
        sender=value.sender,
        sender_incarnation=value.sender_incarnation,
        receiver_incarnation=value.receiver_incarnation,
    )
    _fill(out, value.message)
    return out


def _fill(out: pb.Envelope, message: TransferMessage) -> None:
    match message:
        case Grant():
            out.grant.CopyFrom(
                pb.Grant(
                    key=key_to_pb(message.key),
                    want=message.want,
                    credit=message.credit,
                    ticket=message.ticket,
                )
            )
        case Announce():
            out.announce.CopyFrom(_announce_to_pb(message))
        case Ack():
            out.ack.CopyFrom(pb.Ack(key=key_to_pb(message.key), index=message.index))
        case Nack():
            nack = pb.Nack(key=key_to_pb(message.key), index=message.index, digest=message.digest)
            out.nack.CopyFrom(nack)
        case Finish():
            out.finish.CopyFrom(_finish_to_pb(message))
        case Commit():
            out.commit.CopyFrom(pb.Commit(key=key_to_pb(message.key)))
        case Renew():
            keys = [key_to_pb(key) for key in message.keys]
            out.renew.CopyFrom(pb.Renew(keys=keys, answer=message.answer))
        case Abort():
            outcome = outcome_to_pb(message.outcome)
            abort = pb.TransferAbort(key=key_to_pb(message.key), outcome=outcome, detail=message.detail)
            out.abort.CopyFrom(abort)


def envelope_from_pb(message: pb.Envelope) -> Envelope:
    """Raises InvalidRequest for an envelope without a sender or a message this version knows."""
    if not message.sender or not message.sender_incarnation:
        raise InvalidRequest.field("envelope.sender", "has no id or no incarnation")
    return Envelope(
        sender=message.sender,
        sender_incarnation=message.sender_incarnation,
        receiver_incarnation=message.receiver_incarnation,
        message=_content(message),
    )


def envelopes_from_pb(messages: Sequence[pb.Envelope]) -> tuple[list[Envelope], int]:
    """Those that can be read, and how many can not: one that is from a later version, or broken, must not
    take the others along. Nobody sends more than MAX_BATCH at once; what is beyond is not read."""
    read: list[Envelope] = []
    num_unreadable = max(0, len(messages) - MAX_BATCH)
    for message in messages[:MAX_BATCH]:
        try:
            read.append(envelope_from_pb(message))
        except InvalidRequest:
            num_unreadable += 1
    return read, num_unreadable


def _content(message: pb.Envelope) -> TransferMessage:
    match message.WhichOneof("message"):
        case "announce":
            return _announce_from_pb(message.announce)
        case "ack":
            return Ack(key=key_from_pb(message.ack.key), index=message.ack.index)
        case "grant":
            grant = message.grant
            return Grant(
                key=key_from_pb(grant.key), want=tuple(grant.want), credit=grant.credit, ticket=grant.ticket
            )
        case "nack":
            nack = message.nack
            return Nack(key=key_from_pb(nack.key), index=nack.index, digest=nack.digest)
        case "finish":
            return _finish_from_pb(message.finish)
        case "commit":
            return Commit(key=key_from_pb(message.commit.key))
        case "renew":
            renew = message.renew
            return Renew(keys=tuple(key_from_pb(key) for key in renew.keys), answer=renew.answer)
        case "abort":
            abort = message.abort
            outcome = outcome_from_pb(abort.outcome)
            return Abort(key=key_from_pb(abort.key), outcome=outcome, detail=abort.detail)
        case _:
            raise InvalidRequest.field("envelope.message", "is not set")


def _announce_to_pb(value: Announce) -> pb.Announce:
    return pb.Announce(
        key=key_to_pb(value.key),
        index=value.index,
        page=page_name_to_pb(value.page),
        valid_rows=value.valid_rows,
        content_key=value.content_key,
        digest=value.digest,
        sealed_s=value.sealed_s,
    )


def _announce_from_pb(message: pb.Announce) -> Announce:
    return Announce(
        key=key_from_pb(message.key),
        index=message.index,
        page=page_name_from_pb(message.page),
        valid_rows=message.valid_rows,
        content_key=message.content_key,
        digest=message.digest,
        sealed_s=message.sealed_s,
    )


def _finish_to_pb(value: Finish) -> pb.Finish:
    return pb.Finish(
        key=key_to_pb(value.key),
        index=value.index,
        token_id=value.token_id,
        next_counter=value.next_counter,
        finish=finish_to_pb(value.finish),
        num_announced=value.num_announced,
        digest_of_digests=value.digest_of_digests,
        ledger=ledger_to_pb(value.ledger),
        logprob=None if value.logprob is None else logprob_to_pb(value.logprob),
    )


def _finish_from_pb(message: pb.Finish) -> Finish:
    return Finish(
        key=key_from_pb(message.key),
        index=message.index,
        token_id=message.token_id,
        next_counter=message.next_counter,
        finish=finish_from_pb(message.finish),
        num_announced=message.num_announced,
        digest_of_digests=message.digest_of_digests,
        ledger=ledger_from_pb(message.ledger),
        logprob=logprob_from_pb(message.logprob) if message.HasField("logprob") else None,
    )
