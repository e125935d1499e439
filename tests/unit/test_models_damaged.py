"""Damaged and hostile model files: a ModelError with a sentence, never a crash, hang or huge allocation."""

from __future__ import annotations

import json
import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from pdserve.errors import ModelError
from pdserve.models.gguf_file import read_gguf
from pdserve.models.loader import load_model
from pdserve.models.safetensors_file import read_safetensors
from tests.support import tiny_models
from tests.unit.test_models_loader import lock


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    return tiny_models.save_gguf(tiny_models.llama(), path, GGMLQuantizationType.Q8_0).read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.save(tiny_models.llama(num_hidden_layers=1), tmp_path / "dir")


@contextmanager
def little_memory(extra_bytes: int = 1 << 30) -> Iterator[None]:
    """Any allocation far beyond the file's size fails here."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refused(source: Path) -> str:
    """The sentence with which the model is refused."""
    with little_memory(), pytest.raises(ModelError) as caught:
        load_model(str(source), "float32")
    assert caught.value.message.endswith(".")
    assert "/" not in caught.value.message
    return caught.value.message


def loads_or_is_refused(source: Path) -> bool:
    """True if it loaded. Anything but success and ModelError fails the test."""
    try:
        with little_memory():
            load_model(str(source), "float32")
    except ModelError:
        return False
    return True


CUTS = (0, 3, 4, 20, 30, 200, 3000, 9000, -4096, -1)
FLIPS = tuple(range(10))


@pytest.mark.parametrize("cut", CUTS)
def test_truncated_gguf(gguf: bytes, cut: int, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(gguf[:cut])
    refused(tmp_path / "cut.gguf")


@pytest.mark.parametrize("number", FLIPS)
def test_bit_flipped_gguf_with_a_lock(gguf: bytes, number: int, tmp_path: Path) -> None:
    rng = random.Random(number)
    data = bytearray(gguf)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path = tmp_path / "flipped.gguf"
    path.write_bytes(gguf)
    lock(tmp_path)
    path.write_bytes(data)
    refused(path)


def test_bit_flipped_gguf_headers_without_a_lock(gguf: bytes, tmp_path: Path) -> None:
    rng = random.Random(1)
    header = read_first_tensor(gguf, tmp_path)
    results = []
    for number in range(200):
        data = bytearray(gguf)
        data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data)
        results.append(loads_or_is_refused(path))
        path.unlink()
    assert 10 < results.count(False) < 200


def read_first_tensor(gguf: bytes, tmp_path: Path) -> int:
    path = tmp_path / "whole.gguf"
    path.write_bytes(gguf)
    return min(t.offset for t in read_gguf(path).tensors.values())


def test_gguf_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    path = tiny_models.save_gguf(tiny_models.llama(), tmp_path / "nan.gguf")
    tensor = read_gguf(path).tensors["blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset + 8 : tensor.offset + 12] = struct.pack("<f", float("nan"))
    path.write_bytes(data)
    assert "mlp.up_proj.weight holds values that are not numbers" in refused(path)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(version: int, tensors: int, keys: int, rest: bytes, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


KEY = text("a") + struct.pack("<I", 4) + struct.pack("<I", 1)
HUGE = 2**63
HOSTILE_GGUF: dict[str, tuple[bytes, str]] = {
    "magic": (header(3, 0, 0, b"", b"GGML"), "does not begin"),
    "version 1": (header(1, 0, 0, b""), "version 2 or 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "tensor count": (header(3, HUGE, 0, b""), "too many tensors"),
    "key count": (header(3, 0, HUGE, b""), "too many tensors or metadata keys"),
    "keys missing": (header(3, 0, 60000, KEY), "shorter than its header says"),
    "key length": (header(3, 0, 1, struct.pack("<Q", HUGE)), "metadata key is longer"),
    "text length": (header(3, 0, 1, text("a") + struct.pack("<IQ", 8, HUGE)), "text is longer"),
    "text beyond": (header(3, 0, 1, text("a") + struct.pack("<IQ", 8, 1 << 20)), "shorter than its header"),
    "not utf-8": (header(3, 0, 1, struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
    "value type": (header(3, 0, 1, text("a") + struct.pack("<I", 99)), "unknown type"),
    "list type": (header(3, 0, 1, text("a") + struct.pack("<IIQ", 9, 9, 1)), "unknown type"),
    "list length": (header(3, 0, 1, text("a") + struct.pack("<IIQ", 9, 0, HUGE)), "longer than the file"),
    "texts length": (header(3, 0, 1, text("a") + struct.pack("<IIQ", 9, 8, HUGE)), "longer than the file"),
    "boolean": (header(3, 0, 1, text("a") + struct.pack("<IB", 7, 2)), "neither true nor false"),
    "key twice": (header(3, 0, 2, KEY + KEY), "key is there twice"),
    "alignment": (
        header(3, 0, 1, text("general.alignment") + struct.pack("<II", 4, 3)),
        "not a power of two",
    ),
    "dimensions": (header(3, 1, 0, text("t") + struct.pack("<I", 5)), "more than 4 dimensions"),
    "no dimension": (header(3, 1, 0, text("t") + struct.pack("<I", 0)), "no or more than 4"),
    "empty tensor": (header(3, 1, 0, tensor("t", (0,), 0, 0)), "empty or impossibly large"),
    "product": (header(3, 1, 0, tensor("t", (2**32, 2**32), 0, 0)), "impossibly large"),
    "tensor type": (header(3, 1, 0, tensor("t", (32,), 4, 0)), "unknown type"),
    "block": (header(3, 1, 0, tensor("t", (33,), 8, 0)), "quantisation blocks"),
    "unaligned": (header(3, 1, 0, tensor("t", (1,), 0, 4)), "not aligned"),
    "beyond": (header(3, 1, 0, tensor("t", (1,), 0, 0)), "beyond the end"),
    "far beyond": (header(3, 1, 0, tensor("t", (1,), 0, 2**64 - 32)), "beyond the end"),
    "overlap": (
        header(3, 2, 0, tensor("t", (16,), 0, 0) + tensor("u", (1,), 0, 32)) + bytes(200),
        "overlap",
    ),
    "name twice": (
        header(3, 2, 0, tensor("t", (1,), 0, 0) + tensor("t", (1,), 0, 32)) + bytes(200),
        "name is there twice",
    ),
    "long name": (header(3, 1, 0, tensor("t" * 300, (1,), 0, 0)) + bytes(99), "name is longer"),
    "no metadata": (header(3, 1, 0, tensor("t", (1,), 0, 0)) + bytes(99), "general.architecture is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_hostile_gguf_headers(name: str, tmp_path: Path) -> None:
    data, sentence = HOSTILE_GGUF[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    assert sentence in refused(tmp_path / "bad.gguf")


@pytest.mark.parametrize("cut", [0, 5, 9, 100, 2000, -400, -1])
def test_truncated_safetensors(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    refused(folder)


def test_bit_flipped_directories_without_a_lock(folder: Path) -> None:
    rng = random.Random(2)
    weights, config = folder / "model.safetensors", folder / "config.json"
    (length,) = struct.unpack("<Q", weights.read_bytes()[:8])
    results = []
    for path, size in ((weights, 8 + length), (config, config.stat().st_size)):
        whole = path.read_bytes()
        for _ in range(80):
            data = bytearray(whole)
            data[rng.randrange(size)] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            results.append(loads_or_is_refused(folder))
        path.write_bytes(whole)
    assert 80 < results.count(False) < 160


def write_safetensors(path: Path, entries: Any, data: bytes = b"") -> None:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(begin: int, end: int, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE_SAFETENSORS: dict[str, tuple[Any, int, str]] = {
    "not json": (b"{]", 0, "not valid JSON"),
    "not an object": (b"[]", 0, "must be a JSON object"),
    "deep": (b"[" * 100_000, 0, "not valid JSON"),
    "twice": (b'{"a":{},"a":{}}', 0, "not valid JSON with each name once"),
    "malformed": ({"a": 5}, 0, "malformed"),
    "extra field": ({"a": entry(0, 4) | {"x": 1}}, 4, "malformed"),
    "dtype": ({"a": entry(0, 4, "I32")}, 4, "a type other than"),
    "dtype kind": ({"a": entry(0, 4, ["F32"])}, 4, "a type other than"),
    "size": ({"a": entry(0, 4, shape=(2,))}, 4, "does not match its shape"),
    "negative": ({"a": entry(-4, 0)}, 4, "malformed"),
    "overflow": ({"a": entry(0, 4, shape=(2**61, 8))}, 4, "does not match its shape"),
    "huge": ({"a": entry(0, 2**60, shape=(2**58,))}, 4, "does not match its header"),
    "fraction": ({"a": entry(0, 4, shape=(1.0,))}, 4, "malformed"),
    "empty": ({"a": entry(0, 0, shape=(0,))}, 0, "a tensor is empty"),
    "gap": ({"a": entry(4, 8)}, 8, "overlap or leave gaps"),
    "overlap": ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "overlap or leave gaps"),
    "rest": ({"a": entry(0, 4)}, 8, "does not match its header"),
    "short": ({"a": entry(0, 4)}, 3, "may be truncated"),
}


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_safetensors_headers(name: str, tmp_path: Path) -> None:
    entries, size, sentence = HOSTILE_SAFETENSORS[name]
    write_safetensors(tmp_path / "bad.safetensors", entries, bytes(size))
    with little_memory(), pytest.raises(ModelError, match=sentence):
        read_safetensors(tmp_path / "bad.safetensors")


def test_a_safetensors_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}      ")
    with pytest.raises(ModelError, match="longer than the file"):
        read_safetensors(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_hidden_layers": 2}, "lack 9 of its weights"),
        ({"tie_word_embeddings": False, "vocab_size": 300}, "has another shape"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "lack 3 of its weights"),
        ({"num_hidden_layers": 1024}, "of its weights"),
    ],
)
def test_weights_are_held_to_the_configuration(folder: Path, fields: dict[str, Any], sentence: str) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    assert sentence in refused(folder)


def test_weights_that_the_configuration_does_not_know_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.llama(attention_bias=True), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert "hold 12 weights that its configuration does not know" in refused(folder)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"a": "../other.safetensors"}}, "files of the same directory"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "files of the same directory"),
        ({"weight_map": {"a": 5}}, "files of the same directory"),
        ({"weight_map": {"a": "gone.safetensors"}}, "it is missing"),
    ],
)
def test_hostile_indexes(folder: Path, index: dict[str, Any], sentence: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sentence in refused(folder)


def test_a_directory_with_pickled_weights_only_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only safetensors are loaded" in refused(folder)


def test_a_huge_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b" " * (1 << 21))
    assert "config.json is larger than 1 MiB" in refused(folder)


def test_experts_in_a_dense_architecture_are_refused(tmp_path: Path) -> None:
    experts = (
        text("general.architecture") + struct.pack("<I", 8) + text("qwen2")
        + text("qwen2.expert_count") + struct.pack("<II", 4, 8)
    )  # fmt: skip
    data = header(3, 1, 2, experts + tensor("t", (1,), 0, 0)) + bytes(99)
    (tmp_path / "moe.gguf").write_bytes(data)
    assert "Mixture-of-experts" in refused(tmp_path / "moe.gguf")


def test_finite_but_large_weights_are_not_taken_for_damage(tmp_path: Path) -> None:
    model = tiny_models.llama()
    model.get_input_embeddings().weight.data[0, :2] = float(np.float32(3e38))
    loaded = load_model(str(tiny_models.save(model, tmp_path)), "float32")
    assert loaded.weights["model.embed_tokens.weight"][0, 0] > 1e38
