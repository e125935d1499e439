"""A model's vocabulary as llguidance sees it: each token's bytes, and which tokens end an answer.

What lives here: the one place that makes an `LLTokenizer`. What does not: where the bytes come from
(`Tokenizer.token_bytes`), grammars (`compile`).
"""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from pdserve.errors import UnsupportedFeature
from pdserve.tokenizer.decode_steps import JoinWithSpaces
from pdserve.tokenizer.encode import Tokenizer

_NO_END = "this model has no end token, which a grammar needs to end an answer; leave it out."
_NO_BYTES = "this model's tokens do not spell text one by one, so it can not follow a grammar; leave it out."


class _Tokens:
    """What `TokenizerWrapper` reads. Called, it cuts a text in bytes: only a canonical cutting of forced text
    would need the real thing, and nothing is forced here (`compile.NO_FORCING`)."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], end_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end_token_id
        self.special_token_ids = [i for i, token in enumerate(tokens) if not token]
        self._byte_ids = {token: i for i, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return [self._byte_ids.get(bytes([byte]), self.eos_token_id) for byte in text]


def load_vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The vocabulary of a loaded tokenizer. Takes some 0.2 s for 50,000 tokens, and memory with it.

    Special tokens are never part of an answer that conforms, so they have no bytes; end tokens are allowed
    where the answer may end. Raises UnsupportedFeature for a model that can not follow a grammar.
    """
    bundle = tokenizer.bundle
    if not bundle.end_token_ids:
        raise UnsupportedFeature.field("sampling.grammar", _NO_END)
    if any(isinstance(step, JoinWithSpaces) for step in tokenizer.new_decode_steps()):
        raise UnsupportedFeature.field("sampling.grammar", _NO_BYTES)
    wrapper = TokenizerWrapper(_Tokens(answer_tokens(tokenizer), bundle.end_token_ids[0]))
    return LLTokenizer(wrapper, n_vocab=bundle.vocab_size, eos_token=list(bundle.end_token_ids))


def answer_tokens(tokenizer: Tokenizer) -> list[bytes]:
    """By id, the bytes that a token adds to an answer's text: none for special and end tokens.

    A SentencePiece decoder strips one space from the start of a text; a grammar counts it.
    """
    bundle = tokenizer.bundle
    hidden = set(bundle.end_token_ids)
    ids = range(bundle.vocab_size)
    hidden.update(i for i in ids if tokenizer.is_special(tokenizer.token_text(i) or ""))
    return [b"" if i in hidden else tokenizer.token_bytes(i) for i in ids]
