"""The one place that hands bytes to the `tokenizers` library, so that its failures become our errors."""

from __future__ import annotations

from tokenizers import Tokenizer

from pdserve.errors import ModelError


def load_native(tokenizer_json: bytes) -> Tokenizer:
    """A `tokenizers` tokenizer from the bytes of a tokenizer.json. Raises ModelError."""
    try:
        return Tokenizer.from_str(tokenizer_json.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException:  # the library raises bare Exception, and its panics are not even Exceptions
        raise ModelError("The model's tokenizer.json is damaged or of an unknown version.") from None
