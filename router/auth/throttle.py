"""A bound on guesses: how many wrong credentials an address may show in a minute. A token bucket for each.

The table is bounded: the address that was quiet longest goes first, and then starts anew with a full bucket.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from urllib.parse import unquote

from pdserve.clock import Clock
from router.auth.refusals import throttled

MAX_ADDRESSES = 4096


class Throttle:
    """Counts failures by address. One event loop's."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        """per_minute: failures allowed, all of them at once if need be; 0: no bound."""
        self._per_minute, self._clock = per_minute, clock
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()  # failures left, as of when

    def check(self, peer: str) -> None:
        """Raises Refused while an address has no failure left."""
        if not self._per_minute:
            return
        left = self._left(address_of(peer))
        if left < 1:
            raise throttled((1 - left) * 60 / self._per_minute)

    def failed(self, peer: str) -> None:
        """One more wrong credential from this address."""
        if not self._per_minute:
            return
        address = address_of(peer)
        self._seen[address] = (max(0.0, self._left(address) - 1), self._clock.now())
        self._seen.move_to_end(address)
        if len(self._seen) > MAX_ADDRESSES:
            self._seen.popitem(last=False)

    def _left(self, address: str) -> float:
        left, at = self._seen.get(address, (float(self._per_minute), self._clock.now()))
        return min(float(self._per_minute), left + (self._clock.now() - at) * self._per_minute / 60)


def address_of(peer: str) -> str:
    """The address without its port, of gRPC's `ipv4:1.2.3.4:5` or of a plain host. IPv6: the network of 64
    bits, as one host has that many addresses."""
    text = unquote(peer)
    if text.startswith(("ipv4:", "ipv6:")):
        text = text[5:].rpartition(":")[0]
    text = text.strip("[]").partition("%")[0]
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return text[:64]
    if found.version == 6:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
