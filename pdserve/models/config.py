"""What a decoder-only model is made of, as one frozen record for every architecture.

What lives here: `ModelConfig` and the table of architectures we build. What does not: reading it from
files (`hf_config`, `gguf_config`), weights, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import ModelError
from pdserve.layers.rope import RopeConfig
from pdserve.types import ModelLimits

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What is the same for all models of one family, where config.json leaves it to the family's code.

    qkv_bias: q, k and v have biases always (o never). qk_norm: RMS norm on each query and key head.
    windowed: "all" layers use sliding_window, or as "layers" say (Qwen), or "none".
    permuted_gguf: llama.cpp's converter reorders q and k rows of this family.
    """

    name: str
    hf_class: str
    qkv_bias: bool = False
    qk_norm: bool = False
    windowed: str = "none"
    permuted_gguf: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_context: int = 2048
    sliding_window: int | None = None


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture(name="llama", hf_class="LlamaForCausalLM", permuted_gguf=True),
        Architecture(
            name="mistral", hf_class="MistralForCausalLM", windowed="all", num_kv_heads=8, max_context=131072,
            sliding_window=4096,
        ),
        Architecture(
            name="qwen2", hf_class="Qwen2ForCausalLM", qkv_bias=True, windowed="layers", num_kv_heads=32,
            max_context=32768, sliding_window=4096,
        ),
        Architecture(
            name="qwen3", hf_class="Qwen3ForCausalLM", qk_norm=True, windowed="layers", num_kv_heads=32,
            head_dim=128, max_context=32768, sliding_window=4096,
        ),
    )
}  # fmt: skip
"""Built-in families by `model_type`, with the defaults that transformers uses for missing fields."""


def architecture(model_type: str) -> Architecture:
    """The family called `model_type`. Raises ModelError for one we do not build."""
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"Models of type {model_type[:40]!r} are not supported; supported are: {known}.")
    return ARCHITECTURES[model_type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A validated model description; sizes in elements, max_context in tokens.

    windows: per layer, how many positions a token sees with itself (0: all before it).
    qkv_bias, o_bias, mlp_bias: which linears have biases. tied_embeddings: the head is the embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    rope: RopeConfig
    bos_token_id: int | None
    end_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError("The model is not usable: its query heads are not a multiple of its KV heads.")
        if self.head_dim % 2:
            raise ModelError("The model is not usable: its head dimension is odd, which RoPE can not turn.")
        named = [*self.end_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])]
        if any(not 0 <= i < self.vocab_size for i in named):
            raise ModelError("The model is not usable: a special token's id lies outside its vocabulary.")

    def limits(self) -> ModelLimits:
        """What the model can take, for validation at the router."""
        return ModelLimits(
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            end_token_ids=self.end_token_ids,
            bos_token_id=self.bos_token_id,
        )
