"""The plain decoder against transformers; schemes on a whole model; what is written and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.calibrate.corpus import Batch, batches, read_texts
from pdserve.calibrate.folds import fold, pairs
from pdserve.calibrate.forward import PlainDecoder
from pdserve.calibrate.quality import compare, passes
from pdserve.calibrate.quantise import Options, QuantisedModel, quantise, stored_form
from pdserve.calibrate.served import attend_int8
from pdserve.calibrate.write import new_directory, write_forms
from pdserve.errors import ConfigError, ModelError
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.quant.forms import ActivationKind
from pdserve.quant.kv import KVForm
from pdserve.quant.schemes import SCHEMES
from tests.support import tiny_models, tiny_moe

VARIANTS = ["llama2-mha", "llama-biases", "llama-yarn", "mistral-window", "qwen2-tied", "qwen3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.llama(attention_bias=True), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), "float32")


def text(seed: int, rows: int = 6, length: int = 40) -> list[Batch]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 250, (rows, length), generator=random).tolist()
    return list(batches([row[: length - n] for n, row in enumerate(ids)], tokens_each=100))


def exact(model: LoadedModel) -> PlainDecoder:
    return PlainDecoder(config=model.config, weights=model.weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_plain_decoder_computes_what_transformers_does(variant: str, tmp_path: Path) -> None:
    reference = tiny_models.VARIANTS[variant]()
    loaded = load_model(str(tiny_models.save(reference, tmp_path)), "float32")
    tokens = torch.randint(0, 250, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(tokens).logits
    decoder = exact(loaded)
    got = decoder.logits(decoder.hidden(tokens).flatten(0, 1)).view(expected.shape)
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_models.save(tiny_moe.mixtral(), tmp_path)), "float32")
    with pytest.raises(ModelError, match="dense"):
        quantise(loaded.config, loaded.weights, SCHEMES["w8a8-rtn"])


@pytest.mark.parametrize("values", [False, True])
def test_folding_changes_no_result(model: LoadedModel, values: bool) -> None:
    weights = dict(model.weights)
    for kind, pair in pairs(model.config, 1, values=values).items():
        size = weights[pair.before[0]].shape[0]
        scale = torch.rand(size, generator=torch.Generator().manual_seed(len(kind))) * 3 + 0.1
        weights |= fold(weights, pair, scale, torch.bfloat16)
    quality = compare(exact(model), replace(exact(model), weights=weights), text(1))
    assert quality.kl < 1e-6
    assert quality.top1 == 1.0
    assert ("out" in pairs(model.config, 1, values=values)) == values


@pytest.mark.parametrize("name", sorted(n for n in SCHEMES if "-g128" not in n and "-g64" not in n))
def test_each_scheme_gives_a_model_near_the_float_one(model: LoadedModel, name: str) -> None:
    made = quantise(model.config, model.weights, SCHEMES[name], text(2))
    assert set(made.low) == {n for n in model.weights if n.endswith("_proj.weight")} | {"lm_head.weight"}
    quality = compare(exact(model), made.decoder(), text(3))
    assert quality.kl < (0.5 if name.startswith("w4") else 0.3 if "static" in name or "e5m2" in name else 0.1)
    assert len(quality.layer_errors) == 3
    for low in made.low.values():
        low.dequantise()


def test_static_schemes_have_a_scale_for_each_linear(model: LoadedModel) -> None:
    made = quantise(model.config, model.weights, SCHEMES["w8a8-static"], text(2))
    kinds = {low.activation.kind for name, low in made.low.items() if "_proj" in name}
    assert kinds == {ActivationKind.TENSOR}


def test_schemes_that_need_text_say_so(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="calibration"):
        quantise(model.config, model.weights, SCHEMES["w4a16-gptq-g32"])


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_a_quantised_cache_is_near_the_exact_one(model: LoadedModel, kind: str) -> None:
    quality = compare(exact(model), replace(exact(model), kv=KVForm(kind=kind)), text(4))
    assert 0 < quality.kl < 0.1


def test_scales_by_token_are_nearer_and_the_kernels_near_them(model: LoadedModel) -> None:
    forms = {"kv": KVForm(page_size=16)}, {"kv": KVForm(page_size=1)}, {"attend": attend_int8}
    by_page, by_token, served = (compare(exact(model), replace(exact(model), **f), text(4)).kl for f in forms)
    assert 0 < by_token < by_page
    assert by_token < served < 0.1


def test_the_same_model_has_no_distance_from_itself(model: LoadedModel) -> None:
    quality = compare(exact(model), exact(model), text(5))
    assert (quality.ratio, quality.top1, quality.layer_errors) == (1.0, 1.0, (0.0, 0.0, 0.0))
    known = passes(exact(model), text(5))
    assert compare(exact(model), exact(model), text(5), known=known) == quality
    assert quality.num_tokens == sum(int(b.real_BT[:, 1:].sum()) for b in text(5))


def form(model: LoadedModel, name: str) -> QuantisedModel:
    return quantise(model.config, model.weights, SCHEMES[name], text(2), Options(stored=torch.float32))


NAMES = ["w8a8-smoothquant", "w8a8-static", "w8a16-rtn", "w4a16-awq-g32", "w4a16-rtn-sym-g32", "w4a8-rtn-g32"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_back(model: LoadedModel, name: str, tmp_path: Path) -> None:
    made = form(model, name)
    write_forms(model, {"decode": made}, tmp_path, "float32")
    back = load_model(str(tmp_path), "float32", keep_quantised=True, role="decode")
    for weight_name, low in made.low.items():
        kept = back.quantised[weight_name]
        torch.testing.assert_close(kept.dequantise(), low.dequantise(), rtol=0, atol=0)
        assert kept.activation == low.activation
    quality = compare(made.decoder(), stored_form(back, made).decoder(), text(6))
    assert quality.kl == pytest.approx(0, abs=1e-9)
    plain = load_model(str(tmp_path), "float32")
    assert set(plain.weights) == set(model.weights)
    assert plain.config == model.config
    assert plain.tokenizer.model_name == tmp_path.name


def test_fp8_is_served_dequantised(model: LoadedModel, tmp_path: Path) -> None:
    made = form(model, "w8a8-fp8-e4m3")
    write_forms(model, {"decode": made}, tmp_path, "float32")
    back = load_model(str(tmp_path), "float32", keep_quantised=True)
    assert not back.quantised
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(back.weights[name], made.low[name].dequantise())


def test_two_forms_share_a_folder_and_the_embedding(model: LoadedModel, tmp_path: Path) -> None:
    forms = {"prefill": form(model, "w8a8-rtn"), "decode": form(model, "w4a16-rtn-g32")}
    sizes = write_forms(model, forms, tmp_path, "bfloat16")
    assert sizes["decode"] < sizes["prefill"]
    bits, digests = {}, set()
    for role in ("prefill", "decode", "aggregated"):
        back = load_model(str(tmp_path), "bfloat16", keep_quantised=True, role=role)
        digests.add(back.digest)
        assert back.form == ("prefill" if role == "prefill" else "decode")
        bits[role] = back.quantised["model.layers.0.mlp.up_proj.weight"].bits
    assert bits == {"prefill": 8, "decode": 4, "aggregated": 4}
    assert len(digests) == 1
    shards = list(tmp_path.glob("*/model-00001-of-00002.safetensors"))
    assert len({path.stat().st_ino for path in shards}) == 1
    (tmp_path / "forms.json").write_text(json.dumps({"version": 1, "roles": {"decode": "../x"}}))
    with pytest.raises(ModelError, match="no folder"):
        load_model(str(tmp_path), role="decode")


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> None:
        with new_directory(tmp_path / "out") as partial:
            (partial / "a").write_text("a")
            raise ModelError("broken")

    with pytest.raises(ModelError, match="broken"):
        broken()
    assert list(tmp_path.iterdir()) == []
    with new_directory(tmp_path / "out") as partial:
        (partial / "a").write_text("a")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="not empty"), new_directory(tmp_path / "out"):
        pass


def test_texts_come_from_lines_or_paragraphs(tmp_path: Path) -> None:
    lines = [{"question": "q", "answer": "a"}, {"turns": ["one", "two"]}, {"text": "t", "id": 3}, {"id": 4}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_texts(tmp_path / "a.jsonl") == ["q\na", "one\ntwo", "t"]
    (tmp_path / "b.txt").write_text("one\ntwo\n\nthree\n")
    assert read_texts(tmp_path / "b.txt") == ["one\ntwo", "three"]
    for name, content in {"c.jsonl": "{", "d.jsonl": "[1]", "e.txt": " \n"}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match="calibration"):
            read_texts(tmp_path / name)
    with pytest.raises(ConfigError, match="evaluate"):
        read_texts(tmp_path / "none", "evaluate")
