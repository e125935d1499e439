"""The compiled kernels as ctypes functions: loading, argument types, threads, and the numerics id.

Calls release the GIL. Every wrapper passes addresses of contiguous tensors; nothing here checks shapes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from pdserve.errors import ConfigError, InternalError
from pdserve.kernels.build import built, source_hash

DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1}
"""The C++ side's `Dtype` (csrc/common.h)."""

_P, _I, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pds_set_num_threads": (None, (_N,)),
    "pds_panel_width": (_N, ()),
    "pds_advise_huge": (None, (_P, _I)),
    "pds_isa": (ctypes.c_char_p, ()),
    "pds_pack_linear": (None, (_P, _P, _I, _I, _N)),
    "pds_linear": (None, (_P, _P, _P, _P, _I, _I, _I, _N, _N)),
    "pds_int8_panel_width": (_I, ()),
    "pds_pack_int8": (None, (_P, _P, _I, _I)),
    "pds_int4_bytes": (_I, (_I, _I, _I)),
    "pds_pack_int4": (None, (_P, _P, _P, _P, _I, _I, _I)),
    "pds_quant_linear": (None, (_P, _P, _P, _I, _N, _N)),
    "pds_stack": (_N, (_P, _P)),
    "pds_products": (_I, (_N, _I)),
    "pds_read": (None, (_P, _I)),
    "pds_best": (None, (_P, _I, _I, _P)),
    "pds_grouped_linear": (_N, (_P, _P, _P, _P, _P, _I, _I, _I, _I, _N, _N)),
    "pds_route_top_k": (None, (_P, _P, _P, _P, _I, _I, _I, _I, _I, _N, _N, _F)),
    "pds_sort_by_slot": (_I, (_P, _P, _P, _P, _I, _I, _I)),
    "pds_write_latent": (_N, (_P, _P, _I, _P, _I, _N)),
    "pds_latent_attention": (_N, (_P, _P, _P, _I, _P, _I, _I, _F, _N)),
    "pds_combine": (None, (_P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _N)),
    "pds_rms_norm": (None, (_P, _P, _P, _I, _I, _F, _N)),
    "pds_add_rms_norm": (None, (_P, _P, _P, _P, _P, _I, _I, _F, _N)),
    "pds_silu_mul": (None, (_P, _P, _I, _I, _N)),
    "pds_apply_rope": (None, (_P, _P, _P, _I, _I, _I, _N)),
    "pds_write_kv": (_N, (_P, _P, _P, _I, _P, _I, _N)),
    "pds_rope_and_write_kv": (_N, (_P, _P, _P, _P, _P, _I, _P, _I, _I, _P, _P, _F, _N)),
    "pds_paged_attention": (_N, (_P, _P, _P, _I, _P, _I, _F, _I, _N)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, built on first use. Raises ConfigError where they can not be built."""
    path = built()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:
        raise ConfigError("the CPU kernels can not be loaded; empty the cache folder and try again") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    loaded.pds_set_num_threads(torch.get_num_threads())
    return loaded


def set_num_threads(num_threads: int) -> None:
    """Threads of torch's operators and of the kernels. Results do not depend on it."""
    torch.set_num_threads(num_threads)
    library().pds_set_num_threads(num_threads)


def isa() -> str:
    """Instruction set the kernels were built for: "avx512-dot", "avx512" or "avx2"."""
    name: bytes = library().pds_isa()
    return name.decode()


@functools.cache
def numerics_id(dtype: str) -> str:
    """Names how numbers are computed here: equal ids give bit-identical KV from equal tokens.

    Made of dtype, instruction set and kernel source. Threads, batch and chunking are not in it: no result
    depends on them.
    """
    return f"cpu-{isa()}-{dtype}-{source_hash()}"


def check(status: int) -> None:
    """Raise InternalError for a status the C++ side reports."""
    if status:
        raise InternalError("a page number outside the pool reached the kernels")
