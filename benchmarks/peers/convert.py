"""Writes the default model in another format: `convert.py SOURCE.gguf TARGET`, where TARGET is a directory
(Hugging Face, bf16) or a .gguf file whose name is a type (BF16, F16, Q8_0)."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_SKIPPED = ("GGUF.", "general.architecture", "general.file_type")


def to_directory(source: Path, target: Path) -> None:
    """A Hugging Face directory in bf16, without any trace of the quantisation it came from."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**where)
    for trace in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, trace):
            delattr(config, trace)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


def to_gguf(source: Path, target: Path) -> None:
    """A GGUF file with the same metadata; matrices in the type it is named after, vectors in float32."""
    kind = gguf.GGMLQuantizationType[target.name.split(".")[0]]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, _text(reader.fields["general.architecture"]))
    for field in reader.fields.values():
        if not field.name.startswith(_SKIPPED):
            main = field.types[0]
            sub = field.types[-1] if main == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), main, sub_type=sub)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_matrix = len(tensor.shape) > 1
        wanted = kind if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text(field: Any) -> str:
    return str(field.contents())


def main() -> None:
    """Writes beside the target first, so that a half-written model is never taken for one."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    (to_gguf if target.suffix == ".gguf" else to_directory)(source, part)
    os.replace(part, target)


if __name__ == "__main__":
    main()
