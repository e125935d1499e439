"""Log-probabilities in OpenAI's two forms: of completions, and of chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pdserve.types import TokenLogprob


def spelled(token: TokenLogprob) -> str:
    """A token as text; bytes that are no whole character are replaced."""
    return token.token.decode("utf-8", "replace")


def of_completion(tokens: Sequence[TokenLogprob], offset: int, *, first: bool = False) -> dict[str, Any]:
    """offset: of the first token's text, in characters. first: the first token begins the prompt, and has no
    log-probability."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(spelled(token))
    given = [(None if first and i == 0 else token) for i, token in enumerate(tokens)]
    return {
        "tokens": [spelled(token) for token in tokens],
        "token_logprobs": [token and token.logprob for token in given],
        "top_logprobs": [token and {spelled(top): top.logprob for top in token.top} for token in given],
        "text_offset": offsets,
    }


def of_chat(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Each token with its bytes and its alternatives."""
    content = [{**_one(token), "top_logprobs": [_one(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def of_prompt(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """vLLM's form of a prompt's log-probabilities: by token id, nothing for the first token."""
    return [None, *(_by_id(token) for token in tokens[1:])]


def _by_id(token: TokenLogprob) -> dict[str, Any]:
    found = {one.token_id: (rank, one) for rank, one in enumerate(token.top, 1)}
    found.setdefault(token.token_id, (0, token))
    return {
        str(token_id): {"logprob": one.logprob, "rank": rank or None, "decoded_token": spelled(one)}
        for token_id, (rank, one) in found.items()
    }


def _one(token: TokenLogprob) -> dict[str, Any]:
    return {"token": spelled(token), "logprob": token.logprob, "bytes": list(token.token)}
