"""`pdserve quantize` on a tiny model: what it writes, says and refuses."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from pdserve.cli import quantize
from pdserve.cli.quantize import Wish, run, wish_of
from pdserve.errors import ConfigError
from pdserve.models.loader import load_model
from tests.support import tiny_models


def words(seed: int) -> str:
    return "\n\n".join(
        " ".join(f"w{(seed + 7 * row + word) % 250}" for word in range(30)) for row in range(25)
    )


def wish(text: Path | None, **changed: object) -> Wish:
    options: dict[str, object] = {
        "prefill": "w8a8-smoothquant", "decode": "w4a16-awq", "calibration": text, "evaluate": None,
        "calibration_tokens": 400, "evaluation_tokens": 200, "dtype": "bfloat16", "fold_values": False,
    }  # fmt: skip
    return wish_of(**{**options, **changed})  # type: ignore[arg-type]


def test_it_writes_two_forms_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_models.save(tiny_models.llama(tie_word_embeddings=True), tmp_path / "model")
    (tmp_path / "text.txt").write_text(words(0))
    run(str(source), tmp_path / "out", wish(tmp_path / "text.txt"))
    report = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert report["calibration_tokens"] <= 400
    assert {role: form["scheme"] for role, form in report["forms"].items()} == {
        "prefill": "w8a8-smoothquant", "decode": "w4a16-awq-g32",
    }  # fmt: skip
    for form in report["forms"].values():
        assert form["quality"]["num_tokens"] > 100
        assert form["quality"]["kl"] < 1
        assert len(form["quality"]["layer_errors"]) == len(form["alphas"]) == 3
    assert (tmp_path / "out" / "layers.svg").read_text().startswith("<?xml")
    shown = capsys.readouterr().out
    assert "w8a8-smoothquant" in shown
    assert "memory MB" in shown
    names = {role: load_model(str(tmp_path / "out"), role=role).name for role in ("prefill", "decode")}
    assert set(names.values()) == {"out"}


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"prefill": "none", "decode": "none"}, "prefill"),
        ({"prefill": "w1"}, "prefill"),
        ({"decode": "w1"}, "decode"),
        ({"dtype": "int8"}, "dtype"),
        ({"fold_values": True}, "fold_values"),
        ({"calibration": None}, "calibration"),
        ({"calibration": None, "prefill": "w8a8-rtn", "decode": "none"}, "evaluate"),
    ],
)
def test_options_that_do_not_fit_are_refused(changed: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}:"):
        wish(Path("text"), **changed)


def test_a_text_with_too_little_in_it_leaves_nothing_behind(tmp_path: Path) -> None:
    source = tiny_models.save(tiny_models.llama(), tmp_path / "model")
    (tmp_path / "text.txt").write_text("w1")
    with pytest.raises(ConfigError, match="too little"):
        run(str(source), tmp_path / "out", wish(tmp_path / "text.txt"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "text.txt"]


def test_a_stop_signal_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "load_model", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run("model", tmp_path / "out", wish(tmp_path / "text.txt"))
    assert not list(tmp_path.iterdir())
