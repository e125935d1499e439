"""What clients ask of texts besides generating: their tokens, and back.

What lives here: checking what is asked, and the answers. What does not: tokenisers (`router.model`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.api import GenerateInput, Tokenized, TokenizeInput
from pdserve.errors import InvalidRequest
from router.hub import Hub
from router.validate import Target, check_fields


async def tokenize(hub: Hub, source: TokenizeInput) -> Tokenized:
    """The tokens of a plain prompt, or of a chat in the model's template, as Generate would compute them.

    Raises UnknownModel, Unavailable, InvalidRequest or UnsupportedFeature, as Generate does for that input.
    """
    model = hub.served(source.model)
    asked = GenerateInput(prompt=source.prompt, messages=source.messages, tools=source.tools)
    check_fields(asked, Target(model=model.name, limits=model.limits), seed=0)
    if source.no_special_tokens and source.prompt is None:
        raise InvalidRequest.field("no_special_tokens", "is for a plain prompt; leave it out for a chat.")
    if source.prompt is None:
        ids = await model.encode(asked)
    else:
        ids = await model.encode_plain(source.prompt, special_tokens=not source.no_special_tokens)
    tokens = tuple(map(model.token_bytes, ids))
    return Tokenized(ids=ids, tokens=tokens, max_context=model.limits.max_context)


async def detokenize(hub: Hub, token_ids: Sequence[int], model_name: str = "") -> str:
    """The text of token ids, special tokens as they are written. Raises UnknownModel, Unavailable, or
    InvalidRequest for an id outside the vocabulary."""
    model = hub.served(model_name)
    if max(token_ids, default=0) >= model.limits.vocab_size or min(token_ids, default=0) < 0:
        raise InvalidRequest.field("ids", f"must be below the vocabulary size, {model.limits.vocab_size}.")
    return await model.decode(token_ids)
