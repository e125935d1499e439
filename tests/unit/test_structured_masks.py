"""Masks of sequences: the same wherever a sequence comes from, and gone with its request."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdserve.structured.masks import MAX_LIVE, GrammarMasks
from pdserve.types import Grammar, GrammarKind, SamplingParams
from tests.support.grammar_kit import (
    allowed_ids,
    compiled,
    default_bundle,
    default_tokenizer,
    default_tokens,
    step_of,
)

WORDS = Grammar(kind=GrammarKind.REGEX, text="(red|green|blue)(, (red|green|blue))*")
OTHER = Grammar(kind=GrammarKind.CHOICE, text='["red"]')
END = default_bundle().end_token_ids[0]
VOCAB = default_bundle().vocab_size


def _masks() -> GrammarMasks:
    return GrammarMasks(VOCAB)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(default_tokenizer().encode(text))


def _allowed(
    masks: GrammarMasks, completion: tuple[int, ...], grammar: Grammar = WORDS, seq: str = "s"
) -> set[int]:
    bits = masks.allowed(step_of(grammar, completion, seq_id=seq))
    assert bits is not None
    assert bits.shape == ((VOCAB + 31) // 32,)
    return set(allowed_ids(bits))


def test_a_sequence_has_the_same_masks_step_by_step_and_from_anywhere() -> None:
    completion = _ids("green, blue, red")
    ready = compiled(WORDS.kind, WORDS.text)
    masks, fresh = _masks(), _masks()
    with masks.pinned(WORDS, ready), fresh.pinned(WORDS, ready):
        for length in range(len(completion) + 1):
            so_far = completion[:length]
            expected = _allowed(masks, so_far)
            # after a handover or a preemption elsewhere: the whole history at once
            assert _allowed(fresh, so_far, seq=f"from {length}") == expected
        assert END in expected
        # a history that went another way, or back: the matcher is made again
        assert _allowed(masks, completion[:1]) == _allowed(fresh, completion[:1], seq="once more")
        assert _allowed(masks, _ids("blue")) == _allowed(fresh, _ids("blue"), seq="blue")


def test_only_end_tokens_are_left_when_the_answer_is_complete() -> None:
    masks = _masks()
    with masks.pinned(OTHER, compiled(OTHER.kind, OTHER.text)):
        assert END not in _allowed(masks, (), OTHER)
        assert _allowed(masks, _ids("red"), OTHER) == {END}


def test_a_sequence_that_left_its_grammar_fails_alone() -> None:
    masks = _masks()
    with masks.pinned(WORDS, compiled(WORDS.kind, WORDS.text)):
        with pytest.raises(ValueError, match=r"sampling\.grammar: the tokens so far"):
            masks.allowed(step_of(WORDS, _ids("purple")))
        assert _allowed(masks, _ids("blue"), seq="another")
        assert _allowed(masks, _ids("blue"))


def test_a_grammar_is_there_while_a_request_holds_it() -> None:
    masks, ready = _masks(), compiled(WORDS.kind, WORDS.text)
    with masks.pinned(WORDS, ready):
        with masks.pinned(WORDS, ready):
            assert _allowed(masks, ())
        assert _allowed(masks, _ids("red"))
    with pytest.raises(ValueError, match="its request is over"):
        masks.allowed(step_of(WORDS, (), seq_id="late"))


def test_many_sequences_are_masked_right_whatever_is_kept_of_them() -> None:
    masks = _masks()
    with masks.pinned(OTHER, compiled(OTHER.kind, OTHER.text)):
        for number in range(MAX_LIVE + 5):
            assert _allowed(masks, (), OTHER, seq=str(number))
        assert _allowed(masks, _ids("red"), OTHER, seq="0") == {END}


def test_a_grammar_that_grows_too_complex_fails_its_sequence_with_a_sentence() -> None:
    grammar = Grammar(kind=GrammarKind.LARK, text='start: "x" (' + "|".join(['"a"'] * 4500) + ")")
    masks = _masks()
    with (
        masks.pinned(grammar, compiled(grammar.kind, grammar.text)),
        pytest.raises(ValueError, match="too complex to go on with"),
    ):
        masks.allowed(step_of(grammar, _ids("x")))


def test_tokens_whose_states_are_too_many_are_not_said_to_have_left_the_grammar() -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text=r"(.|\n)*a.{0,200}b(.|\n)*")
    tokens = _ids("".join(random.Random(1).choices("abcdefgh ", k=4000)))
    masks = _masks()
    with (
        masks.pinned(grammar, compiled(grammar.kind, grammar.text)),
        pytest.raises(ValueError, match="too complex to go on with"),
    ):
        masks.allowed(step_of(grammar, tokens))


def test_sequences_without_a_grammar_are_not_masked() -> None:
    assert _masks().allowed(replace(step_of(WORDS, ()), sampling=SamplingParams())) is None


def test_masks_spell_only_what_the_grammar_has() -> None:
    masks, tokens = _masks(), default_tokens()
    with masks.pinned(WORDS, compiled(WORDS.kind, WORDS.text)):
        starts = {tokens[i] for i in _allowed(masks, ())}
    assert starts == {
        t for t in set(tokens) if t and any(w.startswith(t) for w in (b"red", b"green", b"blue"))
    }
