"""Records of workers: how to reach them, what they can exchange, what they hold and how loaded they are."""

from __future__ import annotations

from dataclasses import fields

from pdserve.errors import InvalidRequest
from pdserve.rpc.convert.values import role_from_pb, role_to_pb
from pdserve.rpc.v1 import common_pb2 as pb
from pdserve.types import (
    AGE_LIMITS_S,
    CapabilityRecord,
    ModelLimits,
    PageAges,
    PeerRef,
    UsedState,
    WorkerLoad,
    WorkerRecord,
)

_USED = {state.value: state for state in UsedState}


def peer_to_pb(value: PeerRef) -> pb.PeerRef:
    return pb.PeerRef(**{f.name: getattr(value, f.name) for f in fields(PeerRef)})


def peer_from_pb(message: pb.PeerRef) -> PeerRef:
    """Raises InvalidRequest for a peer without id or incarnation."""
    if not message.worker_id or not message.incarnation:
        raise InvalidRequest.field("peer", "has no worker id or no incarnation")
    return PeerRef(**{f.name: getattr(message, f.name) for f in fields(PeerRef)})


def capability_to_pb(value: CapabilityRecord) -> pb.CapabilityRecord:
    return pb.CapabilityRecord(
        layout=value.layout,
        numerics=value.numerics,
        model=value.model,
        tokenizer=value.tokenizer,
        dtype=value.dtype,
        page_size=value.page_size,
        page_bytes=value.page_bytes,
        transports=value.transports,
        protocol_min=value.protocol[0],
        protocol_max=value.protocol[1],
        codecs=value.codecs,
        pages=value.pages,
    )


def capability_from_pb(message: pb.CapabilityRecord) -> CapabilityRecord:
    return CapabilityRecord(
        layout=message.layout,
        numerics=message.numerics,
        model=message.model,
        tokenizer=message.tokenizer,
        dtype=message.dtype,
        page_size=message.page_size,
        page_bytes=message.page_bytes,
        transports=tuple(message.transports),
        protocol=(message.protocol_min, message.protocol_max),
        codecs=tuple(message.codecs),
        pages=message.pages,
    )


def limits_to_pb(value: ModelLimits) -> pb.ModelLimits:
    return pb.ModelLimits(
        vocab_size=value.vocab_size,
        max_context=value.max_context,
        end_token_ids=value.end_token_ids,
        bos_token_id=value.bos_token_id,
    )


def limits_from_pb(message: pb.ModelLimits) -> ModelLimits:
    """Raises InvalidRequest for a model without vocabulary or context."""
    if not message.vocab_size or not message.max_context:
        raise InvalidRequest.field("limits", "vocab_size and max_context must be set")
    return ModelLimits(
        vocab_size=message.vocab_size,
        max_context=message.max_context,
        end_token_ids=tuple(message.end_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
    )


_LOAD = tuple(f.name for f in fields(WorkerLoad) if f.name != "page_ages")


def load_to_pb(value: WorkerLoad) -> pb.WorkerLoad:
    ages = [pb.PageAges(state=a.state.value, counts=a.counts) for a in value.page_ages]
    return pb.WorkerLoad(**{name: getattr(value, name) for name in _LOAD}, page_ages=ages)


def load_from_pb(message: pb.WorkerLoad) -> WorkerLoad:
    """Raises InvalidRequest for page ages of a state this version does not know."""
    ages = tuple(_ages_from_pb(a) for a in message.page_ages)
    return WorkerLoad(**{name: getattr(message, name) for name in _LOAD}, page_ages=ages)


def _ages_from_pb(message: pb.PageAges) -> PageAges:
    if message.state not in _USED or len(message.counts) != len(AGE_LIMITS_S) + 1:
        raise InvalidRequest.field("page_ages", "has a state or ages this version does not know")
    return PageAges(state=_USED[message.state], counts=tuple(message.counts))


def worker_record_to_pb(value: WorkerRecord) -> pb.WorkerRecord:
    return pb.WorkerRecord(
        peer=peer_to_pb(value.peer),
        role=role_to_pb(value.role),
        capability=capability_to_pb(value.capability),
        limits=limits_to_pb(value.limits),
        model_name=value.model_name,
        pool_pages=value.pool_pages,
        page_size=value.page_size,
        pid=value.pid,
        metrics=value.metrics,
    )


def worker_record_from_pb(message: pb.WorkerRecord) -> WorkerRecord:
    """Raises InvalidRequest for a record without identity, role or limits."""
    return WorkerRecord(
        peer=peer_from_pb(message.peer),
        role=role_from_pb(message.role),
        capability=capability_from_pb(message.capability),
        limits=limits_from_pb(message.limits),
        model_name=message.model_name,
        pool_pages=message.pool_pages,
        page_size=message.page_size,
        pid=message.pid,
        metrics=message.metrics,
    )
