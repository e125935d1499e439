"""What a decoder-only model is made of, as one frozen record for every architecture.

What lives here: `ModelConfig` and the table of architectures we build. What does not: reading it from
files (`hf_config`, `gguf_config`), weights, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import ModelError
from pdserve.layers.rope import RopeConfig
from pdserve.layers.routers import RouterKind
from pdserve.types import ModelLimits

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 24
MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFamily:
    """A family's defaults for its experts. width_field: config.json's name of an expert's inner size.

    normalise: weights of a token sum to 1 always, or None where norm_topk_prob says. sparse_layers: some
    layers may be dense. shared_size: default width of the shared expert, 0 for families without one.
    """

    num_experts: int
    top_k: int
    width_field: str = "intermediate_size"
    width: int | None = None
    normalise: bool | None = None
    sparse_layers: bool = False
    shared_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What is the same for all models of one family, where config.json leaves it to the family's code.

    qkv_bias: q, k and v have biases always (o never). qk_norm: RMS norm on each query and key head;
    qk_norm_whole: one over all heads together (OLMoE). windowed: "all" layers use sliding_window, "switched"
    all if use_sliding_window, "layers" or "alternate" as layer_types say (they differ where it is absent), or
    "none". latent: attention over latent rows (MLA). permuted_gguf: llama.cpp's converter reorders q and k
    rows of this family.
    """

    name: str
    hf_class: str
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    latent: bool = False
    windowed: str = "none"
    permuted_gguf: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_context: int = 2048
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    experts: ExpertFamily | None = None


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
        Architecture(
            name="mixtral", hf_class="MixtralForCausalLM", windowed="all", permuted_gguf=True, num_kv_heads=8,
            max_context=131072, rms_norm_eps=1e-5, rope_theta=1e6,
            experts=ExpertFamily(num_experts=8, top_k=2, width=14336, normalise=True),
        ),
        Architecture(
            name="qwen2_moe", hf_class="Qwen2MoeForCausalLM", qkv_bias=True, windowed="alternate",
            num_kv_heads=16, max_context=32768, sliding_window=4096,
            experts=ExpertFamily(
                num_experts=60, top_k=4, width_field="moe_intermediate_size", width=1408, sparse_layers=True,
                shared_size=5632,
            ),
        ),
        Architecture(
            name="qwen3_moe", hf_class="Qwen3MoeForCausalLM", qk_norm=True, windowed="switched",
            num_kv_heads=4, max_context=32768, sliding_window=4096,
            experts=ExpertFamily(
                num_experts=128, top_k=8, width_field="moe_intermediate_size", width=768, sparse_layers=True,
            ),
        ),
        Architecture(
            name="olmoe", hf_class="OlmoeForCausalLM", qk_norm_whole=True, max_context=4096,
            rms_norm_eps=1e-5,
            experts=ExpertFamily(num_experts=64, top_k=8, width=2048),
        ),
        Architecture(name="deepseek_v2", hf_class="DeepseekV2ForCausalLM", latent=True),
        Architecture(name="deepseek_v3", hf_class="DeepseekV3ForCausalLM", latent=True, max_context=4096),
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
class ExpertsConfig:
    """A model's mixture of experts; sizes in elements.

    intermediate_size: of one expert. normalise: a token's weights sum to 1. layers: which layers have experts
    (the others are dense). shared_size: inner size of an expert that all tokens take, 0 for none;
    shared_gate: a sigmoid scales it. sigmoid, groups, top_groups, scale: see `pdserve.kernels.routing.TopK`;
    biased: scores have a bias for the choice. router, capacity_factor, seed: see `pdserve.layers.routers`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool
    layers: tuple[bool, ...]
    shared_size: int = 0
    shared_gate: bool = True
    sigmoid: bool = False
    biased: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    router: RouterKind = RouterKind.CHOICE
    capacity_factor: float = 1.25
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = {RouterKind.SWITCH: 1, RouterKind.GSHARD: 2}.get(self.router, self.top_k)
        if self.top_k != wanted:
            raise ModelError(f"The model is not usable: its {self.router} router takes {wanted} expert(s).")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention; sizes in elements.

    q_rank: of the queries' low rank, or None. kv_rank: of the latent. nope_dim, rope_dim, v_dim: of a head's
    query and key without and with RoPE, and of its value. interleaved: rotary rows come in pairs. scale: of
    scores.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    interleaved: bool
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A validated model description; sizes in elements, max_context in tokens.

    windows: per layer, how many positions a token sees with itself (0: all before it).
    qkv_bias, o_bias, mlp_bias: which linears have biases. tied_embeddings: the head is the embedding.
    qk_norm: RMS norm on each query and key head; qk_norm_whole: one over all heads together. clip_qkv: bound
    of queries, keys and values, or None. experts: None for a dense model. intermediate_size: of dense MLPs.
    latent: None for plain attention; otherwise num_kv_heads is 1 and head_dim half a latent row, so that a
    page has the latent's bytes.
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
    qk_norm_whole: bool = False
    clip_qkv: float | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError("The model is not usable: its query heads are not a multiple of its KV heads.")
        if self.head_dim % 2 and self.latent is None:
            raise ModelError("The model is not usable: its head dimension is odd, which RoPE can not turn.")
        named = [*self.end_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])]
        if any(not 0 <= i < self.vocab_size for i in named):
            raise ModelError("The model is not usable: a special token's id lies outside its vocabulary.")

    def has_experts(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    def limits(self) -> ModelLimits:
        """What the model can take, for validation at the router."""
        return ModelLimits(
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            end_token_ids=self.end_token_ids,
            bos_token_id=self.bos_token_id,
        )
