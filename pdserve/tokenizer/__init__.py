"""Text to token ids and back, chat templates and stop strings. Needs `tokenizers` and `jinja2` only.

The parts: `bundle` (what travels), `from_dir` and `from_gguf` (reading model files), `encode`, `incremental`,
`stops`, `templates`. Nothing here imports torch, ray or gRPC.
"""

from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.tokenizer.encode import Tokenizer
from pdserve.tokenizer.from_dir import load_bundle_from_dir
from pdserve.tokenizer.from_gguf import bundle_from_metadata, load_bundle_from_gguf
from pdserve.tokenizer.incremental import IncrementalDecoder
from pdserve.tokenizer.stops import StopMatcher, checked_stops

__all__ = [
    "IncrementalDecoder",
    "StopMatcher",
    "Tokenizer",
    "TokenizerBundle",
    "bundle_from_metadata",
    "checked_stops",
    "load_bundle_from_dir",
    "load_bundle_from_gguf",
]
