"""What is known of a model from its headers alone, for the choice of a precision.

What lives here: reading them. What does not: the choice (`pdserve.config.precision`), weights (`loader`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.config.precision import ModelFacts
from pdserve.models.fields import Fields
from pdserve.models.forms import folders_of
from pdserve.models.gguf_config import config_from_gguf
from pdserve.models.gguf_file import read_gguf
from pdserve.models.gguf_quantised import stored_bits
from pdserve.models.gguf_weights import freq_factors
from pdserve.models.hf_config import config_from_hf
from pdserve.models.hf_groups import groups_of
from pdserve.models.json_file import read_object
from pdserve.models.registry import locate


def facts_of(source: str, role: str = "aggregated") -> ModelFacts:
    """Facts of a model, or of its form for a role. source: as for `load_model`; a hub id is fetched.

    Raises ModelError for a model that is not there or whose headers can not be used.
    """
    path = locate(source).path
    return _of_directory(folders_of(path).get(role, path)) if path.is_dir() else _of_gguf(path)


def _of_gguf(path: Path) -> ModelFacts:
    file = read_gguf(path)
    config = config_from_gguf(file.metadata, frozenset(file.tensors), freq_factors(file))
    linears = [t for t in file.tensors.values() if len(t.shape) == 2 and t.name.startswith("blk.")]
    counts = Counter(stored_bits(tensor.kind) for tensor in linears)
    return ModelFacts(
        stored_bits=counts.most_common(1)[0][0] if counts else 0,
        experts=config.experts is not None,
        latent=config.latent is not None,
        head_dim=config.head_dim,
    )


def _of_directory(folder: Path) -> ModelFacts:
    values = read_object(folder / "config.json")
    config = config_from_hf(values)
    described = values.get("quantization_config")
    return ModelFacts(
        stored_bits=_described_bits(described) if isinstance(described, dict) else 0,
        experts=config.experts is not None,
        latent=config.latent is not None,
        head_dim=config.head_dim,
    )


def _described_bits(described: Mapping[str, Any]) -> int:
    """Bits of the codes that a quantization_config tells of; 0 for codes that no kernel takes."""
    fields = Fields(described, "quantization_config")
    method = fields.text("quant_method")
    if method == "compressed-tensors":
        bits = Counter(group.bits for group in groups_of(fields) if not group.is_float)
        return bits.most_common(1)[0][0] if bits else 0
    return fields.integer("bits", 1, 16, 4) if method in ("awq", "gptq") else 0
