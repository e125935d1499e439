"""A router with TLS and keys: a client must show a certificate and a key, and one alone does not do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.errors import ConfigError, PdserveError, Unauthenticated, Unavailable
from router.config import RouterConfig
from router.main import Router
from tests.support.certs import Certs
from tests.support.router_kit import SECRET

KEY = "a key that is long enough".replace(" ", "-")
NO_WORKER = "No worker"


@pytest.fixture
def certs(tmp_path: Path) -> Certs:
    return Certs(tmp_path)


@pytest.fixture
async def router(certs: Certs) -> AsyncIterator[Router]:
    config = RouterConfig(
        port=0, metrics=False, http=False, fleet_secret=SECRET.hex(), api_key=KEY, **certs.settings()
    )
    made = Router(config)
    await made.start()
    yield made
    await made.stop()


async def refusal(router: Router, **options: str) -> PdserveError:
    """How a question about the model ends, which nobody can answer yet."""
    async with AsyncClient(router.address, **options) as client:  # type: ignore[arg-type]
        with pytest.raises(PdserveError) as caught:
            await client.get_model()
    return caught.value


async def test_both_are_asked_for(router: Router, certs: Certs) -> None:
    certificate = certs.settings("client")
    assert NO_WORKER in (await refusal(router, **certificate, api_key=KEY)).message
    assert isinstance(await refusal(router, **certificate), Unauthenticated)
    assert isinstance(await refusal(router, **certificate, api_key=KEY + "x"), Unauthenticated)
    certs.rotate()
    assert NO_WORKER in (await refusal(router, **certificate, api_key=KEY)).message
    nobody = await refusal(router, tls_ca=certificate["tls_ca"], api_key=KEY)
    assert isinstance(nobody, Unavailable)
    assert NO_WORKER not in nobody.message
    plain = await refusal(router, api_key=KEY)
    assert isinstance(plain, Unavailable)
    assert NO_WORKER not in plain.message


async def test_keys_do_not_open_an_unencrypted_listener_beyond_loopback() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        Router(RouterConfig(host="0.0.0.0", port=0, fleet_secret=SECRET.hex(), api_key=KEY))
