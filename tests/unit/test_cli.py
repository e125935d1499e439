"""The command line without a server: usage, prompt files, answers, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.answers import answer
from pdserve.cli.bar import progress_bar
from pdserve.cli.main import app
from pdserve.cli.platforms import require_platform
from pdserve.cli.prompts import read_prompts
from pdserve.cli.stopping import StopSignals
from pdserve.client import FinishReason, Ledger, Result, Timings, Usage
from pdserve.config.addresses import advertised, host_port
from pdserve.errors import ConfigError, InvalidRequest
from pdserve.types import TransferStats


def pdserve(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without the settings of the one that runs the tests."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    return subprocess.run(
        [sys.executable, "-m", "pdserve.cli", *arguments],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "words"),
    [
        (["--help"], {}, 0, "generate"),
        (["up", "--host", "0.0.0.0"], {}, 2, "error: config_error: host: "),
        (["up", "--prefil", "1"], {}, 2, "No such option"),
        (["up"], {"PDSERVE_PREFIL": "1"}, 2, "error: config_error: PDSERVE_PREFIL: no such setting"),
        (["up", "--config", "absent.toml"], {}, 2, "error: config_error: config: "),
        (["fleet"], {}, 2, "error: config_error: routers: "),
        (["router", "--port", "0"], {}, 2, "error: config_error: secret_file: no fleet secret"),
        (["generate"], {}, 2, "error: invalid_request: prompt: "),
        (["generate", "x", "--prompts", "y"], {}, 2, "error: config_error: prompts: "),
        (["generate", "x", "--address", "127.0.0.1:1"], {}, 1, "error: unavailable: "),
        (["experts", "--from", "absent.json"], {}, 2, "error: config_error: from: "),
    ],
)
def test_exit_codes_and_one_line_errors(
    arguments: list[str], variables: dict[str, str], code: int, words: str
) -> None:
    result = pdserve(*arguments, **variables)
    assert result.returncode == code, result
    assert words in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    if words.startswith("error:"):
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    script = pdserve("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_PDSERVE_COMPLETE" in script.stdout
    asked = {"_PDSERVE_COMPLETE": "complete_bash", "COMP_WORDS": "pdserve sta", "COMP_CWORD": "1"}
    assert "status" in pdserve(**asked).stdout.split()


def test_help_loads_neither_torch_nor_ray_nor_grpc() -> None:
    check = "import sys, pdserve.cli.main; print([m for m in ('torch', 'ray', 'grpc') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_config_show_tells_values_and_origins(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('port = 1\nhost = "127.0.0.2"\n[router]\nmax_queue = 3\n')
    result = CliRunner().invoke(
        app,
        ["config", "show", "--json", "--config", str(file), "--kv-memory", "1.5GiB", "--no-prefix-caching"],
        env={"PDSERVE_PORT": "2"},
    )
    shown = json.loads(result.stdout)
    assert shown["port"] == {"value": "2", "origin": "PDSERVE_PORT"}
    assert shown["host"] == {"value": "127.0.0.2", "origin": "file"}
    assert shown["kv_memory"] == {"value": "1536MiB", "origin": "--kv-memory"}
    assert shown["prefix_caching"] == {"value": "false", "origin": "--prefix-caching"}
    assert shown["prefill"] == {"value": "1 (auto)", "origin": "default"}


def test_prompt_file_keeps_order_ids_and_kinds(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "a", "id": "x", "max_tokens": 3}\n\n'
        '{"messages": [{"role": "user", "content": "\\u00e9"}], "id": {"n": 1}}\n'
        '{"token_ids": [1, 2]}\n'
    )
    first, second, third = read_prompts(file)
    assert (first.prompt, first.id, first.max_tokens) == ("a", "x", 3)
    assert (second.messages, second.id) == ([{"role": "user", "content": "é"}], {"n": 1})
    assert (third.token_ids, third.id, third.max_tokens) == ([1, 2], None, None)


@pytest.mark.parametrize(
    "line",
    [
        "nonsense", "[]", "{}", '{"prompt": 1}', '{"prompt": "a", "token_ids": [1]}',
        '{"prompt": "a", "n": 2}',
        '{"token_ids": [true]}', '{"messages": [{"role": "user"}]}', '{"prompt": "a", "max_tokens": "3"}',
    ],
)  # fmt: skip
def test_wrong_line_of_a_prompt_file_is_refused_by_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(InvalidRequest, match="prompts line 2: "):
        read_prompts(file)


def test_unreadable_prompt_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b"\xff\xfe")
    for path in (file, tmp_path / "absent"):
        with pytest.raises(InvalidRequest, match="can not be read"):
            read_prompts(path)


def test_answer_has_the_promised_fields() -> None:
    result = Result(
        request_id="r", client_request_id="", text="hi", token_ids=(1, 2), finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=5, cached_tokens=1, completion_tokens=2),
        timings=Timings(queue_s=0.1, ttft_s=0.2, total_s=0.3),
        ledger=Ledger(
            prefill_worker="p", decode_worker="d", prefill_compute_s=0.4, transfer_s=0.5, decode_s=0.6,
            transfer=TransferStats(path="shm", pages=2, bytes=99),
        ),
        epochs=1,
    )  # fmt: skip
    shown = json.loads(json.dumps(answer(result, "my-id")))
    assert (shown["id"], shown["text"], shown["token_ids"], shown["finish_reason"]) == (
        "my-id",
        "hi",
        [1, 2],
        "length",
    )
    assert shown["usage"] == {"prompt_tokens": 5, "cached_tokens": 1, "completion_tokens": 2}
    assert {"queue_s": 0.1, "prefill_s": 0.4, "transfer_s": 0.5, "decode_s": 0.6}.items() <= shown[
        "timings"
    ].items()
    assert shown["workers"] == {"prefill": "p", "decode": "d"}
    assert (shown["transfer"]["path"], shown["transfer"]["bytes"]) == ("shm", 99)


def test_progress_without_a_terminal_is_a_line_per_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(20) as advance:
        for number in range(20):
            advance(number == 3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "2/20 done, 0 failed"
    assert (len(lines), lines[-1]) == (10, "20/20 done, 1 failed")


def test_signals_interrupt_the_start_ask_while_serving_and_never_cut_the_end_short() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    with StopSignals() as signals:
        signals.serving()
        signal.raise_signal(signal.SIGINT)
        assert signals.requested.is_set()
        signals.draining()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_workers_are_refused_where_they_can_not_run(system: str, machine: str) -> None:
    with pytest.raises(ConfigError, match=f"Linux on x86_64 or aarch64; this is {system} on {machine}"):
        require_platform(system, machine)
    require_platform("Linux", "aarch64")


def test_workers_elsewhere_get_an_address_they_can_reach() -> None:
    assert advertised("127.0.0.1:5") == "127.0.0.1:5"
    host, _, port = advertised("0.0.0.0:5").rpartition(":")
    assert (port, host not in {"", "0.0.0.0"}) == ("5", True)


@pytest.mark.parametrize(
    ("host", "text"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("a.b", "a.b:5")],
)
def test_addresses_of_version_6_have_brackets(host: str, text: str) -> None:
    assert host_port(host, 5) == text
