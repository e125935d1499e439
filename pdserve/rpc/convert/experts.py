"""Loads and homes of experts, from worker to router to client."""

from __future__ import annotations

from pdserve.api import ExpertReport, RebalanceAnswer
from pdserve.errors import InvalidRequest
from pdserve.rpc.v1 import common_pb2 as pb


def expert_report_to_pb(value: ExpertReport) -> pb.ExpertReport:
    losses = value.balance_losses or (0.0,) * len(value.layers)
    layers = [
        pb.ExpertLayer(
            layer=layer,
            loads=loads,
            homes=[pb.ExpertHomes(slots=[s for s, _ in h], shares=[x for _, x in h]) for h in homes],
            balance_loss=loss,
        )
        for layer, loads, homes, loss in zip(value.layers, value.loads, value.homes, losses, strict=True)
    ]
    return pb.ExpertReport(
        name=value.name,
        nodes=value.nodes,
        ranks_per_node=value.ranks_per_node,
        lost_ranks=value.lost_ranks,
        slots_per_rank=value.slots_per_rank,
        layers=layers,
        rebalancing=value.rebalancing,
        last_rebalance=value.last_rebalance,
    )


def expert_report_from_pb(message: pb.ExpertReport) -> ExpertReport:
    """Raises InvalidRequest for copies without a share. Whether numbers make sense is the reader's check."""
    return ExpertReport(
        name=message.name,
        layers=tuple(layer.layer for layer in message.layers),
        loads=tuple(tuple(layer.loads) for layer in message.layers),
        nodes=message.nodes,
        ranks_per_node=message.ranks_per_node,
        lost_ranks=tuple(message.lost_ranks),
        slots_per_rank=message.slots_per_rank,
        homes=tuple(tuple(_homes(homes) for homes in layer.homes) for layer in message.layers),
        rebalancing=message.rebalancing,
        last_rebalance=message.last_rebalance,
        balance_losses=tuple(layer.balance_loss for layer in message.layers),
    )


def rebalance_answer_to_pb(value: RebalanceAnswer) -> pb.RebalanceAnswer:
    return pb.RebalanceAnswer(
        name=value.name,
        started=value.started,
        reason=value.reason,
        copies=value.copies,
        gain=value.gain,
    )


def rebalance_answer_from_pb(message: pb.RebalanceAnswer) -> RebalanceAnswer:
    return RebalanceAnswer(
        name=message.name,
        started=message.started,
        reason=message.reason,
        copies=message.copies,
        gain=message.gain,
    )


def _homes(message: pb.ExpertHomes) -> tuple[tuple[int, float], ...]:
    if len(message.slots) != len(message.shares):
        raise InvalidRequest.field("homes", "has slots without shares")
    return tuple(zip(message.slots, message.shares, strict=True))
