"""Carries out a scheme on a model: layer by layer over calibration text, from float weights to quantised
ones.

What lives here: the order of things. What does not: the schemes' arithmetic (`pdserve.quant`), files
(`write`), measuring what came out (`quality`).

SmoothQuant and AWQ look at the float model's activations; GPTQ at those of the layers quantised so far, as
its paper does. Memory: the model, one layer's moments, and the hidden states of all calibration tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from pdserve.calibrate.corpus import Batch
from pdserve.calibrate.folds import Pair, fold, pairs
from pdserve.calibrate.forward import Linear, PlainDecoder, require_dense
from pdserve.calibrate.observe import Observed, observe
from pdserve.errors import ConfigError
from pdserve.models.config import ModelConfig
from pdserve.models.loaded import LoadedModel
from pdserve.models.weights import HEAD, stays_quantised
from pdserve.quant.float8 import Float8Weight
from pdserve.quant.forms import Activation, ActivationKind, QuantWeight, linear_reference
from pdserve.quant.gptq import round_with_compensation
from pdserve.quant.rounding import Grid, grouped, round_to_nearest
from pdserve.quant.schemes import HEAD_INPUT, TOKEN, Scheme
from pdserve.quant.smooth import Scaling, search_awq, search_smooth

Progress = Callable[[int, int], None]
LowWeight = QuantWeight | Float8Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """fold_values: also scale between v and o, which changes the KV cache. head: also quantise the head, to 8
    bits by channel. max_rows: of an input, kept for searches. stored: type of norms in the file.
    """

    fold_values: bool = False
    head: bool = True
    max_rows: int = 384
    stored: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedModel:
    """plain: weights that stay floats. low: the others. alphas: exponent by layer and pair, None for no
    scaling.
    """

    config: ModelConfig
    scheme: Scheme
    plain: dict[str, torch.Tensor]
    low: dict[str, LowWeight]
    alphas: list[dict[str, float | None]] = field(default_factory=list)

    def decoder(self) -> PlainDecoder:
        """The model with the numerics that the scheme stands for."""
        linears = {name: product_of(weight) for name, weight in self.low.items()}
        return PlainDecoder(config=self.config, weights=self.plain, linears=linears)


def product_of(weight: LowWeight) -> Linear:
    """The plain reference of a quantised linear."""
    if isinstance(weight, Float8Weight):
        return weight.product
    return lambda x_MK: linear_reference(x_MK, weight)


def stored_form(written: LoadedModel, made: QuantisedModel) -> QuantisedModel:
    """`made` with the numbers that came back from its files (FP8, which loaders dequantise, as made)."""
    low = {name: written.quantised.get(name, weight) for name, weight in made.low.items()}
    return replace(made, plain=dict(written.weights), low=low)


def quantise(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    scheme: Scheme,
    batches: Sequence[Batch] = (),
    options: Options | None = None,
    progress: Progress | None = None,
) -> QuantisedModel:
    """The model under the scheme. batches: calibration text. progress: called with (layers done, layers in
    all).

    Raises ModelError for a model that is not dense, ConfigError for a scheme that needs text and got none.
    """
    require_dense(config)
    if scheme.calibrated and not batches:
        raise ConfigError(f"calibration: {scheme.name} needs text")
    job = _Job(config, weights, scheme, options or Options())
    states = [job.exact.embed(batch.tokens_BT) for batch in batches] if scheme.calibrated else []
    for layer in range(config.num_layers):
        states = job.layer(layer, batches, states)
        if progress is not None:
            progress(layer + 1, config.num_layers)
    return job.finish()


class _Job:
    def __init__(
        self, config: ModelConfig, weights: Mapping[str, torch.Tensor], scheme: Scheme, options: Options
    ) -> None:
        self._config, self._weights, self._scheme, self._options = config, weights, scheme, options
        self._changed: dict[str, torch.Tensor] = {}
        self._low: dict[str, LowWeight] = {}
        self._alphas: list[dict[str, float | None]] = []
        self.exact = PlainDecoder(config=config, weights=weights)

    def layer(
        self, layer: int, batches: Sequence[Batch], states: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Quantises one layer; returns the states after it, as the next one is to see them."""
        names = [n for n in self._weights if n.startswith(f"model.layers.{layer}.")]
        linears = [n for n in names if stays_quantised(n, self._config)]
        observed = None
        if states:
            observed = observe(self.exact, layer, batches, states, self._options.max_rows)
        self._alphas.append({})
        scaled = self._scale(layer, observed) if observed is not None else {}
        for name in linears:
            self._low[name] = self._round(name, observed, scaled.get(name))
        after = self.exact
        if self._scheme.method == "gptq":
            products = {name: product_of(self._low[name]) for name in linears}
            after = replace(self.exact, linears=products)
        return [after.layer(layer, x_BTE) for x_BTE in states]

    def _scale(self, layer: int, observed: Observed) -> dict[str, torch.Tensor]:
        """Searches and folds scales; returns each linear's [K] by name, for the ones that are scaled."""
        if self._scheme.method not in ("smoothquant", "awq"):
            return {}
        scales: dict[str, torch.Tensor] = {}
        for kind, pair in pairs(self._config, layer, values=self._options.fold_values).items():
            found = self._search(pair, observed)
            self._alphas[-1][kind] = found.alpha
            if found.alpha is None:
                continue
            before = {n: self._now(n) for n in (*pair.before, *pair.after) if n in self._weights}
            folded = fold(before, pair, found.scale_P, self._options.stored)
            self._changed |= folded
            scale_K = found.scale_P if pair.tie_K is None else found.scale_P[pair.tie_K]
            scales |= dict.fromkeys(pair.after, scale_K)
        return scales

    def _search(self, pair: Pair, observed: Observed) -> Scaling:
        seen = observed.of(pair.after[0]).layer_input(pair.tie_K)
        weights = [self._weights[name].to(torch.float32) for name in pair.after]
        grid = self._grid()
        if self._scheme.method == "awq":
            return search_awq(seen, weights, grid, self._scheme.activation)
        return search_smooth(seen, weights, grid, TOKEN)

    def _round(self, name: str, observed: Observed | None, scale_K: torch.Tensor | None) -> LowWeight:
        scheme, weight_NK = self._scheme, self._now(name).to(torch.float32)
        if scheme.grid is None:
            return Float8Weight.rounded(weight_NK, scheme.float8, inputs=scheme.float8_inputs)
        if observed is None:
            return round_to_nearest(weight_NK, scheme.grid).with_activation(scheme.activation)
        seen = observed.of(name)
        if scheme.method == "gptq":
            return round_with_compensation(weight_NK, seen.moments_KK, scheme.grid)
        grid = scheme.grid
        moments_GSS = None
        if scheme.method in ("awq", "clip"):
            grid = replace(grid, clip=True)
            moments_GSS = _by_group(seen.moments_KK, scale_K, grid.group_size)
        most_K = seen.most_K if scale_K is None else seen.most_K / scale_K
        activation = _static(most_K) if scheme.static else scheme.activation
        return round_to_nearest(weight_NK, grid, moments_GSS).with_activation(activation)

    def _grid(self) -> Grid:
        assert self._scheme.grid is not None
        return self._scheme.grid

    def _now(self, name: str) -> torch.Tensor:
        """A weight with what has been folded into it so far."""
        return self._changed.get(name, self._weights[name])

    def finish(self) -> QuantisedModel:
        """The head, and everything put together."""
        if self._options.head:
            tied = self._config.tied_embeddings
            weight_VE = self._weights["model.embed_tokens.weight" if tied else HEAD].to(torch.float32)
            head = round_to_nearest(weight_VE, Grid(bits=8))
            self._low[HEAD] = head.with_activation(HEAD_INPUT) if self._scheme.quantises_inputs else head
        plain = {n: self._now(n) for n in self._weights if n not in self._low}
        return QuantisedModel(
            config=self._config, scheme=self._scheme, plain=plain, low=self._low, alphas=self._alphas
        )


def _static(most_K: torch.Tensor) -> Activation:
    """One scale for the layer's inputs, a float32 number."""
    scale = (most_K.max().to(torch.float32) / 127).clamp(min=1e-8)
    return Activation(kind=ActivationKind.TENSOR, scale=float(scale))


def _by_group(moments_KK: torch.Tensor, scale_K: torch.Tensor | None, group_size: int) -> torch.Tensor:
    """[G, S, S]: moments of the scaled inputs of each group, the last one filled up with zeros."""
    if scale_K is not None:
        moments_KK = moments_KK / scale_K[:, None] / scale_K[None, :]
    rows_KGS = grouped(moments_KK, group_size)
    size = rows_KGS.shape[-1]
    padded = torch.nn.functional.pad(rows_KGS, (0, 0, 0, 0, 0, -rows_KGS.shape[0] % size))
    blocks = padded.view(-1, size, rows_KGS.shape[1], size)
    return torch.stack([blocks[g, :, g] for g in range(blocks.shape[0])])
