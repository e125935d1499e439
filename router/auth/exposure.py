"""Where a listener for clients may be bound, by what it asks of them."""

from __future__ import annotations

from pdserve.errors import ConfigError
from pdserve.rpc.server import is_loopback


def check_exposure(name: str, host: str, *, encrypted: bool, asks: bool, insecure: bool) -> None:
    """Raises ConfigError for an address that others can reach where anybody may call, or anybody may listen.

    name: of the setting. asks: for a key, a token or a client's certificate. insecure: --insecure was given.
    """
    if insecure or is_loopback(host) or (encrypted and asks):
        return
    if not encrypted:
        raise ConfigError(
            f"{name}: beyond loopback keys and prompts must be encrypted: give --tls-ca, --tls-cert and "
            "--tls-key, use 127.0.0.1, or give --insecure on a network you trust"
        )
    raise ConfigError(
        f"{name}: beyond loopback clients must be known: give --api-key-file, or --jwt-issuer, use "
        "127.0.0.1, or give --insecure on a network you trust"
    )
