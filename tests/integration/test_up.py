"""`pdserve up` as a user runs it: a real model on real Ray, one worker per role; then nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from pdserve.client import Client, Result
from pdserve.errors import Unavailable
from tests.support.collector import Collector, collector
from tests.support.process_tree import command_line

END_S = 60.0


@dataclass
class Up:
    """A running `pdserve up`."""

    process: subprocess.Popen[str]
    address: str
    lines: list[str]
    collector: Collector | None = None

    def tree(self) -> list[psutil.Process]:
        """It and all its descendants."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """A client command against it."""
        return subprocess.run(
            [sys.executable, "-m", "pdserve.cli", *arguments, "--address", self.address],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=END_S,
            check=False,
        )


def start(*arguments: str, group: bool = False) -> subprocess.Popen[str]:
    """group: in a process group of its own, as a terminal would start it, also where we run under nohup."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("PDSERVE_", "RAY_"))}
    return subprocess.Popen(
        [
            *(("env", "--default-signal=HUP") if group else ()),
            sys.executable,
            "-m",
            "pdserve.cli",
            "up",
            "--port",
            "0",
            "--metrics-port",
            "0",
            "--http-port",
            "0",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=group,
    )


def read_until(process: subprocess.Popen[str], words: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError("".join(lines))


def run_directories(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"pdserve-{pid}-*"))


def left_of(pid: int) -> list[str]:
    """Processes that name one of its run directories, whoever their parent is by now."""
    commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [command for command in commands if f"pdserve-{pid}-" in command]


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with collector() as spans:
        process = start(
            "--dtype", "float32", "--deterministic", "--kv-memory", "256MiB", "--otlp-endpoint", spans.address
        )
        try:
            lines = read_until(process, "ready on ")
            found = re.search(r"ready on (\S+) after [\d.]+ s \(router .*ray .*workers ", lines[-1])
            assert found is not None
            yield Up(process, found[1], lines, spans)
        finally:
            process.kill()
            process.wait()


def test_progress_is_visible_before_ready(up: Up) -> None:
    text = "".join(up.lines)
    for words in (
        "router: starting",
        "ray: starting",
        "prefill-0: starting",
        "decode-0: serving",
        "join: done",
    ):
        assert words in text


def test_generate_streams_text_and_json_tells_the_handover(up: Up) -> None:
    plain = up.run("generate", "The capital of France is", "--max-tokens", "6", "--temperature", "0")
    assert (plain.returncode, plain.stderr) == (0, "")
    shown = up.run(
        "generate", "The capital of France is", "--max-tokens", "6", "--temperature", "0", "--json"
    )
    found = json.loads(shown.stdout)
    assert found["text"] == plain.stdout.removesuffix("\n")
    assert "Paris" in found["text"]
    assert found["usage"]["completion_tokens"] == len(found["token_ids"]) == 6
    assert found["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
    assert (found["transfer"]["path"], found["transfer"]["bytes"] > 0) == ("shm", True)
    assert found["computed"]["decode_prompt_tokens"] == 0


def test_prompt_file_is_answered_in_order_and_a_bad_one_fails_alone(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    requests: list[dict[str, object]] = [{"prompt": f"{n} plus one is", "id": n} for n in range(6)]
    requests[2] = {"token_ids": [10**6], "id": 2}
    requests[4] = {"messages": [{"role": "user", "content": "Hi"}], "id": 4, "max_tokens": 2}
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    result = up.run("generate", "--prompts", str(file), "--max-tokens", "4", "--concurrency", "3")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["id"] for answer in answers] == list(range(6))
    assert answers[2]["error"]["label"] == "invalid_request"
    assert [len(answer.get("token_ids", [])) for answer in answers] == [4, 4, 0, 4, 2, 4]
    assert result.returncode == 1
    assert "6/6 done, 1 failed" in result.stderr


def test_chat_answers_and_ends(up: Up) -> None:
    result = up.run("chat", "--max-tokens", "8", "--temperature", "0", stdin="Say hello.\n/reset\n/exit\n")
    assert result.returncode == 0
    assert len(result.stdout.replace("> ", "").strip()) > 3


def test_chat_knows_its_commands(up: Up) -> None:
    lines = [
        "/regen",
        "/system Answer in one word.",
        "Say hello.",
        "/regen",
        "/history",
        "/undo",
        "/what",
        "/exit",
    ]
    result = up.run("chat", "--max-tokens", "4", "--seed", "5", stdin="".join(f"{line}\n" for line in lines))
    assert result.returncode == 0
    told = result.stderr.splitlines()
    assert "There is nothing to answer again." in told
    assert sum(line.startswith("[4 tokens, first after") for line in told) == 2
    assert "system: Answer in one word." in told
    assert "user: Say hello." in told
    assert told[-2:] == ["0 turns are left.", "There is no command /what; /help shows them."]


def test_spans_come_from_the_router_and_from_workers_on_ray(up: Up) -> None:
    trace_id = "5e" * 16
    with Client(up.address, metadata={"traceparent": f"00-{trace_id}-{'1' * 16}-01"}) as client:
        client.generate("Once", max_tokens=4, ignore_eos=True, no_prefix_cache=True).result()
    assert up.collector is not None
    found = [(s.service, s.name.split(" ")[0]) for s in up.collector.trace(trace_id, 4)]
    assert found == [
        ("pdserve-router", "text_completion"),
        ("pdserve-prefill", "prefill"),
        ("pdserve-decode", "transfer"),
        ("pdserve-decode", "decode"),
    ]


def test_top_shows_rates_and_pools_once(up: Up) -> None:
    up.run("generate", "Once", "--max-tokens", "4", "--ignore-eos")
    found = json.loads(up.run("top", "--json", "--interval", "0.1").stdout)
    assert found["traffic"]["completion_tokens"] >= 4
    assert sum(found["traffic"]["ttft"]["counts"]) >= 1
    assert found["rates"]["completion_tokens"] == 0
    # Nobody watches a pipe, so it is one look there in any case.
    for flags in (["--once"], []):
        page = up.run("top", *flags, "--interval", "0.1").stdout
        assert "decode-0" in page
        assert "TTFT p99" in page


def test_status_shows_the_workers_and_their_pools(up: Up) -> None:
    workers = json.loads(up.run("status", "--json").stdout)["workers"]
    assert {worker["record"]["role"] for worker in workers} == {"prefill", "decode"}
    for worker in workers:
        assert worker["record"]["pool_pages"] == worker["load"]["num_pages"] > 0
        assert worker["record"]["peer"]["incarnation"] > 0
    table = up.run("status").stdout
    assert "prefill-0" in table
    assert "decode-0" in table


def test_every_listener_is_on_loopback_and_no_secret_is_on_a_command_line(up: Up) -> None:
    listening, secrets = [], set()
    for process in up.tree():
        listening += [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        environ = process.environ()
        secrets |= {environ.get(name, "") for name in ("PDSERVE_FLEET_SECRET", "RAY_AUTH_TOKEN")} - {""}
    assert len(listening) > 5
    for address in listening:
        ip = ip_address(address.ip)
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, address
    assert len(secrets) == 2
    commands = [" ".join(command_line(process)) for process in up.tree()]
    assert not [command for command in commands if any(secret in command for secret in secrets)]


def test_engine_processes_run_with_the_settings_of_colocated_roles(up: Up) -> None:
    workers = json.loads(up.run("status", "--json").stdout)["workers"]
    nices = {w["record"]["role"]: psutil.Process(w["record"]["pid"]).nice() for w in workers}
    assert nices == {"prefill": 10, "decode": 0}
    for worker in workers:
        environ = psutil.Process(worker["record"]["pid"]).environ()
        assert environ["OMP_WAIT_POLICY"] == "passive"
        assert environ["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


def incarnations(up: Up) -> dict[str, int]:
    workers = json.loads(up.run("status", "--json").stdout)["workers"]
    return {w["record"]["peer"]["worker_id"]: w["record"]["peer"]["incarnation"] for w in workers}


def first_answer(address: str, limit_s: float) -> Result:
    """The answer to a request once there is a router that serves; others do not know the address."""
    end = time.monotonic() + limit_s
    while True:
        try:
            with Client(address) as client:
                return client.generate("The capital of France is", max_tokens=6, temperature=0.0).result()
        except Unavailable:
            assert time.monotonic() < end, "no router came back"


def test_a_killed_router_is_started_again_and_the_same_workers_join_it(up: Up) -> None:
    wanted, before = first_answer(up.address, 1.0), incarnations(up)
    for turn in range(2):
        (router,) = (p for p in up.tree() if {"pdserve.cli", "router"} <= set(command_line(p)))
        router.kill()
        killed = time.monotonic()
        # By whom depends on who has joined first: decode answers alone where no prefill worker has.
        assert first_answer(up.address, 30.0).text == wanted.text
        print(f"turn {turn}: served again {time.monotonic() - killed:.2f} s after its death")
        while (now := incarnations(up)) != before:
            assert time.monotonic() < killed + 30.0, f"the same workers join again, but these did: {now}"
        found = first_answer(up.address, 1.0)
        assert found.text == wanted.text
        assert (found.ledger.prefill_worker, found.ledger.decode_worker) == ("prefill-0", "decode-0")
    assert up.process.poll() is None


def test_ctrl_c_drains_and_leaves_nothing(up: Up) -> None:
    long = ("generate", "One, two,", "--max-tokens", "200", "--ignore-eos", "--json")
    running = subprocess.Popen(
        [sys.executable, "-m", "pdserve.cli", *long, "--address", up.address],
        stdout=subprocess.PIPE,
        text=True,
    )
    while json.loads(up.run("status", "--json").stdout)["running"] == 0:
        assert running.poll() is None
    tree = up.tree()[1:]
    assert len(tree) > 7
    assert left_of(up.process.pid)
    assert run_directories(up.process.pid)
    up.process.send_signal(signal.SIGINT)
    assert up.process.stdout is not None
    text = up.process.stdout.read()
    assert up.process.wait(END_S) == 0
    assert "drain: done" in text
    assert len(json.loads(running.communicate()[0])["token_ids"]) == 200
    assert running.returncode == 0
    assert left_of(up.process.pid) == []
    assert [process for process in tree if process.is_running()] == []
    assert run_directories(up.process.pid) == []


def test_a_closed_terminal_drains_and_leaves_nothing() -> None:
    """It hangs up on the whole group, Ray's processes among them."""
    process = start(
        "--prefill", "0", "--decode", "0", "--aggregated", "1", "--kv-memory", "128MiB", group=True
    )
    read_until(process, "ready on ")
    tree = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.stdout is not None
    text = process.stdout.read()
    assert process.wait(END_S) == 0, text
    assert "drain: done" in text
    assert "FleetController" not in text, "Ray has nothing to say of our own end"
    assert "can not be asked" not in text
    psutil.wait_procs(tree, timeout=END_S)
    assert [child for child in tree if child.is_running()] == []
    assert run_directories(process.pid) == []


def test_start_that_fails_half_way_leaves_nothing() -> None:
    process = start("--model", "no-such-model")
    read_until(process, "workers: starting")
    tree = psutil.Process(process.pid).children(recursive=True)
    assert process.stdout is not None
    last = process.stdout.read().splitlines()[-1]
    assert process.wait(END_S) == 1
    assert last.startswith("error: ")
    assert len(tree) > 4
    assert [child for child in tree if child.is_running()] == []
    assert run_directories(process.pid) == []


@pytest.mark.parametrize("moment", ["ray: starting", "workers: starting"])
def test_sigterm_while_it_starts_leaves_nothing(moment: str) -> None:
    process = start()
    read_until(process, moment)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    text = process.stdout.read()
    assert process.wait(END_S) == 130, text
    assert "interrupted" in text
    assert left_of(process.pid) == []
    assert run_directories(process.pid) == []


def test_what_is_started_does_not_outlive_a_killed_up() -> None:
    """Ray's two agents end by themselves, but they take a minute to believe that their raylet is gone."""
    process = start()
    read_until(process, "workers: starting")
    children = psutil.Process(process.pid).children(recursive=True)
    tree = [child for child in children if "Agent" not in child.name()]
    assert len(tree) > 4
    process.kill()
    process.wait(END_S)
    psutil.wait_procs(tree, timeout=END_S)
    assert [child for child in tree if child.is_running()] == []
