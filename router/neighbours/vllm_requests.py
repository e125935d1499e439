"""Requests of vLLM's engine contract as ours. Pure. A plain field that is 0 is not set, as proto3 has it."""

from __future__ import annotations

import json
from typing import Any

from pdserve.api import GenerateInput, SamplingInput
from pdserve.errors import InvalidRequest, UnsupportedFeature
from pdserve.types import Grammar, GrammarKind
from router.grammars import dialect_of

VLLM_TEMPERATURE = 1.0
"""What vLLM takes where a request names none; ours would be 0."""
_REFUSED = ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")


def asked(request: Any) -> GenerateInput:
    """A `vllm.grpc.engine.GenerateRequest` as a request for generation. Raises UnsupportedFeature by name."""
    for name in _REFUSED:
        if request.HasField(name):
            raise UnsupportedFeature.field(name, "is not supported by this server; leave it out.")
    if request.extra_mm_inputs:
        raise UnsupportedFeature.field("extra_mm_inputs", "is not supported by this server; leave it out.")
    if request.data_parallel_rank:
        raise UnsupportedFeature.field("data_parallel_rank", "there is one rank; send 0 or leave it out.")
    which, params = request.WhichOneof("input"), request.sampling_params
    return GenerateInput(
        prompt=request.text if which == "text" else None,
        token_ids=tuple(request.tokenized.input_ids) if which == "tokenized" else None,
        sampling=_sampling(params),
        stop=tuple(params.stop),
        client_request_id=request.request_id,
        n=params.n,
        no_text=not params.stop,  # tokens are all that is sent; text is needed where it can stop a stream
    )


def _sampling(params: Any) -> SamplingInput:
    if params.HasField("truncate_prompt_tokens"):
        raise UnsupportedFeature.field("truncate_prompt_tokens", "prompts are not cut; send a shorter one.")
    if params.HasField("prompt_logprobs"):
        raise UnsupportedFeature.field("prompt_logprobs", "is not part of this contract here; use Score.")
    if params.seed < 0:
        raise InvalidRequest.field("seed", "must be at least 0.")
    return SamplingInput(
        temperature=params.temperature if params.HasField("temperature") else VLLM_TEMPERATURE,
        top_k=params.top_k or None,
        top_p=params.top_p or None,
        min_p=params.min_p or None,
        frequency_penalty=params.frequency_penalty or None,
        presence_penalty=params.presence_penalty or None,
        repetition_penalty=params.repetition_penalty or None,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens or None,
        seed=params.seed if params.HasField("seed") else None,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        logprobs=_logprobs(params),
        grammar=_grammar(params),
    )


def _logprobs(params: Any) -> int | None:
    if not params.HasField("logprobs"):
        return None
    if params.logprobs < 0:
        raise UnsupportedFeature.field("logprobs", "ask for at most 20, not the whole vocabulary.")
    return int(params.logprobs)


def _grammar(params: Any) -> Grammar | None:
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema":
            return Grammar(kind=GrammarKind.JSON_SCHEMA, text=params.json_schema)
        case "json_object":
            return (
                Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "object"}')
                if params.json_object
                else None
            )
        case "regex":
            return Grammar(kind=GrammarKind.REGEX, text=params.regex)
        case "choice":
            return Grammar(kind=GrammarKind.CHOICE, text=json.dumps(list(params.choice.choices)))
        case "grammar":
            return Grammar(kind=dialect_of(params.grammar), text=params.grammar)
        case other:
            raise UnsupportedFeature.field(str(other), "is not supported by this server; leave it out.")
