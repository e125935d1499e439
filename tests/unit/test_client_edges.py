"""What goes with calls: keys, headers, traces, certificates; and several routers, one of which dies."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdserve.api import Chunk, GenerateInput, StreamEvent
from pdserve.client import AsyncClient, Client, Outcome, Retry
from pdserve.client.connect import addresses_of
from pdserve.client.testing import FakeServer
from pdserve.errors import ConfigError, Draining, Unavailable, UnknownRequest
from tests.support.certs import Certs

ROOT = Path(__file__).resolve().parents[2]
SECRET = "sk-1234"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


# ---- keys and headers --------------------------------------------------------------------------------


def test_a_key_and_headers_go_with_every_call(server: FakeServer) -> None:
    with Client(server.address, api_key=SECRET, metadata={"x-team": "blue"}) as client:
        client.generate("x").result()
        client.get_model()
    for call in server.calls:
        assert call.metadata["authorization"] == f"Bearer {SECRET}"
        assert call.metadata["x-team"] == "blue"
        assert "traceparent" not in call.metadata


FAR = "router.example:50051"


@pytest.mark.parametrize("address", [FAR, f"127.0.0.1:1,{FAR}", "10.0.0.1:50051", "[2001:db8::1]:50051"])
@pytest.mark.parametrize("how", [{"api_key": SECRET}, {"metadata": {"authorization": f"Basic {SECRET}"}}])
def test_a_key_is_not_sent_in_the_clear_beyond_this_machine(address: str, how: Any) -> None:
    with pytest.raises(ConfigError, match="without TLS") as caught:
        Client(address, **how)
    assert SECRET not in caught.value.message
    Client(address, insecure=True, **how).close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_loopback_is_safe_for_a_key(address: str) -> None:
    Client(address, api_key=SECRET).close()


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": "a b"},
        {"api_key": "é"},
        {"api_key": "a\nb"},
        {"api_key": SECRET, "metadata": {"authorization": "x"}},
        {"metadata": {"X-Team": "blue"}},
        {"metadata": {"grpc-timeout": "1"}},
        {"metadata": {"x-bin": "1"}},
        {"metadata": [("x", "a\r\nb")]},
        {"metadata": [("", "a")]},
        {"api_kee": SECRET},
    ],
)
def test_what_can_not_be_sent_is_refused_without_showing_it(options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Client("127.0.0.1:1", **options)
    assert SECRET not in caught.value.message


# ---- traces ------------------------------------------------------------------------------------------


def test_a_call_belongs_to_the_span_it_is_made_in(server: FakeServer) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with Client(server.address) as client:
        with tracer.start_as_current_span("mine"):
            client.generate("x").result()
            client.generate("x", trace_id="ab" * 16).result()
            client.get_model()
        client.generate("x").result()
    (span,) = exporter.get_finished_spans()
    inside, named, unary, outside = server.calls
    for call in (inside, named, unary):
        found = trace.get_current_span(
            TraceContextTextMapPropagator().extract(call.metadata)
        ).get_span_context()
        assert (found.trace_id, found.span_id) == (span.context.trace_id, span.context.span_id)
        assert found.trace_flags == span.context.trace_flags
    assert inside.request.trace_id == f"{span.context.trace_id:032x}"
    assert named.request.trace_id == "ab" * 16
    assert "traceparent" not in outside.metadata
    assert outside.request.trace_id == ""


def test_using_the_client_does_not_load_opentelemetry() -> None:
    code = (
        "import sys\n"
        "from pdserve.client import Client\n"
        "from pdserve.client.testing import FakeServer\n"
        "with FakeServer() as server, Client(server.address) as client:\n"
        "    client.generate('x').result()\n"
        "print(*(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# ---- certificates ------------------------------------------------------------------------------------


def credentials(certs: Certs, *, mutual: bool) -> grpc.ServerCredentials:
    files = certs.files()
    pair = (Path(files.key).read_bytes(), Path(files.cert).read_bytes())
    ca = Path(files.ca).read_bytes() if mutual else None
    return grpc.ssl_server_credentials([pair], ca, mutual)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return Certs(tmp_path_factory.mktemp("certs"))


async def test_tls_with_the_servers_certificate_alone(certs: Certs) -> None:
    ca = certs.settings()["tls_ca"]
    with FakeServer(credentials=credentials(certs, mutual=False)) as server:
        with Client(server.address, tls_ca=ca, api_key=SECRET) as client:
            assert client.generate("x").result().text == "hello"
        async with AsyncClient(server.address, tls_ca=ca) as asyncio_client:
            assert (await asyncio_client.get_model()).model == "fake"
        wrong = Client(server.address, tls_ca=ca, tls_server_name="elsewhere", retry=None)
        with wrong, pytest.raises(Unavailable, match="certificate"):
            wrong.get_model()
        with Client(server.address, retry=None) as plain, pytest.raises(Unavailable):
            plain.get_model()


def test_mutual_tls(certs: Certs) -> None:
    with FakeServer(credentials=credentials(certs, mutual=True)) as server:
        with Client(server.address, **certs.settings("client")) as client:
            assert client.generate("x").result().text == "hello"
        nameless = Client(server.address, tls_ca=certs.settings()["tls_ca"], retry=None)
        with nameless, pytest.raises(Unavailable):
            nameless.get_model()


def test_authorities_are_read_again_when_they_change(certs: Certs, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    other = Certs(tmp_path / "other")
    file.write_bytes(Path(other.settings()["tls_ca"]).read_bytes())
    server = FakeServer(credentials=credentials(certs, mutual=False))
    with server, Client(server.address, tls_ca=str(file), retry=None) as client:
        with pytest.raises(Unavailable):
            client.get_model()
        file.write_bytes(Path(certs.settings()["tls_ca"]).read_bytes() + b"\n")
        assert client.get_model().model == "fake"


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ({"tls_ca": "/nowhere/ca.pem"}, "tls_ca"),
        ({"tls_ca": __file__}, "tls_ca"),
        ({"tls_cert": "x", "tls_key": "y"}, "tls_ca"),
        ({"tls_ca": "x", "tls_cert": "y"}, "tls_key"),
        ({"tls_server_name": "x"}, "tls_ca"),
    ],
)
def test_certificates_that_do_not_do_are_refused(files: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        Client("127.0.0.1:1", **files)
    assert "nowhere" not in caught.value.message


# ---- several routers ---------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(model="one") as one, FakeServer(model="two") as other:
        yield one, other


def pool(two: tuple[FakeServer, FakeServer], **options: Any) -> Client:
    return Client([each.address for each in two], **options)


def test_addresses() -> None:
    assert addresses_of("a:1, b:2,a:1") == addresses_of(["a:1", "b:2"]) == ("a:1", "b:2")
    for bad in ("", ",", []):
        with pytest.raises(ConfigError, match="address"):
            addresses_of(bad)


def test_calls_are_spread_by_what_is_outstanding(two: tuple[FakeServer, FakeServer]) -> None:
    one, other = two
    for each in two:
        each.hold()
    with pool(two) as client:
        streams = [client.generate("x") for _ in range(6)]
        for each in two:
            each.wait_for_calls(3)
        for each in two:
            each.release()
        assert [stream.result().text for stream in streams] == ["hello"] * 6
    assert (len(one.calls), len(other.calls)) == (3, 3)


def test_a_dead_router_is_left_after_one_failed_call(two: tuple[FakeServer, FakeServer]) -> None:
    one, other = two
    with pool(two, retry=None) as client:
        assert {client.get_model().model for _ in range(2)} == {"one", "two"}
        one.stop()
        assert [client.generate("x").result().text for _ in range(6)] == ["hello"] * 6
        assert [client.get_model().model for _ in range(4)] == ["two"] * 4
        endpoints = {each.address: each for each in client._routers.pool.endpoints}
        assert (endpoints[one.address].failures > 0, endpoints[other.address].failures) == (True, 0)
        other.stop()
        with pytest.raises(Unavailable):
            client.generate("x").result()


def test_a_router_that_comes_back_is_used_again(two: tuple[FakeServer, FakeServer]) -> None:
    one, other = two
    with pool(two, retry=Retry(attempts=50, max_wait_s=0.2)) as client:
        one.stop()
        other.stop()
        port = int(one.address.rpartition(":")[2])
        one.start(port)
        assert client.get_model().model == "one"


def test_what_had_begun_on_a_dead_router_is_an_error_and_is_not_made_again(
    two: tuple[FakeServer, FakeServer],
) -> None:
    gate = threading.Event()

    def half(request: GenerateInput) -> Iterator[StreamEvent]:
        yield Chunk(index=0, token_ids=(1,), text="a")
        gate.wait(20)

    for each in two:
        each.answer(half)
    with pool(two) as client:
        stream = client.generate("x")
        assert next(stream).text == "a"
        home, rest = two if two[0].calls else two[::-1]
        home.stop()
        with pytest.raises(Unavailable):
            stream.result()
        gate.set()
        assert (len(home.calls), len(rest.calls)) == (1, 0)


def test_a_router_that_drains_hands_on_at_once(two: tuple[FakeServer, FakeServer]) -> None:
    one, other = two
    one.fail(Draining("bye", retry_after_s=60.0))
    with pool(two, retry=None) as client:
        assert [client.generate("x").result().text for _ in range(3)] == ["hello"] * 3
    assert len(one.calls) + len(other.calls) == 4  # the one refused, again elsewhere


def test_requests_are_aborted_and_explained_where_they_run(two: tuple[FakeServer, FakeServer]) -> None:
    with pool(two) as client, pool(two) as stranger:
        for _ in range(2):  # one on each
            stream = client.generate("x")
            stream.result()
            assert stream.request_id is not None
            for each in (client, stranger):
                assert each.explain(stream.request_id).request_id == stream.request_id
                assert each.abort(stream.request_id) is Outcome.COMPLETE
        assert stranger.abort("nobody") is Outcome.UNKNOWN
        with pytest.raises(UnknownRequest):
            stranger.explain("nobody")


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1", "http://127.0.0.1:8000", "127.0.0.1:99999", "127.0.0.1:x", ":50051"]
)
def test_an_address_that_is_no_host_and_port_is_refused_before_any_call(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        Client(address)


@pytest.mark.parametrize("address", ["[::1]:7", "dns:///router:50051", "unix:router.sock", "unix:///r.sock"])
def test_what_grpc_can_connect_to_is_an_address(address: str) -> None:
    assert addresses_of(address) == (address,)
