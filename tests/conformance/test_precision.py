"""Schemes of quantised linears on the default model: how far they are from float32, and rounding."""

from __future__ import annotations

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.quant_linear import QuantLinear
from pdserve.models.build import build_decoder
from pdserve.models.loaded import DTYPES, LoadedModel
from pdserve.models.loader import load_model
from pdserve.models.precision import HEAD, QuantPacker, packer
from pdserve.quant.forms import QuantWeight
from tests.support import oracle_prompts

MODEL = "smollm2-135m-instruct"
ROWS = 96
PAGE = 16
BOUNDS = {"w8a8": 0.06, "w4a8": 0.02}
"""Mean KL against float32, nats per token; measured: 0.033, 0.006."""
PAGES_BOUND = 0.005
"""The same for pages of int8 as the kernels read and write them; measured: 0.0015."""


def logits(model: LoadedModel, scheme: str, token_ids: list[int], dtype: str | None = None) -> torch.Tensor:
    """float64 log probabilities [T, V] of every row. dtype: of pages; None: the model's."""
    config, pages = model.config, -(-len(token_ids) // PAGE)
    pack = packer(scheme, model.quantised, deterministic=False)
    decoder = build_decoder(config, model.weights, deterministic=False, pack=pack)
    page = config.num_layers * 2 * config.num_kv_heads * (config.head_dim + 4 * (dtype == "int8")) * PAGE
    kv = KVView(
        storage=torch.zeros(pages * page, dtype=torch.uint8 if dtype == "int8" else DTYPES[model.dtype]),
        page_stride=page, num_pages=pages, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, page_size=PAGE, dtype=dtype or model.dtype,
    )  # fmt: skip
    rows = len(token_ids)
    meta = AttentionMeta.build([rows], [rows], [list(range(pages))], page_size=PAGE)
    out = decoder.forward(torch.tensor(token_ids), kv, meta, torch.arange(rows))
    return torch.log_softmax(out.double(), -1)


def test_divergence_from_float32_is_small() -> None:
    """Rounded here, and with the codes of the file (4 bits) in bfloat16."""
    plain, kept = load_model(MODEL, "float32"), load_model(MODEL, "bfloat16", keep_quantised=True)
    text = oracle_prompts.prompts()[-1].text
    token_ids = oracle_prompts.encode(plain.tokenizer.tokenizer_json, [text])[0][:ROWS]
    wanted = logits(plain, "exact", token_ids)
    for model, scheme in ((plain, "w8a8"), (kept, "w4a8")):
        got = logits(model, scheme, token_ids)
        assert (wanted.exp() * (wanted - got)).sum(-1).mean().item() < BOUNDS[scheme]


def test_pages_of_int8_cost_little() -> None:
    """What attention rounds itself (queries, weights of the softmax) is in it."""
    model = load_model(MODEL, "float32")
    text = oracle_prompts.prompts()[-1].text
    token_ids = oracle_prompts.encode(model.tokenizer.tokenizer_json, [text])[0][: 3 * ROWS]
    wanted, got = (logits(model, "exact", token_ids, pages) for pages in (None, "int8"))
    divergence = (wanted.exp() * (wanted - got)).sum(-1).mean().item()
    assert 0 < divergence < PAGES_BOUND
    assert (wanted.argmax(-1) == got.argmax(-1)).double().mean().item() > 0.95


class TestPacking:
    def test_schemes_by_name(self) -> None:
        with pytest.raises(ConfigError, match="w4a8"):
            packer("w2", {}, deterministic=False)

    def test_codes_of_a_scheme_s_form_are_kept(self) -> None:
        torch.manual_seed(3)
        codes = torch.randint(-8, 8, (48, 128), dtype=torch.int8)
        kept = QuantWeight(codes_NK=codes, scale_NG=torch.rand(48, 4), bits=4, group_size=32)
        by_codes = QuantPacker(bits=4, quantised={"a.weight": kept})({}, ["a"])
        by_value = QuantPacker(bits=4)({"a.weight": kept.dequantise()}, ["a"])
        x = torch.randn(5, 128)
        wanted = x @ kept.dequantise().T
        for layer, bound in ((by_codes, 0.02), (by_value, 0.08)):
            assert ((layer(x) - wanted).abs().max() / wanted.abs().max()).item() < bound

    def test_parts_of_unlike_forms_make_one_layer(self) -> None:
        torch.manual_seed(4)
        plain, x = torch.randn(16, 96), torch.randn(3, 96)
        coarse = QuantWeight(
            codes_NK=torch.randint(-8, 8, (16, 96), dtype=torch.int8), scale_NG=torch.rand(16, 2),
            zero_NG=torch.randint(-8, 8, (16, 2), dtype=torch.int8), bits=4, group_size=64,
        )  # fmt: skip
        eight = QuantWeight(
            codes_NK=torch.randint(-128, 128, (16, 96), dtype=torch.int8), scale_NG=torch.rand(16, 1), bits=8
        )
        for other, bits in ((coarse, 4), (eight, 8)):
            layer = QuantPacker(bits=4, quantised={"b.weight": other})({"a.weight": plain}, ["a", "b"])
            assert layer.bits == bits
            got, wanted = layer(x).split(16, 1), (x @ plain.T, x @ other.dequantise().T)
            for part, exact in zip(got, wanted, strict=True):
                assert ((part - exact).abs().max() / exact.abs().max()).item() < 0.1

    def test_the_head_has_8_bits_and_biases_are_kept(self) -> None:
        weights = {f"{HEAD}.weight": torch.randn(10, 64), "a.weight": torch.zeros(10, 64)}
        weights["a.bias"] = torch.arange(10.0)
        pack = QuantPacker(bits=4)
        head, biased = pack(weights, [HEAD]), pack(weights, ["a"])
        assert isinstance(head, QuantLinear)
        assert (head.bits, head.by_group) == (8, True)
        assert torch.equal(biased(torch.randn(2, 64)), weights["a.bias"].expand(2, 10))
