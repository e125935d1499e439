"""What `pdserve quantize` writes, read by others: transformers with the compressed-tensors package.

Oracle: the package's own decompression and, where inputs are quantised, its own rounding of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

from pdserve.calibrate.corpus import batches
from pdserve.calibrate.quantise import Options, QuantisedModel, quantise, stored_form
from pdserve.calibrate.write import write_forms
from pdserve.models.loader import load_model
from pdserve.quant.schemes import scheme_of
from tests.support import tiny_models

SCHEMES = (
    "w8a8-smoothquant", "w8a8-static", "w8a16-rtn", "w4a8-rtn", "w4a16-awq", "w4a16-rtn-sym-g32",
    "w8a8-fp8-e4m3", "w8a16-fp8-e4m3",
)  # fmt: skip
WITH_INPUTS = ("w8a8-smoothquant", "w8a8-static", "w4a16-rtn-sym-g32", "w8a8-fp8-e4m3")
"""Schemes that transformers also holds as they are stored; their inputs are then rounded at run time."""
TOKENS = torch.arange(60).view(2, 30) * 3 % 250


def written(scheme: str, folder: Path) -> tuple[Path, QuantisedModel]:
    """The form's own directory, and the form as its files hold it."""
    model = load_model(
        str(tiny_models.save(tiny_models.llama(tie_word_embeddings=True), folder / "plain")), "float32"
    )
    texts = [[(seed + 7 * i) % 250 for i in range(40)] for seed in range(12)]
    made = quantise(
        model.config, model.weights, scheme_of(scheme, "prefill"), list(batches(texts)),
        Options(stored=torch.float32), lambda n, of: None,
    )  # fmt: skip
    target = folder / "quantised"
    target.mkdir()
    write_forms(model, {"prefill": made}, target, "float32")
    return target / "prefill", stored_form(load_model(str(target), "float32", keep_quantised=True), made)


def theirs(folder: Path, *, dequantise: bool) -> PreTrainedModel:
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantise else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_others_read_the_very_weights(scheme: str, tmp_path: Path) -> None:
    folder, form = written(scheme, tmp_path)
    modules = dict(theirs(folder, dequantise=True).named_modules())
    inner = {name: low for name, low in form.low.items() if name != "lm_head.weight"}
    assert len(inner) == 3 * 7
    for name, low in inner.items():
        found = modules[name.removesuffix(".weight")].weight
        torch.testing.assert_close(found, low.dequantise(), rtol=0, atol=0)


@pytest.mark.parametrize("scheme", WITH_INPUTS)
def test_others_compute_what_we_do(scheme: str, tmp_path: Path) -> None:
    folder, form = written(scheme, tmp_path)
    with torch.no_grad():
        expected = theirs(folder, dequantise=False)(TOKENS).logits
    decoder = form.decoder()
    hidden = decoder.hidden(TOKENS)
    found = decoder.logits(hidden.flatten(0, 1)).view_as(expected)
    # Their scale of a token is the maximum over 127.5, ours over 127: 0.7 % of one layer's result, here.
    assert (found - expected).norm() < 0.1 * expected.norm()
