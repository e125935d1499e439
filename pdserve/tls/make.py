"""A small authority for one fleet, and the certificates it issues.

What lives here: making and signing, with the `cryptography` package (extra `tls`). What does not: writing
them for an operator (`pdserve.cli.certs`) and using them.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdserve.errors import ConfigError
from pdserve.tls.files import FIXED_NAME

AUTHORITY_DAYS = 3650
_BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of a fleet differ a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its private key, both PEM."""

    cert: bytes
    key: bytes


def make_authority(name: str = "pdserve fleet authority", *, days: int = AUTHORITY_DAYS) -> Pair:
    """A new self-signed authority that may sign leaves only."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return _pair(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Pair, name: str, *, hosts: tuple[str, ...] = (), days: int = 365, serves: bool = True
) -> Pair:
    """A certificate signed by the authority. hosts: names and addresses it stands for, next to FIXED_NAME;
    days: negative for one that has expired. serves False: for clients alone, who can not pose as a node.

    Raises ConfigError for an authority that can not be read.
    """
    try:
        signer = serialization.load_pem_private_key(authority.key, None)
        root = x509.load_pem_x509_certificate(authority.cert)
    except (ValueError, TypeError):
        raise ConfigError("ca: the authority's files can not be read") from None
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(name), root.subject, key.public_key(), days)
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if serves:
        names = [_general(host) for host in (*hosts, FIXED_NAME)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(issuer, critical=False)
    return _pair(builder.sign(signer, hashes.SHA256()), key)


def _builder(subject: x509.Name, issuer: x509.Name, public: Any, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _BACKDATED)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    fields = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{field: allowed.get(field, False) for field in fields})


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError("hosts: names and addresses are plain ASCII") from None


def _pair(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(cert=cert.public_bytes(serialization.Encoding.PEM), key=encoded)
