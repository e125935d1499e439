"""The metrics' port among callers that dawdle, flood it or send nonsense: it goes on, and stays quiet."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from pdserve.obs import port as module
from pdserve.obs.port import MAX_CALLERS, MetricsPort, Page, serve_metrics


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    def broken() -> Page:
        raise ZeroDivisionError

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    serving = serve_metrics(0, registry=registry, pages={"/broken": broken})
    yield serving
    serving.close()


def connected(serving: MetricsPort) -> socket.socket:
    return socket.create_connection(("127.0.0.1", serving.port), timeout=10)


def answer(serving: MetricsPort, asked: bytes) -> bytes:
    with connected(serving) as caller:
        caller.sendall(asked)
        told = b""
        with suppress(ConnectionResetError):  # what was sent need not have been read to its end
            while data := caller.recv(65536):
                told += data
        return told


def test_callers_that_say_nothing_lock_nobody_out(port: MetricsPort) -> None:
    with ExitStack() as idle:
        callers = [idle.enter_context(connected(port)) for _ in range(MAX_CALLERS)]
        assert b" 200 OK" in answer(port, b"GET /metrics HTTP/1.0\r\n\r\n")
        assert callers[0].recv(1) == b""  # the oldest was cut for it
        callers[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert callers[-1].recv(1)


def test_watchers_may_ask_for_the_head_alone(port: MetricsPort) -> None:
    told = answer(port, b"HEAD /metrics HTTP/1.0\r\n\r\n")
    assert b" 200 OK" in told.partition(b"\r\n")[0]
    assert told.endswith(b"\r\n\r\n")


def test_who_is_too_slow_is_cut_without_a_word(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 0.05)
    with connected(port) as caller:
        caller.sendall(b"GET /met")
        assert caller.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_a_page_that_fails_is_logged_and_told_in_one_line(
    port: MetricsPort, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    told = answer(port, b"GET /broken HTTP/1.0\r\n\r\n")
    assert b" 500 " in told
    assert told.endswith(b"the log says why\n")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "asked",
    [
        b"GET\r\n\r\n", b"\x16\x03\x01\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.0\r\n\r\n", b"GET /metrics HTTP/1.0\r\n" + b"a: b\r\n" * 200,
        b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text;version=x\r\n\r\n",
    ],
    ids=["short", "tls", "version", "long", "headers", "accept"],
)  # fmt: skip
def test_nonsense_is_refused_and_the_port_goes_on(port: MetricsPort, asked: bytes) -> None:
    assert b" 200 OK" not in answer(port, asked)
    assert b" 200 OK" in answer(port, b"GET /metrics HTTP/1.0\r\n\r\n")


def test_no_name_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*about: object) -> str:
        raise AssertionError(f"a name server was asked for {about}")

    for name in ("getfqdn", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, asked)
    serving = serve_metrics(0, registry=CollectorRegistry())
    try:
        assert b" 200 OK" in answer(serving, b"GET /metrics HTTP/1.0\r\n\r\n")
    finally:
        serving.close()
