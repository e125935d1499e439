"""JSON Web Tokens: whose they are, and the ways in which they must not be taken. Tokens are PyJWT's own."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from pdserve.errors import ConfigError, Unauthenticated
from router.auth.authenticator import Authenticator
from router.auth.jwt import parse_jwks
from router.caller import Caller
from router.config import RouterConfig

ISSUER, AUDIENCE = "https://login.example", "pdserve"
RSA, WEAK = rsa.generate_private_key(65537, 2048), rsa.generate_private_key(65537, 1024)
CURVE, EDWARDS = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
SIGNERS: dict[str, tuple[str, Any, Callable[..., Any]]] = {
    "rsa": ("RS256", RSA, RSAAlgorithm.to_jwk),
    "curve": ("ES256", CURVE, ECAlgorithm.to_jwk),
    "edwards": ("EdDSA", EDWARDS, OKPAlgorithm.to_jwk),
    "weak": ("RS256", WEAK, RSAAlgorithm.to_jwk),
}


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def jwks(directory: Path, *names: str, **more: Any) -> Path:
    """The public keys of these signers as a file put in place at once."""
    keys = []
    for name in names:
        algorithm, private, to_jwk = SIGNERS[name]
        keys.append({**json.loads(to_jwk(private.public_key())), "kid": name, "alg": algorithm, **more})
    keys.append({"kty": "oct", "kid": "shared", "alg": "HS256", "k": _text(b"s" * 32)})
    (directory / "new").write_text(json.dumps({"keys": keys}))
    os.replace(directory / "new", directory / "jwks")
    return directory / "jwks"


def checker(file: Path, **settings: Any) -> tuple[Authenticator, list[str]]:
    reasons: list[str] = []
    config = RouterConfig(jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_jwks_file=str(file), **settings)
    return Authenticator(config, count=reasons.append), reasons


def claims(**changes: Any) -> dict[str, Any]:
    """Good ones; a change to None leaves a claim out."""
    good = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 600, "sub": "ada", "tenant": "shop"}
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def signed(name: str = "rsa", *, kid: str | None = None, **changes: Any) -> str:
    algorithm, private, _ = SIGNERS[name]
    return jwt.encode(claims(**changes), private, algorithm, headers={"kid": kid or name})


def ask(auth: Authenticator, token: str) -> Caller:
    return auth.check([("authorization", f"Bearer {token}")])


@pytest.mark.parametrize("name", ["rsa", "curve", "edwards"])
def test_a_token_says_whose_it_is(tmp_path: Path, name: str) -> None:
    auth, _ = checker(jwks(tmp_path, "rsa", "curve", "edwards"))
    assert ask(auth, signed(name)) == Caller(tenant="shop", key_id="jwt:ada", admin=False)
    assert ask(auth, signed(name, aud=["other", AUDIENCE])).tenant == "shop"


@pytest.mark.parametrize(
    ("setting", "claim", "admin"),
    [
        ("", {"admin": True}, False),
        ("admin", {"admin": True}, True),
        ("admin", {"admin": "true"}, False),
        ("admin", {}, False),
        ("scope=pdserve:admin", {"scope": "read pdserve:admin"}, True),
        ("scope=pdserve:admin", {"scope": "read pdserve:administrator"}, False),
        ("roles=ops", {"roles": ["dev", "ops"]}, True),
        ("roles=ops", {"roles": {"ops": 1}}, False),
    ],
)
def test_who_is_an_admin(tmp_path: Path, setting: str, claim: dict[str, Any], admin: bool) -> None:
    auth, _ = checker(jwks(tmp_path, "rsa"), jwt_admin_claim=setting)
    assert ask(auth, signed(**claim)).admin is admin


def test_the_tenant_comes_from_the_claim_that_is_named(tmp_path: Path) -> None:
    auth, _ = checker(jwks(tmp_path, "rsa"), jwt_tenant_claim="org")
    assert ask(auth, signed(org="acme")).tenant == "acme"


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
def test_hostile_and_faulty_tokens_are_not_taken(tmp_path: Path) -> None:
    now = time.time()
    public = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    good = signed()
    head, body, signature = good.split(".")
    unsigned, confused = _text(b'{"alg":"none","kid":"rsa"}'), _text(b'{"alg":"HS256","kid":"rsa"}')
    mac = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    forged = mac.sign(f"{confused}.{body}".encode(), public)
    faulty = {
        "another key": signed("curve", kid="rsa"),
        "a weak key": signed("weak"),
        "unknown kid": signed(kid="nobody"),
        "no kid": jwt.encode(claims(), RSA, "RS256"),
        "kid is a path": signed(kid="../../etc/passwd"),
        "not signed": f"{unsigned}.{body}.",
        "the public key as a secret": f"{confused}.{body}.{_text(forged)}",
        "a shared secret of the file": jwt.encode(claims(), b"s" * 32, "HS256", headers={"kid": "shared"}),
        "another algorithm of the same key": jwt.encode(claims(), RSA, "RS512", headers={"kid": "rsa"}),
        "another issuer": signed(iss="https://evil.example"),
        "another audience": signed(aud="other"),
        "no issuer": signed(iss=None),
        "no audience": signed(aud=None),
        "no expiry": signed(exp=None),
        "expiry is no number": signed(exp="never"),
        "not yet": signed(nbf=now + 600),
        "no tenant": signed(tenant=None),
        "tenant is no text": signed(tenant=["shop"]),
        "tenant has a space": signed(tenant="shop bank"),
        "changed": f"{head}.{body[:-4]}AAAA.{signature}",
        "cut": good[:-10],
        "no json": "YQ.YQ.YQ",
        "two parts": "a.b",
        "no token": "hello",
        "deep": "a." * 1000,
    }
    auth, reasons = checker(jwks(tmp_path, "rsa", "curve", "weak"))
    for what, token in faulty.items():
        with pytest.raises(Unauthenticated):
            ask(auth, token)
        assert reasons.pop() == "bad_token", what
    for exp in (now - 60, 0, -1):
        with pytest.raises(Unauthenticated, match="expired"):
            ask(auth, signed(exp=exp))
    assert set(reasons) == {"expired"}
    assert ask(auth, good).tenant == "shop"


def test_new_keys_of_the_issuer_count_at_once(tmp_path: Path) -> None:
    file = jwks(tmp_path, "rsa")
    auth, _ = checker(file)
    token = signed("curve")
    with pytest.raises(Unauthenticated):
        ask(auth, token)
    jwks(tmp_path, "curve")
    assert ask(auth, token).tenant == "shop"
    with pytest.raises(Unauthenticated):
        ask(auth, signed("rsa"))
    file.write_text("{")
    assert ask(auth, token).tenant == "shop"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"keys": 1}', '{"keys": [{"kty": "RSA", "kid": "x"}]}'])
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "jwks").write_text(content)
    with pytest.raises(ConfigError, match="jwt_jwks_file"):
        checker(tmp_path / "jwks")


@pytest.mark.parametrize("more", [{"kid": ["a"]}, {"kid": 5}, {"alg": "none"}, {"alg": ["none"]}])
def test_odd_entries_are_left_out_and_harm_no_other(tmp_path: Path, more: dict[str, Any]) -> None:
    good = json.loads(jwks(tmp_path, "rsa").read_text())["keys"]
    for name in ("rsa", "curve", "edwards"):
        odd = json.loads(jwks(tmp_path, name, **more).read_text())["keys"][0]
        assert list(parse_jwks(json.dumps({"keys": [odd, *good]}).encode())) == ["rsa"]


def test_a_private_or_foreign_key_in_the_file_is_left_out(tmp_path: Path) -> None:
    for more in ({"d": "AQAB"}, {"use": "enc"}, {"alg": "RS512"}):
        with pytest.raises(ConfigError, match="no key"):
            checker(jwks(tmp_path, "rsa", **more))
    file = jwks(tmp_path, "rsa")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="change the file"):
        checker(file)


@pytest.mark.parametrize("missing", ["jwt_issuer", "jwt_audience", "jwt_jwks_file"])
def test_the_settings_go_together(missing: str) -> None:
    given = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_jwks_file": "x", missing: ""}
    with pytest.raises(ConfigError, match=missing):
        RouterConfig(**given)  # type: ignore[arg-type]
