"""Loads a model from what the user named: registered name, Hugging Face directory or hub id, GGUF file.

What lives here: `load_model`. What does not: formats (`gguf_*`, `hf_*`, `safetensors_file`), building for a
device (`build`). Nothing here runs code from a model or unpickles anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pdserve.errors import ModelError
from pdserve.models.config import ModelConfig
from pdserve.models.digests import read_lock, verified_digest
from pdserve.models.forms import FORMS, folders_of
from pdserve.models.gguf_config import config_from_gguf
from pdserve.models.gguf_file import read_gguf
from pdserve.models.gguf_weights import freq_factors, weights_from_gguf
from pdserve.models.hf_directory import ModelFiles, read_directory, read_weights
from pdserve.models.loaded import DTYPES, LoadedModel
from pdserve.models.registry import Source, locate
from pdserve.models.weights import check_finite
from pdserve.quant.forms import QuantWeight
from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.tokenizer.from_dir import load_bundle_from_dir
from pdserve.tokenizer.from_gguf import bundle_from_metadata


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    quantised: dict[str, QuantWeight]
    tokenizer: TokenizerBundle
    digest: str


def _from_gguf(source: Source, dtype: torch.dtype, keep_quantised: bool) -> _Parts:
    file = read_gguf(source.path)
    lock = {source.path.name: source.sha256} if source.sha256 else read_lock(source.path.parent)
    with ThreadPoolExecutor(max_workers=2) as pool:
        digest = pool.submit(verified_digest, [source.path], lock)
        bundle = pool.submit(bundle_from_metadata, file.metadata, fallback_name=source.name)
        config = config_from_gguf(file.metadata, frozenset(file.tensors), freq_factors(file))
        weights, kept = weights_from_gguf(file, config, dtype, keep_quantised=keep_quantised)
        return _Parts(
            config=config, weights=weights, quantised=kept, tokenizer=bundle.result(), digest=digest.result()
        )


def _from_directory(source: Source, dtype: torch.dtype, keep_quantised: bool) -> _Parts:
    files = read_directory(source.path)
    with ThreadPoolExecutor(max_workers=2) as pool:
        digest = pool.submit(_digest, source.path, files)
        bundle = pool.submit(load_bundle_from_dir, source.path)
        weights, kept = read_weights(files, dtype, keep_quantised=keep_quantised)
        return _Parts(
            config=files.config, weights=weights, quantised=kept, tokenizer=bundle.result(),
            digest=digest.result(),
        )  # fmt: skip


def _digest(folder: Path, files: ModelFiles) -> str:
    """Of the model's files; of those of all its forms where it has several, for they are one model."""
    if not (folder.parent / FORMS).is_file():
        return verified_digest(files.files, read_lock(folder))
    forms = sorted(set(folders_of(folder.parent).values()))
    each = (verified_digest(read_directory(form).files, read_lock(form)) for form in forms)
    return hashlib.sha256(" ".join(each).encode()).hexdigest()


def _agreeing(tokenizer: TokenizerBundle, config: ModelConfig, name: str | None) -> TokenizerBundle:
    """The bundle with the model's own limits, which know of scaled contexts and padded vocabularies.

    name: of the model, where it is not the folder's.
    """
    return dataclasses.replace(
        tokenizer,
        model_name=name or tokenizer.model_name,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        end_token_ids=config.end_token_ids,
    )


def load_model(
    source: str, dtype: str = "bfloat16", *, keep_quantised: bool = False, role: str = "aggregated"
) -> LoadedModel:
    """Loads and checks a model.

    source: a registered name, a Hugging Face directory, a .gguf file, or a hub id. dtype: "float32" or
    "bfloat16"; all weights come in it. keep_quantised: linears that the files have quantised come as
    `LoadedModel.quantised` instead, for kernels that take them. role: of the worker, where the model has
    forms for roles (`forms`). Raises ModelError, with a sentence, for anything that is missing, damaged or
    not supported.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}.")
    found = locate(source)
    form = None
    if found.path.is_dir() and (form := folders_of(found.path).get(role)):
        found = dataclasses.replace(found, path=form)
    read = _from_directory if found.path.is_dir() else _from_gguf
    parts = read(found, DTYPES[dtype], keep_quantised)
    check_finite(parts.weights.items())
    ends = parts.tokenizer.end_token_ids or parts.config.end_token_ids
    config = dataclasses.replace(parts.config, end_token_ids=ends)
    return LoadedModel(
        name=found.name,
        config=config,
        weights=parts.weights,
        quantised=parts.quantised,
        form=form.name if form else "",
        tokenizer=_agreeing(parts.tokenizer, config, found.name[:256] if form else None),
        digest=parts.digest,
        dtype=dtype,
        limits=config.limits(),
    )
