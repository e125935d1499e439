"""What the rebalancer is told and what it wants done, as data. Pure.

What lives here: events (from drivers to `rebalance`) and effects (back). What does not: the machine between
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdserve.parallel.coverage import Coverage
from pdserve.parallel.placement_table import Copy, Placement

# -- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReady:
    """A table to come to. It was planned with the ranks that are lost now, or is rejected. copies: from the
    table that is installed to it; None: to be found, which takes long for large tables.
    """

    table: Placement
    copies: tuple[Copy, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDone:
    """A copy's weights are in spare room and have the digest of their source."""

    copy: Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFailed:
    """A copy can not be made. problem: why, in words."""

    copy: Copy
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBoundary:
    """No step runs on any rank. The only moment when a table is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryDone:
    """The canary's step is over. same: the wave's layers gave what they give with the table that serves."""

    same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """A rank does not answer any more. What it computed in the present step is not used."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = PlanReady | CopyDone | CopyFailed | StepBoundary | CanaryDone | RankLost | Tick

# -- effects ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCopy:
    """Bring these weights into spare room of copy.rank, in the background."""

    copy: Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCopies:
    """Free the spare room of these copies, and end those that are still running."""

    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCanary:
    """Compute these layers with this table too in the next step, and compare; its results are not used."""

    table: Placement
    layers: tuple[int, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """Put the copies into their slots, then route by this. Without copies: at once, even within a step that
    failed.
    """

    coverage: Coverage
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantPlan:
    """Plan anew, without these ranks."""

    lost: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """For logs and metrics. outcome: how a plan ended. copies: made and installed."""

    outcome: Literal["done", "rejected", "rolled_back", "copy_failed", "rank_lost"]
    problem: str = ""
    copies: int = 0


Effect = StartCopy | DropCopies | RunCanary | Install | WantPlan | Told
