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
from pdserve.parallel.group import GroupConfig, TorchGroup, open_group
from tests.support.parallel_script import run_script, script_runner


def group_of(rank: int, size: int, folder: Path, **fields: Any) -> TorchGroup:
    """Threads are few: ranks of a test share two cores with everything else."""
    torch.set_num_threads(1)
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


def collectives(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Sums and gathers of numbers that tell the ranks apart, and where we listen meanwhile."""
    group = group_of(rank, size, folder)
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


def one_is_silent(rank: int, size: int, folder: Path) -> Any:
    """The last rank lives and takes no part until the others have given up."""
    group = group_of(rank, size, folder, timeout_s=0.5)
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


def _error(group: TorchGroup) -> str | None:
    try:
        group.add(torch.ones(4))
    except WorkerLost as error:
        return error.message
    return None


def same_steps(rank: int, size: int, folder: Path, cases: list[list[Any]]) -> list[Any]:
    """Runs the script of `parallel_script` for every (model, dtype, deterministic); rank 0 keeps the logits.

    Returns, for each case, what every step said of its tokens, and this rank's KV heads.
    """
    group = group_of(rank, size, folder)
    told = []
    for number, (model, dtype, deterministic) in enumerate(cases):
        runner = script_runner(load_model(model, dtype), deterministic=deterministic, group=group)
        tokens, logits = run_script(runner)
        if rank == 0:
            np.save(folder / f"logits-{number}.npy", logits)
        told.append({"tokens": tokens, "numerics": runner.numerics_id})
    return told
