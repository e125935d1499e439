"""Who may exchange pages, and how a page of one layout becomes a page of another. Pure, and light enough for
the router: no torch, no numpy.

What lives here: `pairing` (which workers fit), `order` and `layout` (what a page looks like, as data),
`record` (the same as text), `origin` (what a reader of other pages has to know), `relayout` (the plan of
copies), `prove` (that a plan is right; it alone needs numpy, so import it by name). What does not: choosing
workers by load (`router.policy`), moving bytes (`kvtransfer.mover`, `kvtransfer.relay`).
"""

from kvtransfer.plan.layout import FULL, LayerKind, ReplicaLayout
from kvtransfer.plan.origin import Origin, bridge_plan, bridged, same
from kvtransfer.plan.pairing import SAME_HOST_ONLY, Mixing, common_transport, pairing_problem
from kvtransfer.plan.record import layout_text, parse_layout
from kvtransfer.plan.relayout import RelayoutPlan, bridge_problem, compile_plan

__all__ = (
    "FULL",
    "SAME_HOST_ONLY",
    "LayerKind",
    "Mixing",
    "Origin",
    "RelayoutPlan",
    "ReplicaLayout",
    "bridge_plan",
    "bridge_problem",
    "bridged",
    "common_transport",
    "compile_plan",
    "layout_text",
    "pairing_problem",
    "parse_layout",
    "same",
)
