"""Who may reach whom under NetworkPolicies, by Kubernetes' rules: both ends must allow it.

For the pods of one namespace and callers from others. A pod that no policy selects is open. Named ports are
looked up in the pod that is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.manifests import Manifest, selects


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod as policies see it. namespace: the name of another namespace, or empty for the release's own."""

    labels: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    namespace: str = ""

    @classmethod
    def of(cls, template: Manifest) -> Pod:
        """A pod of a template."""
        containers = template["spec"]["containers"]
        ports = {p["name"]: p["containerPort"] for c in containers for p in c.get("ports", ())}
        return cls(labels=template["metadata"]["labels"], ports=ports)


def may_reach(policies: Sequence[Manifest], source: Pod, target: Pod, port: int) -> bool:
    """Whether a TCP connection from one pod to a port of another is let through."""
    ways_out, ways_in = _rules(policies, source, "Egress"), _rules(policies, target, "Ingress")
    out = ways_out is None or any(_lets(rule, "to", target, port, target) for rule in ways_out)
    return out and (ways_in is None or any(_lets(rule, "from", source, port, target) for rule in ways_in))


def _lets(rule: Manifest, side: str, peer: Pod, port: int, target: Pod) -> bool:
    return _takes_peer(rule.get(side), peer) and _takes_port(rule, port, target)


def _rules(policies: Sequence[Manifest], pod: Pod, direction: str) -> list[Manifest] | None:
    """The rules of all policies for a pod; None if there are no policies for it."""
    specs = [p["spec"] for p in policies if selects(p["spec"]["podSelector"], pod.labels)]
    specs = [spec for spec in specs if direction in spec["policyTypes"] and not pod.namespace]
    return [rule for spec in specs for rule in spec.get(direction.lower()) or ()] if specs else None


def _takes_peer(peers: Sequence[Manifest] | None, pod: Pod) -> bool:
    return not peers or any(_is(peer, pod) for peer in peers)


def _is(peer: Manifest, pod: Pod) -> bool:
    if "ipBlock" in peer:
        return False
    spaces = peer.get("namespaceSelector")
    if spaces is None and pod.namespace:
        return False
    if spaces is not None and not selects(spaces, {"kubernetes.io/metadata.name": pod.namespace}):
        return False
    return selects(peer.get("podSelector") or {}, pod.labels)


def _takes_port(peers_rule: Manifest, port: int, target: Pod) -> bool:
    if not peers_rule.get("ports"):
        return True
    for rule in peers_rule["ports"]:
        first = target.ports.get(rule["port"]) if isinstance(rule["port"], str) else rule["port"]
        if rule["protocol"] == "TCP" and first is not None and first <= port <= rule.get("endPort", first):
            return True
    return False
