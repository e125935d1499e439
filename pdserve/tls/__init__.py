"""Mutual TLS: the three files, contexts made from them, reloading, and a small authority for a fleet.

What lives here: everything about certificates that needs no gRPC. What does not: gRPC credentials
(`pdserve.rpc.credentials`), who is dialled, and authority over calls and pages (fleet token, tickets).
"""

from pdserve.tls.files import TlsFiles as TlsFiles
from pdserve.tls.source import TlsSource as TlsSource

__all__ = ["TlsFiles", "TlsSource"]
