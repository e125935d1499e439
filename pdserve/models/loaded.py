"""A model as it comes from its files, before it is built for a device. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from pdserve.models.config import ModelConfig
from pdserve.quant.forms import QuantWeight
from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.types import ModelLimits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A checked model. weights: by Hugging Face name, all of `dtype`. digest: names the weights' revision.

    name: what it was asked for as, without folders. quantised: linears (the head too, as lm_head.weight) that
    were asked to stay as the files have them; they are not in `weights`, but an embedding that is also the
    head is in both. form: which of the model's forms this is, where it has several: they share a digest.
    """

    name: str
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    tokenizer: TokenizerBundle
    digest: str
    dtype: str
    limits: ModelLimits
    quantised: dict[str, QuantWeight] = field(default_factory=dict)
    form: str = ""

    def without_weights(self) -> LoadedModel:
        """The same model without its weights, to keep when it has been built: the runner packs its own."""
        return replace(self, weights={}, quantised={})
