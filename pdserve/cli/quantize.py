"""`pdserve quantize`: a checkpoint with a form for prefill and one for decode, and what each one costs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.calibrate.corpus import Batch, batches, read_texts, sequences
from pdserve.calibrate.forward import PlainDecoder
from pdserve.calibrate.quality import compare
from pdserve.calibrate.quantise import Options, QuantisedModel, quantise, stored_form
from pdserve.calibrate.report import FormReport, lines, memory_bytes, write_report
from pdserve.calibrate.write import new_directory, write_forms
from pdserve.cli.bar import progress_bar
from pdserve.cli.stopping import StopSignals
from pdserve.errors import ConfigError
from pdserve.models.loaded import DTYPES, LoadedModel
from pdserve.models.loader import load_model
from pdserve.quant.schemes import Scheme, scheme_of
from pdserve.tokenizer.encode import Tokenizer

HELD_OUT = 5
"""Without a text to evaluate, one in so many calibration texts is kept for that."""
LENGTH = 512
"""Tokens of a sequence at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to make. schemes: by role. calibration, evaluate: files of text. dtype: of what stays plain."""

    schemes: Mapping[str, Scheme]
    calibration: Path | None
    evaluate: Path | None
    calibration_tokens: int
    evaluation_tokens: int
    dtype: str
    fold_values: bool


def wish_of(
    *, prefill: str, decode: str, calibration: Path | None, evaluate: Path | None, calibration_tokens: int,
    evaluation_tokens: int, dtype: str, fold_values: bool,
) -> Wish:  # fmt: skip
    """Checked options. Raises ConfigError naming the one that is wrong."""
    named = {"prefill": prefill, "decode": decode}
    schemes = {role: scheme_of(name, role) for role, name in named.items() if name != "none"}
    if not schemes:
        raise ConfigError("prefill: name a scheme for prefill, for decode or for both")
    if calibration is None and any(s.calibrated for s in schemes.values()):
        raise ConfigError("calibration: the schemes need a file of text")
    if calibration is None and evaluate is None:
        raise ConfigError("evaluate: give a file of text to measure quality on, or one for calibration")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: must be one of {', '.join(DTYPES)}")
    if fold_values and len(schemes) == 2:
        raise ConfigError("fold_values: the forms of two roles exchange values, which must mean the same")
    return Wish(
        schemes=schemes, calibration=calibration, evaluate=evaluate, calibration_tokens=calibration_tokens,
        evaluation_tokens=evaluation_tokens, dtype=dtype, fold_values=fold_values,
    )  # fmt: skip


def run(source: str, output: Path, wish: Wish) -> None:
    """Quantises, writes, reads back, measures. A stop signal raises KeyboardInterrupt and leaves nothing.

    Raises ModelError and ConfigError.
    """
    with StopSignals(), new_directory(output) as directory:
        _say(f"loading {source}")
        model = load_model(source, "float32")
        calibration, evaluation = _texts(model, wish)
        made = _forms(model, wish, calibration)
        _say("writing")
        sizes = write_forms(model, made, directory, wish.dtype)
        _say("measuring what was written")
        reports = _measured(model, made, sizes, directory, evaluation, wish)
        about = {
            "model": model.name,
            "digest": model.digest,
            "calibration_tokens": _count(calibration),
            "evaluation_tokens": _count(evaluation),
        }
        write_report(directory, reports, about)
    plain_bytes = sum(2 * weight.numel() for weight in model.weights.values())
    print("\n".join(lines(reports, plain_bytes)))
    print(f"serve it with: pdserve up --model {output}{_flags(made)}")


def _flags(made: Mapping[str, QuantisedModel]) -> str:
    """What `pdserve up` needs to compute with the forms, where kernels take them."""
    bits = {role: form.scheme.grid.bits for role, form in made.items() if form.scheme.grid is not None}
    flags = "".join(f" --{role}-weights w{width}a8" for role, width in bits.items())
    return f"{flags} --kv-mixing relaxed" if bits else ""


def _say(what: str) -> None:
    print(f"{what}…", file=sys.stderr, flush=True)


def _count(rows: list[Batch]) -> int:
    return sum(int(batch.real_BT.sum()) for batch in rows)


def _texts(model: LoadedModel, wish: Wish) -> tuple[list[Batch], list[Batch]]:
    """Batches for calibration (none if no scheme needs them) and for evaluation, which have no text in
    common.
    """
    tokenizer = Tokenizer(model.tokenizer)
    seen = [] if wish.calibration is None else read_texts(wish.calibration)
    if wish.evaluate is not None:
        held = read_texts(wish.evaluate, "evaluate")
    else:
        held, seen = seen[::HELD_OUT], [text for n, text in enumerate(seen) if n % HELD_OUT]
    length = min(LENGTH, model.config.max_context)

    def cut(texts: list[str], max_tokens: int, option: str) -> list[Batch]:
        found = list(batches(sequences(tokenizer, texts, max_tokens=max_tokens, length=length)))
        if not found:
            raise ConfigError(f"{option}: the file has too little text")
        return found

    needed = any(scheme.calibrated for scheme in wish.schemes.values())
    calibration = cut(seen, wish.calibration_tokens, "calibration") if needed else []
    return calibration, cut(held, wish.evaluation_tokens, "evaluate")


def _forms(model: LoadedModel, wish: Wish, calibration: list[Batch]) -> dict[str, QuantisedModel]:
    made: dict[str, QuantisedModel] = {}
    options = Options(fold_values=wish.fold_values, stored=DTYPES[wish.dtype])
    for role, scheme in wish.schemes.items():
        same = next((form for form in made.values() if form.scheme == scheme), None)
        if same is None:
            _say(f"{scheme.name} for {role}")
            with progress_bar(model.config.num_layers) as advance:
                same = quantise(
                    model.config, model.weights, scheme, calibration, options, lambda n, of: advance(False)
                )
        made[role] = same
    return made


def _measured(
    model: LoadedModel,
    made: Mapping[str, QuantisedModel],
    sizes: Mapping[str, int],
    directory: Path,
    evaluation: list[Batch],
    wish: Wish,
) -> dict[str, FormReport]:
    """Each form read back from its files, against the float32 model."""
    base = PlainDecoder(config=model.config, weights=model.weights)
    reports: dict[str, FormReport] = {}
    for role, form in made.items():
        written = load_model(str(directory), wish.dtype, keep_quantised=True, role=role)
        with progress_bar(len(evaluation)) as advance:
            decoder = stored_form(written, form).decoder()
            quality = compare(base, decoder, evaluation, lambda n, of: advance(False))
        reports[role] = FormReport(
            scheme=form.scheme.name,
            quality=quality,
            file_bytes=sizes[role],
            memory_bytes=memory_bytes(form),
            alphas=form.alphas,
        )
    return reports
