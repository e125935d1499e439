"""Builds a `tokenizers` tokenizer from the `tokenizer.ggml.*` metadata of a GGUF file.

Here: which normaliser, pre-tokenizer, merges and decoder the metadata names. The result is the tokenizer that
transformers makes of the same file. Not here: reading the file (`gguf_metadata`), the bundle (`from_gguf`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from pdserve.errors import ModelError

# Split patterns are facts of the models: each is the one its vocabulary was trained with.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORD_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_WORD_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"{_WORD_UPPER}*{_WORD_LOWER}+|{_WORD_UPPER}+{_WORD_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "gpt2": None,
    "phi-2": None,
    "olmo": None,
    "jais": None,
    "mpt": None,
    # The original also cuts digits apart first; transformers, our oracle, does not do so for GGUF files.
    "smollm": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
}
"""Pre-tokenizer by the name in `tokenizer.ggml.pre`; None is GPT-2's own pattern."""

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
SPACE = "\u2581"


def byte_alphabet() -> dict[int, str]:
    """GPT-2's byte alphabet: a printable character for each byte. Source: the GPT-2 release, encoder.py."""
    plain = {b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or 0xAE <= b <= 0xFF}
    others = (b for b in range(256) if b not in plain)
    table = {b: chr(b) for b in plain}
    table.update({b: chr(256 + n) for n, b in enumerate(others)})
    return table


def build_tokenizer(tokens: Sequence[str], meta: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata. Raises ModelError for an unsupported kind."""
    kind = meta.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ModelError(
            "The GGUF file's tokenizer is of a kind that is not supported (it must be gpt2 or llama)."
        )
    tokenizer = builders[kind](tokens, meta)
    _add_marked_tokens(tokenizer, tokens, meta)
    return tokenizer


def _byte_level(tokens: Sequence[str], meta: Mapping[str, Any]) -> Tokenizer:
    alphabet = byte_alphabet()
    letters = set(alphabet.values())
    spelled = (t if letters.issuperset(t) else "".join(alphabet[b] for b in t.encode()) for t in tokens)
    vocab = {token: i for i, token in enumerate(spelled)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_stated_merges(meta, vocab)))
    tokenizer.pre_tokenizer = _pre_tokenizer(meta.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: Any) -> pre_tokenizers.PreTokenizer:
    if name not in SPLITS:
        raise ModelError("The GGUF file names a pre-tokenizer that is not supported.")
    pattern = SPLITS[name]
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(tokens: Sequence[str], meta: Mapping[str, Any]) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in meta:
        merges = _stated_merges(meta, vocab)
    else:
        merges = merges_from_scores(vocab, tokens, meta.get("tokenizer.ggml.scores") or ())
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return tokenizer


def _stated_merges(meta: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    lines = meta.get("tokenizer.ggml.merges") or []
    pairs = [tuple(line.split(" ")) for line in lines if isinstance(line, str)]
    if len(pairs) != len(lines) or any(not _is_merge(p, vocab) for p in pairs):
        raise ModelError("The GGUF file's tokenizer is damaged: a merge names a token that does not exist.")
    return [(left, right) for left, right in pairs]


def _is_merge(pair: Sequence[str], vocab: Mapping[str, int]) -> bool:
    return len(pair) == 2 and all(part in vocab for part in (*pair, "".join(pair)))


def merges_from_scores(
    vocab: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Merges of a SentencePiece BPE vocabulary: all ways to cut a token in two tokens, best score first.

    Ties go to the longer left part, then the longer right part, then to the order of the vocabulary.
    """
    if len(scores) != len(tokens):
        raise ModelError("The GGUF file's tokenizer is damaged: it has not one score for each token.")
    found: list[tuple[float, str, str]] = []
    for token, score in dict(zip(tokens, scores, strict=True)).items():
        cuts = ((token[:n], token[n:]) for n in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend((score, left, right) for left, right in pairs)
    found.sort(key=lambda f: (f[0], len(f[1]), len(f[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_marked_tokens(tokenizer: Tokenizer, tokens: Sequence[str], meta: Mapping[str, Any]) -> None:
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError("The GGUF file's tokenizer is damaged: it has not one type for each token.")
    named = {meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    special = [t for i, t in enumerate(tokens) if types[i] == CONTROL or i in named]
    # A token that the vocabulary spells in another way can not be matched whole; it stays a plain entry.
    special = [t for t in special if t and tokenizer.token_to_id(t) is not None]
    plain = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED and t]
    plain = [t for t in plain if tokenizer.token_to_id(t) is not None]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
