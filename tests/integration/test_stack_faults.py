"""The whole stack under faults: deaths, vanished clients, cancels, deadlines, garbage on every port.

Two prefill and two decode workers as processes. The truth is the same request undisturbed.
"""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdserve.client import Client, Result
from pdserve.errors import DeadlineExpired, PdserveError
from pdserve.types import Role
from tests.support.stack import Stack, usable

NEW = 48


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack.start({Role.PREFILL: 2, Role.DECODE: 2})
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def all_idle_after(stack: Stack) -> Iterator[None]:
    yield
    stack.until_idle()


def prompt(seed: int, length: int = 60) -> list[int]:
    return [70 + (seed * 7919 + i * 104729) % 40000 for i in range(length)]


def ask(client: Client, tokens: list[int], *, max_tokens: int = NEW, **options: object) -> Result:
    """One greedy request to its end."""
    return client.generate(
        token_ids=tokens, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options  # type: ignore[arg-type]
    ).result()  # fmt: skip


def restart(stack: Stack, name: str, role: Role) -> None:
    """Brings a killed worker back under its name, as a new incarnation."""
    stack.launch(name, role)
    stack.wait_started(name)
    stack.until(lambda status: len(usable(status)) == 4)


def test_load_spreads_over_both_workers_of_each_role(stack: Stack) -> None:
    with stack.client() as client, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: ask(client, prompt(n)), range(8)))
    for role in ("prefill_worker", "decode_worker"):
        names = [getattr(r.ledger, role) for r in results]
        assert sorted(names.count(name) for name in set(names)) == [4, 4], names


def test_short_prompts_avoid_the_worker_with_the_long_one(stack: Stack) -> None:
    with stack.client() as client, ThreadPoolExecutor(9) as pool:
        long = pool.submit(ask, client, prompt(50, 3000), max_tokens=1)
        stack.until(lambda status: any(w.outstanding_tokens > 2000 for w in status.workers))
        short = list(pool.map(lambda n: ask(client, prompt(60 + n, 20), max_tokens=2), range(8)))
        busy = long.result().ledger.prefill_worker
    assert sum(r.ledger.prefill_worker != busy for r in short) >= 7


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_killed_worker_fails_no_request_and_changes_no_token(stack: Stack, role: Role) -> None:
    with stack.client() as client, ThreadPoolExecutor(8) as pool:
        wanted = [ask(client, prompt(100 + n, 150)).token_ids for n in range(8)]
        streaming = threading.Barrier(9, timeout=60)

        def disturbed(n: int) -> Result:
            stream = client.generate(
                token_ids=prompt(100 + n, 150), max_tokens=NEW, temperature=0.0, ignore_eos=True,
                no_prefix_cache=True,
            )  # fmt: skip
            if role is Role.DECODE:
                next(iter(stream))
            streaming.wait()
            return stream.result()

        running = [pool.submit(disturbed, n) for n in range(8)]
        streaming.wait()
        stack.kill(f"{role}-0")
        results = [future.result() for future in running]
    assert [r.token_ids for r in results] == wanted
    restart(stack, f"{role}-0", role)


def test_a_client_that_vanishes_leaves_nothing_held(stack: Stack) -> None:
    command = [
        sys.executable, "-m", "pdserve.cli", "generate", "Count from one to a thousand:",
        "--address", stack.address, "--max-tokens", "2000", "--temperature", "0",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    stack.until(lambda status: status.running == 0)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel_while_prefilling_and_while_streaming(stack: Stack, after: int) -> None:
    with stack.client() as client:
        stream = client.generate(
            token_ids=prompt(200 + after, 1500), max_tokens=500, ignore_eos=True, no_prefix_cache=True
        )
        tokens = iter(stream)
        for _ in range(after):
            next(tokens)
        stream.cancel()
        with pytest.raises(PdserveError) as caught:
            stream.result()
        assert caught.value.label == "cancelled"
    stack.until(lambda status: status.running == 0)


@pytest.mark.parametrize("deadline_s", [0.05, 0.5, 1.5])
def test_deadlines_end_requests_with_their_own_error(stack: Stack, deadline_s: float) -> None:
    with stack.client() as client, pytest.raises(DeadlineExpired):
        ask(client, prompt(300, 1500), max_tokens=2000, deadline_s=deadline_s, no_prefix_cache=True)
    stack.until(lambda status: status.running == 0)


def _ports(stack: Stack) -> list[tuple[str, int]]:
    with stack.client() as client:
        peers = [w.record.peer for w in client.get_status().workers]
    addresses = [stack.address, *(p.control for p in peers), *(p.tcp for p in peers if p.tcp)]
    split = [address.rsplit(":", 1) for address in addresses]
    return [(host, int(port)) for host, port in split]


def test_garbage_on_every_port_harms_nothing(stack: Stack) -> None:
    with stack.client() as client:
        wanted = ask(client, prompt(400)).token_ids
        for address in _ports(stack):
            for junk in (b"", b"\0" * 64, secrets.token_bytes(4096), b"GET / HTTP/1.1\r\n\r\n"):
                with socket.create_connection(address, timeout=10) as peer:
                    peer.sendall(junk)
        shm = [w.record.peer.shm for w in client.get_status().workers if w.record.peer.shm]
        assert shm
        for path in shm:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(path)
                peer.sendall(secrets.token_bytes(512))
        assert ask(client, prompt(400), no_prefix_cache=True).token_ids == wanted


BAD: list[tuple[dict[str, object], str]] = [
    ({"prompt": ""}, "invalid_request"),
    ({"token_ids": []}, "invalid_request"),
    ({"token_ids": [49152]}, "invalid_request"),
    ({"token_ids": list(range(100)) * 100}, "prompt_too_long"),
    ({"prompt": "a", "temperature": -1.0}, "invalid_request"),
    ({"prompt": "a", "temperature": float("nan")}, "invalid_request"),
    ({"prompt": "a", "temperature": 1e30}, "invalid_request"),
    ({"prompt": "a", "top_p": 0.0}, "invalid_request"),
    ({"prompt": "a", "min_p": 1.5}, "invalid_request"),
    ({"prompt": "a", "max_tokens": 0}, "invalid_request"),
    ({"prompt": "a", "model": "gpt-17"}, "unknown_model"),
    ({"prompt": "a", "deadline_s": 1e6}, "invalid_request"),
    ({"prompt": "a", "stop": ["x"] * 17}, "invalid_request"),
    ({"prompt": "a" * (5 << 20)}, "invalid_request"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "invalid_request"),
]


@pytest.mark.parametrize(("fields", "label"), BAD, ids=[f"{i}-{label}" for i, (_, label) in enumerate(BAD)])
def test_bad_input_gets_its_typed_error_at_once(stack: Stack, fields: dict[str, object], label: str) -> None:
    with stack.client() as client:
        with pytest.raises(PdserveError) as caught:
            client.generate(**fields).result()  # type: ignore[arg-type]
        assert caught.value.label == label
        assert len(ask(client, [5, 6, 7], max_tokens=1).token_ids) == 1
