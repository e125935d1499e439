"""GGUF weights that stay quantised stand for the same numbers as the dequantised ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from pdserve.models.loader import load_model
from tests.support import tiny_models


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("tied", [False, True])
def test_kept_weights_stand_for_the_dequantised_ones(kind: Kind, tied: bool, tmp_path: Path) -> None:
    model = tiny_models.llama(tie_word_embeddings=tied)
    path = str(tiny_models.save_gguf(model, tmp_path / "tiny.gguf", kind))
    plain, kept = load_model(path, "float32"), load_model(path, "float32", keep_quantised=True)
    assert not plain.quantised
    assert plain.digest == kept.digest
    names = {n for n in plain.weights if n.endswith("_proj.weight")}
    assert set(kept.quantised) == names | {"lm_head.weight"}
    assert set(kept.weights) == set(plain.weights) - set(kept.quantised)
    for name, weight in kept.quantised.items():
        same = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
        assert weight.bits == (8 if kind is Kind.Q8_0 else 4)
        torch.testing.assert_close(weight.dequantise(), plain.weights[same], rtol=1e-6, atol=1e-6)
    assert not kept.without_weights().quantised


def test_other_types_come_dequantised(tmp_path: Path) -> None:
    path = str(tiny_models.save_gguf(tiny_models.llama(), tmp_path / "tiny.gguf", Kind.Q5_1))
    kept = load_model(path, "float32", keep_quantised=True)
    assert not kept.quantised
    assert "lm_head.weight" in kept.weights
