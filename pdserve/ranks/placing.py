"""The placement of experts that a replica starts with, and what each of its ranks makes of it."""

from __future__ import annotations

from pdserve.config.worker import WorkerConfig
from pdserve.engine.runner import ModelRunner
from pdserve.errors import ConfigError
from pdserve.models.config import ModelConfig
from pdserve.models.expert_bank import ExpertBank
from pdserve.models.sharded_experts import expert_slots
from pdserve.parallel.expert_files import read_placement
from pdserve.parallel.placement_table import Placement, Topology, contiguous
from pdserve.ranks.tender import Tender


def first_table(worker: WorkerConfig, config: ModelConfig) -> Placement | None:
    """The setting's, or experts in order; None without experts. Every rank of a replica finds the same.

    Raises ConfigError for a file that can not be read, and for more ranks than experts or too few slots.
    """
    table = read_placement(worker.expert_placement)
    if config.experts is None or table is not None:
        return table
    most = max(len(own) for own in expert_slots(config, worker.tp))
    slots = worker.expert_slots or most
    if slots < most:
        raise ConfigError(f"expert_slots: {slots} are too few for {config.experts.num_experts} experts")
    num_layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    topology = Topology(num_nodes=1, ranks_per_node=worker.tp)
    return contiguous(num_layers, config.experts.num_experts, topology, slots)


def tender_of(runner: ModelRunner, table: Placement, rank: int) -> Tender:
    """Of a rank whose runner was built with this table."""
    slots = range(rank * table.slots_per_rank, (rank + 1) * table.slots_per_rank)
    homes = [
        [[(home.slot, home.share) for home in of_expert] for of_expert in layer] for layer in table.layers
    ]
    return Tender(ExpertBank.of(runner.decoder, homes, slots))
