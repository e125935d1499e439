"""What the ranks of the parallel tests do inside their processes; the tests judge what they return.

Legend: T tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdserve.errors import WorkerLost
from pdserve.models.loader import load_model
from pdserve.parallel.expert_snapshot import snapshot_from_json
from pdserve.parallel.group import GroupConfig, TorchGroup, open_group
from pdserve.parallel.shm_group import SLOT_BYTES, ShmGroup, segment_bytes
from tests.support.parallel_script import run_script, script_runner


def group_of(
    rank: int, size: int, folder: Path, exchange: str = "gloo", **fields: Any
) -> TorchGroup | ShmGroup:
    """Threads are few: ranks of a test share two cores with everything else."""
    torch.set_num_threads(1)
    if exchange == "shm":
        fd = os.open(folder / "segment", os.O_RDWR | os.O_CREAT, 0o600)
        slot_bytes = fields.pop("slot_bytes", SLOT_BYTES)
        os.ftruncate(fd, segment_bytes(size, slot_bytes))
        return ShmGroup(fd, rank=rank, size=size, slot_bytes=slot_bytes, **fields)
    return open_group(GroupConfig(rank=rank, size=size, meeting=folder / "meet", **fields))


def listening() -> list[str]:
    """Addresses (hex, as the kernel prints them) on which this process accepts TCP connections."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the directory's own descriptor
            continue
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def collectives(rank: int, size: int, folder: Path, exchange: str) -> dict[str, Any]:
    """Sums and gathers of numbers that tell the ranks apart, and where we listen meanwhile."""
    group = group_of(rank, size, folder, exchange)
    total = torch.full((3, 5), float(rank + 1))
    group.add(total)
    whole = torch.full((7,), -2147483648 if rank == 0 else 0, dtype=torch.int32)
    group.add(whole)
    mine = torch.full((2, 3), rank, dtype=torch.bfloat16)
    parts, first = group.gather(mine), group.gather_first(mine)
    return {
        "sum": total.flatten().tolist(),
        "integers": whole.tolist(),
        "parts": parts.tolist(),
        "first": None if first is None else first.tolist(),
        "calls": group.traffic.num_calls,
        "bytes": group.traffic.num_bytes,
        "listening": listening(),
    }


def one_leaves(rank: int, size: int, folder: Path) -> Any:
    """The last rank ends without a word; the others say what they are told, and how a second try ends."""
    group = group_of(rank, size, folder, timeout_s=20.0)
    group.add(torch.ones(4))
    if rank == size - 1:
        os._exit(0)
    return [_error(group), _error(group)]


def one_is_silent(rank: int, size: int, folder: Path, exchange: str) -> Any:
    """The last rank lives and takes no part until the others have given up."""
    group = group_of(rank, size, folder, exchange, timeout_s=0.5)
    if rank == size - 1:
        return (folder / "fifo").read_text() or None
    told = _error(group)
    (folder / "fifo").write_text("")
    return told


def nobody_comes(rank: int, size: int, folder: Path) -> Any:
    """One rank waits for another that never comes."""
    try:
        group_of(0, size + 1, folder, timeout_s=0.5)
    except WorkerLost as error:
        return error.message
    return None


def _error(group: TorchGroup | ShmGroup) -> str | None:
    try:
        group.add(torch.ones(4))
    except WorkerLost as error:
        return error.message
    return None


def same_steps(rank: int, size: int, folder: Path, exchange: str, cases: list[list[Any]]) -> list[Any]:
    """Runs the script of `parallel_script` for every (model, dtype, deterministic, snapshot of experts or
    nothing); rank 0 keeps the logits.

    Returns, for each case, what every step said of its tokens, and this rank's KV heads.
    """
    group = group_of(rank, size, folder, exchange)
    told = []
    for number, (model, dtype, deterministic, *placed) in enumerate(cases):
        table = snapshot_from_json(placed[0]).table if placed else None
        runner = script_runner(
            load_model(model, dtype), deterministic=deterministic, group=group, placement=table
        )
        tokens, logits = run_script(runner)
        if rank == 0:
            np.save(folder / f"logits-{number}.npy", logits)
        told.append({"tokens": tokens, "numerics": runner.numerics_id})
    return told


def many_turns(rank: int, size: int, folder: Path, turns: int) -> bool:
    """Sums and gathers of all lengths around a tiny slot's, one after the other; whether all were right."""
    group = group_of(rank, size, folder, "shm", slot_bytes=256)
    for turn in range(turns):
        count = 1 + 37 * turn % 300
        mine = torch.arange(count, dtype=torch.float32) + 1000 * rank + turn
        wanted = torch.stack([torch.arange(count) + 1000.0 * r + turn for r in range(size)])
        if turn % 3 == 0:
            first = group.gather_first(mine)
            good = first is None or torch.equal(first, wanted)
        elif turn % 3 == 1:
            good = torch.equal(group.gather(mine), wanted)
        else:
            group.add(mine)
            good = torch.equal(mine, wanted.sum(0))
        if not good:
            return False
    return True
