"""A model of bytes for tests of the router: its tokenizer, and a formula that says what comes next.

Each token depends on every id before it: a stream that lost, repeated or changed one can not look right.
"""

from __future__ import annotations

import json
from functools import cache

from pdserve.tokenizer.bundle import TokenizerBundle

END_ID = 256
VOCAB, CONTEXT, PAGE = 258, 4096, 16
_CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"


def _spelling(byte: int) -> str:
    """The byte-level alphabet: printable bytes are themselves, the others follow from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


@cache
def byte_bundle() -> TokenizerBundle:
    """A tokenizer whose ids are the bytes of the text, plus an end token."""
    vocab = {_spelling(byte): byte for byte in range(256)} | {"<|end|>": END_ID, "<|other|>": END_ID + 1}
    added = [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for text, i in (("<|end|>", END_ID), ("<|other|>", END_ID + 1))
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False}
    spec = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    return TokenizerBundle(
        tokenizer_json=json.dumps(spec).encode(),
        chat_template=_CHAT,
        special_tokens=(("eos_token", "<|end|>"),),
        bos_token_id=None,
        add_bos=False,
        end_token_ids=(END_ID,),
        vocab_size=VOCAB,
        max_context=CONTEXT,
        model_name="bytes",
    )


def next_token(ids: list[int] | tuple[int, ...]) -> int:
    """A lower-case letter that depends on every id before it."""
    mixed = 0
    for token_id in ids:
        mixed = (mixed * 31 + token_id + 1) % 1_000_003
    return 97 + mixed % 26


def completion(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """What every stream over `prompt` must give."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return tuple(ids[len(prompt) :])


def text_of(prompt: str, num_tokens: int) -> str:
    """The same as text."""
    return bytes(completion(tuple(prompt.encode()), num_tokens)).decode()
