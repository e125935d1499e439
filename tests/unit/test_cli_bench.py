"""`pdserve bench micro` and `engine` as processes of their own: tables, files, refusals, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.kernels.stack import PHASES
from tests.support import tiny_models
from tests.support.commands import INTERRUPTIBLE

QUICK = ("--seconds", "0.01", "--peak-mib", "1,2", "--threads", "1")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pdserve.cli", "bench", *arguments]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save(tiny_models.llama(), tmp_path_factory.mktemp("model")))


def check_document(document: dict[str, Any], kind: str) -> None:
    """What is the same in every kind's file."""
    assert (document["format"], document["kind"]) == ("pdserve.bench/1", kind)
    assert document["machine"]["cpus"] >= 1
    assert {"date", "version", "settings", "cases"} <= set(document)


def check_peaks(document: dict[str, Any]) -> None:
    peaks = document["peaks"]
    assert set(peaks["products"]) == {"float32", "bfloat16", "int8"}
    assert peaks["products"]["float32"] > 1e8
    assert [size for size, _ in peaks["bandwidth"]] == [1 << 20, 2 << 20]
    assert all(speed > 1e7 for _, speed in peaks["bandwidth"])


def test_engine_measures_prompts_and_steps_beside_floors(model: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = bench(
        "engine", "--model", model, "--weights", "w8a8", "--prompts", "16,80", "--contexts", "32",
        "--batches", "1,3", "--chunk-tokens", "32", "--kv-dtype", "int8", "--json", str(target), *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(target.read_text())
    check_document(document, "engine")
    check_peaks(document)
    names = [case["name"] for case in document["cases"]]
    assert names == ["prefill-16", "prefill-80", "decode-1x32", "decode-3x32"]
    for case in document["cases"]:
        check_case(case)
    settings = document["settings"]
    assert (settings["weights"], settings["kv_dtype"]) == ("w8a8", "int8")
    assert document["skipped"] == []
    for words in ("prefill, 80 tokens", "decode, 3 at context 32", "product: gate, up", "this machine"):
        assert words in done.stdout
    assert "14/14 done, 0 failed" in done.stderr


def check_case(case: dict[str, Any]) -> None:
    """Its times are those of its phases."""
    assert case["runs"] >= 1
    assert 0 < case["best_ms"] <= case["median_ms"]
    assert tuple(case["by_phase_ms"]) == (*PHASES, "other")
    assert sum(case["by_phase_ms"].values()) == pytest.approx(case["best_ms"])
    assert set(case["floor_by_phase_ms"]) == {"qkv", "out", "gate_up", "down", "head", "attention"}
    assert sum(case["floor_by_phase_ms"].values()) == pytest.approx(case["floor_ms"])
    assert case["share"] == pytest.approx(case["floor_ms"] / case["best_ms"])


def test_micro_measures_the_machine_and_its_kernels(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = bench("micro", "--rows", "1,9", "--contexts", "40", "--json", str(target), *QUICK)
    assert done.returncode == 0, done.stderr
    document = json.loads(target.read_text())
    check_document(document, "micro")
    check_peaks(document)
    linears = {(c["name"], c["rows"], c["form"]) for c in document["cases"] if c["group"] == "linear"}
    assert len(linears) == 4 * 2 * 3
    attention = [c for c in document["cases"] if c["group"] == "attention"]
    assert [(c["form"], c["name"], c["rows"], c["context"]) for c in attention] == [
        (pages, *case) for pages in ("bfloat16", "int8") for case in (("chunk", 40, 40), ("decode", 8, 40))
    ]
    for case in document["cases"]:
        assert case["ms"] > 0
        assert case["floor_ms"] > 0
        assert case["share"] == pytest.approx(case["floor_ms"] / case["ms"])
    assert "gate_up, 9" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["micro", "--rows", "0"], "config_error: rows: "),
        (["micro", "--rows", "a"], "config_error: rows: "),
        (["micro", "--rows", ""], "config_error: rows: "),
        (["micro", "--rows", 5000 * "1"], "config_error: rows: "),
        (["micro", "--forms", "w1"], "config_error: forms: "),
        (["micro", "--pages", "int4"], "config_error: pages: "),
        (["micro", "--seconds", "nan"], "config_error: seconds: "),
        (["micro", "--json", "absent/file"], "config_error: json: "),
        (["micro", "--json", 300 * "f"], "config_error: json: "),
        (["engine", "--prompts", "none", "--contexts", "none"], "config_error: prompts: "),
        (["engine", "--kv-dtype", "int4"], "config_error: kv_dtype: "),
        (["engine", "--weights", "w1"], "config_error: weights: "),
        (["engine", "--dtype", "int3"], "config_error: dtype: "),
        (["serving", "--requests", "1000000", "--prompt-tokens", "1000"], "config_error: prompt_tokens: "),
        (["engine", "--pool-gib", "-1"], "config_error: pool_gib: "),
        (["serving", "--rate", "1", "--concurrency", "2"], "config_error: rate: "),
        (["serving", "--rate", "0"], "config_error: rate: "),
        (["serving", "--requests", "0"], "Invalid value for '--requests'"),
    ],
)
def test_what_can_not_be_is_refused_at_once(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdserve.cli.main import main

    monkeypatch.setattr(sys, "argv", ["pdserve", "bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "9999999"], "config_error: prompts: "),
        (["--model", "/absent"], "error: model_error: "),
    ],
)
def test_what_the_model_can_not_is_refused(
    model: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from pdserve.cli.main import main

    given = ["--model", model, "--prompts", "16", "--contexts", "16", *arguments]
    monkeypatch.setattr(sys, "argv", ["pdserve", "bench", "engine", *given])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (1, 2)
    assert words in capsys.readouterr().err


def test_ctrl_c_ends_it_without_a_traceback_or_a_file(model: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    arguments = ("--model", model, "--seconds", "300", "--peak-mib", "1", "--json", str(target))
    running = subprocess.Popen(
        [*INTERRUPTIBLE, "bench", "engine", *arguments, "--prompts", "16", "--contexts", "16"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    try:
        assert running.stderr is not None
        seen = [running.stderr.readline() for _ in range(2)]
        assert "done, 0 failed" in seen[1]
        os.kill(running.pid, signal.SIGINT)
        out, rest = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130
    assert "Traceback" not in rest + out
    assert not target.exists()
