"""How the client commands reach a router: its address, our certificate with TLS, and who we are."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.client import AsyncClient, Client
from pdserve.client.connect import ClientOptions
from pdserve.config.tls import TlsSettings
from pdserve.rpc.fleet_auth import METADATA_KEY, fleet_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router to call."""

    address: str
    options: ClientOptions = field(default_factory=ClientOptions)

    @classmethod
    def of(cls, address: str, settings: TlsSettings, secret: str) -> Router:
        """With the certificate of a component, as a member of its fleet. secret: the fleet's, in hex."""
        options = ClientOptions(
            tls_ca=settings.tls_ca,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            tls_server_name=settings.tls_server_name,
            metadata=((METADATA_KEY, fleet_token(bytes.fromhex(secret))),),
        )
        return cls(address=address, options=options)

    def client(self) -> Client:
        """A blocking client. Raises ConfigError."""
        return Client(self.address, **self.options)

    def async_client(self) -> AsyncClient:
        """An asyncio client. Raises ConfigError."""
        return AsyncClient(self.address, **self.options)
