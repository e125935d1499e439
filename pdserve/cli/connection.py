"""How the client commands reach a router: its address and, with TLS, our certificate."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.client import AsyncClient, Client, TlsOptions
from pdserve.config.tls import TlsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router to call."""

    address: str
    tls: TlsOptions = field(default_factory=TlsOptions)

    @classmethod
    def of(cls, address: str, settings: TlsSettings) -> Router:
        """With the certificate of a component."""
        options = TlsOptions(
            tls_ca=settings.tls_ca,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            tls_server_name=settings.tls_server_name,
        )
        return cls(address=address, tls=options)

    def client(self) -> Client:
        """A blocking client. Raises ConfigError."""
        return Client(self.address, **self.tls)

    def async_client(self) -> AsyncClient:
        """An asyncio client. Raises ConfigError."""
        return AsyncClient(self.address, **self.tls)
