"""A mixture of experts out of a dense model, by sparse upcycling (arXiv 2212.05055): experts are copies of
the MLP, the router is new, the format is Mixtral's.

What lives here: which weight becomes which. What does not: the files' forms (`hf_write`), training.

Without noise all experts of a layer are the same, and since a token's weights sum to 1 the layer's output is
the dense MLP's bit for bit (`pdserve.kernels.routing.combine`): greedy text is the dense model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.errors import ConfigError, ModelError
from pdserve.layers.routers import RouterKind
from pdserve.models.config import MAX_EXPERTS, ExpertsConfig, ModelConfig
from pdserve.models.hf_config import config_from_hf
from pdserve.models.hf_write import ShardWriter, mixtral_config, write_json, write_tokenizer
from pdserve.models.loaded import LoadedModel

ROUTER_STD = 0.02
Progress = Callable[[int, int], None]
_DENSE = ("llama", "mistral")
_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycling:
    """What to make. noise: standard deviation of what is added to each expert's weights, in units of the
    weight's own; 0 for plain copies. seed: of noise and router. router: its kind, with capacity_factor.
    """

    num_experts: int
    top_k: int
    noise: float = 0.0
    seed: int = 0
    router: RouterKind = RouterKind.CHOICE
    capacity_factor: float = 1.25

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ConfigError(f"experts: must be from 1 to {MAX_EXPERTS}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError("top_k: must be from 1 to the number of experts")
        if not 0 <= self.noise <= 10:
            raise ConfigError("noise: must be from 0 to 10")


def upcycled_config(dense: ModelConfig, made: Upcycling) -> ModelConfig:
    """The mixture's configuration. Raises ModelError for a model that is not Llama- or Mistral-shaped."""
    if dense.architecture not in _DENSE or dense.qkv_bias or dense.o_bias or dense.mlp_bias:
        raise ModelError("Only Llama- and Mistral-shaped models without biases can be upcycled.")
    experts = ExpertsConfig(
        num_experts=made.num_experts,
        top_k=made.top_k,
        intermediate_size=dense.intermediate_size,
        normalise=True,
        layers=(True,) * dense.num_layers,
        router=made.router,
        capacity_factor=made.capacity_factor,
        seed=made.seed if made.router is not RouterKind.CHOICE else 0,
    )
    return dataclasses.replace(dense, architecture="mixtral", experts=experts)


def upcycle(model: LoadedModel, directory: Path, made: Upcycling, progress: Progress | None = None) -> int:
    """Writes the mixture; returns the bytes of its weights. Memory: the dense model and one layer of experts.

    directory: new or empty; config.json comes last, so that a half-written one is never taken for a model.
    progress: called with (files done, files in all). Raises ConfigError for a directory that can not be used,
    ModelError for a model that can not be upcycled.
    """
    config = upcycled_config(model.config, made)
    values = mixtral_config(config, model.dtype)
    if config_from_hf(values) != dataclasses.replace(
        config, end_token_ids=tuple(sorted(config.end_token_ids))
    ):
        raise ModelError("The model has settings that Mixtral's format can not hold.")
    _prepare(directory)
    shards = ShardWriter(directory, config.num_layers + 1)
    for done, weights in enumerate(_files(model.weights, config, made), 1):
        shards.add(weights)
        if progress is not None:
            progress(done, config.num_layers + 1)
    size_bytes = shards.finish()
    write_tokenizer(directory, model.tokenizer)
    write_json(directory / "config.json", values)
    return size_bytes


def _prepare(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError("output: the directory is not empty; name a new one")
    except OSError as error:
        raise ConfigError(f"output: the directory can not be used: {error.strerror}") from None


def _files(
    dense: Mapping[str, torch.Tensor], config: ModelConfig, made: Upcycling
) -> Iterator[dict[str, torch.Tensor]]:
    """Weights file by file: what is outside the layers, then a layer each."""
    random = torch.Generator().manual_seed(made.seed)
    yield {name: weight for name, weight in dense.items() if not name.startswith("model.layers.")}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        kept = {n: w for n, w in dense.items() if n.startswith(prefix) and ".mlp." not in n}
        yield kept | _experts(dense, prefix, made, random)


def _experts(
    dense: Mapping[str, torch.Tensor], prefix: str, made: Upcycling, random: torch.Generator
) -> dict[str, torch.Tensor]:
    up = dense[f"{prefix}mlp.up_proj.weight"]
    stem = f"{prefix}block_sparse_moe."
    gate = torch.randn(made.num_experts, up.shape[1], generator=random) * ROUTER_STD
    weights = {f"{stem}gate.weight": gate.to(up.dtype)}
    for expert in range(made.num_experts):
        for ours, theirs in _PARTS.items():
            weight = dense[f"{prefix}mlp.{ours}.weight"]
            weights[f"{stem}experts.{expert}.{theirs}.weight"] = _noisy(weight, made.noise, random)
    return weights


def _noisy(weight: torch.Tensor, noise: float, random: torch.Generator) -> torch.Tensor:
    if noise == 0:
        return weight
    plain = weight.float()
    return (plain + noise * plain.std() * torch.randn(plain.shape, generator=random)).to(weight.dtype)
