"""The one model in each peer's format, made once from the default GGUF. Same weights for everyone.

`hf` is what the GGUF dequantises to, in bf16. BF16.gguf holds the same numbers; Q4_1.gguf is the file as
shipped. int8 and Q8_0 are the peers' own quantisations of it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.peers.install import PEERS, PeerError, Progress, interpreter, last_words, step
from benchmarks.peers.specs import ENGINES
from pdserve.models.registry import locate

MODEL = "smollm2-135m-instruct"
WEIGHTS = PEERS / "model"


def prepare(path: str, progress: Progress) -> None:
    """Makes `.peers/model/<path>` unless it is there. Raises PeerError."""
    target = WEIGHTS / path
    if target.exists():
        return
    WEIGHTS.mkdir(parents=True, exist_ok=True)
    if path == "Q4_1.gguf":
        target.unlink(missing_ok=True)  # a link that leads nowhere any more
        target.symlink_to(locate(MODEL).path)
    elif path == "openvino-int8":
        prepare("hf", progress)
        progress("converting the model for OpenVINO, int8 weights (about a minute)")
        _export_openvino(target)
    else:
        progress(f"writing the model as {path}")
        _convert(path)


def _convert(path: str) -> None:
    script = PEERS.parent / "peers" / "convert.py"
    log = PEERS / "model.log"
    log.write_text("")
    step("model", [sys.executable, str(script), str(locate(MODEL).path), str(WEIGHTS / path)], log)


def _export_openvino(target: Path) -> None:
    engine = next(engine for engine in ENGINES if engine.name == "openvino")
    log, part = PEERS / "openvino.export.log", target.with_name(target.name + ".part")
    log.write_text("")
    shutil.rmtree(part, ignore_errors=True)
    command = [str(interpreter(engine).with_name("optimum-cli")), "export", "openvino"]
    command += ["--model", str(WEIGHTS / "hf"), "--task", "text-generation-with-past"]
    step("openvino", [*command, "--weight-format", "int8", str(part)], log)
    if not (part / "openvino_model.bin").is_file():
        raise PeerError(f"openvino: {last_words(log)}")
    part.rename(target)
