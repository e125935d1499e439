"""Grammars over small vocabularies, for tests: compile one, walk it at random, and see what it lets through.

What lives here: no model, only masks. What does not: any check.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from pdserve.sched.plan import History, SeqStep
from pdserve.structured.compile import Compiled, compile_grammar
from pdserve.structured.vocabulary import answer_tokens, load_vocabulary
from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.tokenizer.encode import Tokenizer
from pdserve.tokenizer.from_gguf import load_bundle_from_gguf
from pdserve.types import Grammar, GrammarKind, SamplingParams
from tests.support.tokenizer_files import smollm2_gguf


@cache
def default_bundle() -> TokenizerBundle:
    """The default model's tokenizer: 49,152 tokens."""
    return load_bundle_from_gguf(smollm2_gguf())


@cache
def default_tokenizer() -> Tokenizer:
    return Tokenizer(default_bundle())


@cache
def default_tokens() -> list[bytes]:
    """Its tokens' bytes."""
    return answer_tokens(default_tokenizer())


@cache
def default_vocabulary() -> LLTokenizer:
    return load_vocabulary(default_tokenizer())


def compiled(kind: GrammarKind, text: str) -> Compiled:
    """Over the default model's vocabulary. Raises Refused."""
    return compile_grammar(default_vocabulary(), Grammar(kind=kind, text=text))


def allowed_ids(bits: npt.NDArray[np.uint32]) -> list[int]:
    """The tokens of a mask."""
    return list(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")))


def matcher_ids(matcher: LLMatcher) -> list[int]:
    """The tokens that a matcher allows now."""
    return allowed_ids(np.frombuffer(matcher.compute_bitmask(), np.uint32))


def accepts(kind: GrammarKind, text: str, answer: str) -> bool:
    """Whether an answer, in the tokens the model would be given it in, conforms."""
    matcher = compiled(kind, text).start()
    ids = default_tokenizer().encode(answer)
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def walk(start: Compiled, seed: int, most: int = 200) -> bytes | None:
    """An answer of tokens drawn evenly from what is allowed, ending every second time where it may.

    None if it did not end within `most` tokens."""
    chance, matcher, tokens = random.Random(seed), start.start(), default_tokens()
    (end,) = default_bundle().end_token_ids
    ids: list[int] = []
    while len(ids) < most:
        allowed = matcher_ids(matcher)
        assert allowed, "nothing is allowed"
        if end in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return b"".join(tokens[i] for i in ids)
        token = chance.choice([i for i in allowed if i != end])
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return None


def step_of(grammar: Grammar, completion: tuple[int, ...], *, seq_id: str = "s") -> SeqStep:
    """A step that samples the token behind a completion."""
    prompt = (5, 6, 7)
    return SeqStep(
        seq_id=seq_id,
        token_ids=(7,),
        start=2,
        pages=(0,),
        sample=True,
        sample_counter=len(completion),
        sampling=SamplingParams(grammar=grammar),
        history=History(token_ids=prompt + completion, num_prompt=len(prompt)),
    )
