"""All layers in one call against the same layers one operator at a time: the same bits, quantised or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdserve.errors import InternalError
from pdserve.kernels import native
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.best import best_tokens, best_tokens_reference
from pdserve.kernels.kv_view import KVView
from pdserve.models.build import build_decoder
from pdserve.models.decoder import Decoder
from pdserve.models.fused import FusedDecoder, Model, fused
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.models.precision import packer
from tests.conformance.kernel_kit import DTYPES, both_dtypes
from tests.support import tiny_models, tiny_moe

pytestmark = pytest.mark.smoke
PAGE, PAGES = 16, 40
SCHEMES = ("exact", "w8a8", "w4a8")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """qwen2: biases; qwen3: head norms; mistral: a window."""
    made = {"qwen2": tiny_models.qwen2(), "qwen3": tiny_models.qwen3(), "mistral": tiny_models.mistral()}
    return {name: tiny_models.save(model, tmp_path_factory.mktemp(name)) for name, model in made.items()}


def pages_of(model: LoadedModel, dtype: str | None = None) -> KVView:
    config = model.config
    row = config.head_dim + (4 if dtype == "int8" else 0)
    page = config.num_layers * 2 * config.num_kv_heads * row * PAGE
    return KVView(
        storage=torch.zeros(PAGES * page, dtype=torch.uint8 if dtype == "int8" else DTYPES[model.dtype]),
        page_stride=page, num_pages=PAGES, num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        page_size=PAGE, dtype=dtype or model.dtype,
    )  # fmt: skip


def steps() -> list[tuple[list[int], list[int], list[int]]]:
    """(rows by sequence, contexts, wanted rows): a chunk without logits, a prompt's end beside it, decode."""
    return [
        ([40, 7], [40, 7], []),
        ([30, 1, 9], [70, 8, 9], [29, 30, 39]),
        ([1, 1, 1], [71, 9, 10], [0, 1, 2]),
    ]


def run(model: Model, view: KVView, vocab: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tables = [list(range(0, 10)), list(range(10, 20)), list(range(20, 30))]
    results = []
    for rows, contexts, wanted in steps():
        meta = AttentionMeta.build(rows, contexts, tables[: len(rows)], page_size=PAGE)
        token_ids = torch.randint(0, vocab, (sum(rows),), generator=generator)
        results.append(model.forward(token_ids, view, meta, torch.tensor(wanted, dtype=torch.int64)))
    return results


@both_dtypes
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("pages", [None, "int8"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
def test_logits_and_pages_are_those_of_single_operators(
    name: str, pages: str | None, scheme: str, dtype: str, folders: dict[str, Path]
) -> None:
    model = load_model(str(folders[name]), dtype)
    pack = packer(scheme, {}, deterministic=False)
    plain = build_decoder(model.config, model.weights, deterministic=False, pack=pack)
    whole = fused(plain)
    assert isinstance(whole, FusedDecoder)
    views = pages_of(model, pages), pages_of(model, pages)
    pairs = zip(
        run(plain, views[0], model.config.vocab_size),
        run(whole, views[1], model.config.vocab_size),
        strict=True,
    )
    for wanted, got in pairs:
        assert wanted.isfinite().all()
        assert torch.equal(got, wanted)
    assert torch.equal(views[0].storage, views[1].storage)
    assert views[0].storage.any()


def test_pages_outside_the_pool_are_refused(folders: dict[str, Path]) -> None:
    model = load_model(str(folders["qwen3"]), "float32")
    whole = fused(build_decoder(model.config, model.weights, deterministic=False))
    meta = AttentionMeta.build([3], [3], [[PAGES]], page_size=PAGE)
    with pytest.raises(InternalError):
        whole.forward(torch.tensor([1, 2, 3]), pages_of(model), meta, torch.tensor([2]))


def test_mixtures_run_operator_by_operator(tmp_path: Path) -> None:
    model = load_model(str(tiny_models.save(tiny_moe.mixtral(), tmp_path)), "float32")
    decoder = build_decoder(model.config, model.weights, deterministic=False)
    assert isinstance(fused(decoder), Decoder)


def test_best_tokens() -> None:
    torch.manual_seed(2)
    for rows, width in ((1, 5), (3, 16), (7, 49152), (40, 1000)):
        logits = torch.randn(rows, width).round(decimals=1)  # many ties
        assert best_tokens(logits) == best_tokens_reference(logits)
        assert best_tokens(-logits.abs()) == best_tokens_reference(-logits.abs())
        for bad in (float("nan"), float("inf"), float("-inf")):
            for at in (0, width - 1):
                spoiled = logits.clone()
                spoiled[rows // 2, at] = bad
                assert best_tokens(spoiled) == best_tokens_reference(spoiled)
