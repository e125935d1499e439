"""How the kernels see the page pool: where K and V of a (page, layer, head, row) lie. No op lives here, and
nothing that owns memory (`kvcache.pool`).

A page is [num_layers, 2 (K, V), part]; the inner order of a part is the kernels' choice per dtype:

    float32   K [K, D, S]        V [K, S, D]           rows of S positions: scores of neighbours in one vector
    bfloat16  K [K, D/2, S, 2]   V [K, S/2, D, 2]      pairs along the reduced dim, as bf16 dot products want
    int8      K [K, D/4, S, 4]   V [K, S/4, D, 4]      codes in fours, as dot products of bytes want

An int8 part's codes are followed by float32 scales [K, S], one per row and head: x = code * scale, code in
[-127, 127], scale = max |x| / 127, so a row's bits depend on the row alone. K's codes are stored as uint8
with 128 added, V's as int8. A row that is not all finite numbers has a NaN for a scale. D % 4 == 0.

Latent pages (MLA, `latent`) have one row per position instead, key and value of all heads: both parts of a
layer together are [S, C], with C = 2 * D for K = 1. A layout thus has the latent's bytes and no more.

Legend: P pages, L layers, K KV heads, D head dim, S page size (rows of a page), T tokens.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from pdserve.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
_INNER = {
    "float32": "k[h,d,s] v[h,s,d]",
    "bfloat16": "k[h,d/2,s,2] v[h,s/2,d,2]",
    "int8": "k8[h,d/4,s,4] v8[h,s/4,d,4] f32[h,s]",
}
_KIND = {"float32": 0, "bfloat16": 1, "int8": 2}  # the C++ side's `PageKind`
_LATENT = "latent[s,c]"
MAX_HEAD_DIM = 256
MAX_LATENT = 4096
MAX_PAGE_SIZE = 128


def inner_layout(dtype: str, *, latent: bool = False) -> str:
    """Tag of a page part's inner order, for the layout fingerprint. dtype: "float32" | "bfloat16" | "int8".

    Raises ConfigError for another dtype, and for latent pages of 8 bits.
    """
    if latent and dtype == "int8":
        raise ConfigError("latent pages (MLA) can not be int8; use float32 or bfloat16")
    try:
        return _LATENT if latent and dtype in _INNER else _INNER[dtype]
    except KeyError:
        raise ConfigError(
            f"dtype {dtype!r} is not supported for KV pages; use float32, bfloat16 or int8"
        ) from None


class _NativeView(ctypes.Structure):
    """The C++ side's `KVDesc` (csrc/common.h)."""

    _fields_ = (
        ("storage", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """A pool's page area. storage: 1-D tensor of dtype (of uint8 for int8 pages) over all pages; page_stride:
    elements of storage from one page to the next. page_size: a multiple of 16 up to 128; head_dim: even, for
    int8 a multiple of 4, up to 256. latent: pages of latent rows; then there is one KV head, whose head_dim
    is half a row.

    Raises ConfigError where the kernels can not serve such pages.
    """

    storage: torch.Tensor
    page_stride: int
    num_pages: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    latent: bool = False
    native: int = field(init=False, repr=False)
    """Address of the C++ descriptor."""
    _keep: _NativeView = field(init=False, repr=False)

    def __post_init__(self) -> None:
        inner_layout(self.dtype, latent=self.latent)
        if self.storage.dtype != _DTYPES[self.dtype]:
            raise ConfigError(f"the page pool's tensor is not {self.dtype}")
        if self.page_size % 16 or not 16 <= self.page_size <= MAX_PAGE_SIZE:
            raise ConfigError(f"page size {self.page_size} is not a multiple of 16 up to {MAX_PAGE_SIZE}")
        if self.latent:
            if self.num_kv_heads != 1 or self.latent_width > MAX_LATENT:
                raise ConfigError(f"a latent row has more than {MAX_LATENT} elements, or is not the only one")
        elif self.head_dim % 2 or not 2 <= self.head_dim <= MAX_HEAD_DIM:
            raise ConfigError(f"head dim {self.head_dim} is not an even number up to {MAX_HEAD_DIM}")
        elif self.dtype == "int8" and (self.head_dim % 4 or self.page_stride % 4):
            raise ConfigError(f"int8 pages need a head dim that is a multiple of 4, not {self.head_dim}")
        if (self.num_pages - 1) * self.page_stride + self.page_elems > self.storage.numel():
            raise ConfigError("the page pool's tensor is smaller than its pages")
        view = _NativeView(
            self.storage.data_ptr(), self.page_stride, self.num_pages, self.num_layers,
            self.num_kv_heads, self.head_dim, self.page_size, _KIND[self.dtype],
        )  # fmt: skip
        object.__setattr__(self, "_keep", view)
        object.__setattr__(self, "native", ctypes.addressof(view))

    def takes(self, rows: torch.dtype) -> bool:
        """Whether kernels that compute in this dtype write and read such pages: in int8, every one's."""
        return self.dtype == "int8" or rows is self.storage.dtype

    @property
    def part_elems(self) -> int:
        """Elements of storage of one layer's K (or V) in a page; for int8, bytes with the scales."""
        return self._code_elems + (4 * self.num_kv_heads * self.page_size if self.dtype == "int8" else 0)

    @property
    def _code_elems(self) -> int:
        return self.num_kv_heads * self.head_dim * self.page_size

    @property
    def latent_width(self) -> int:
        """C, elements of a latent row."""
        return 2 * self.head_dim

    def latent_part(self, layer: int) -> torch.Tensor:
        """A layer's latent rows over all pages as a view [P, S, C]."""
        assert self.latent
        return self._part((self.page_size, self.latent_width), 2 * layer)

    @property
    def page_elems(self) -> int:
        """Elements of a page, without the stride's padding."""
        return self.num_layers * 2 * self.part_elems

    def k_part(self, layer: int) -> torch.Tensor:
        """K of a layer over all pages as a view: float32 [P, K, D, S], bfloat16 [P, K, D/2, S, 2], int8
        (uint8) [P, K, D/4, S, 4]."""
        k, d, s = self.num_kv_heads, self.head_dim, self.page_size
        inner = {"float32": (k, d, s), "bfloat16": (k, d // 2, s, 2), "int8": (k, d // 4, s, 4)}
        return self._part(inner[self.dtype], 2 * layer)

    def v_part(self, layer: int) -> torch.Tensor:
        """V of a layer over all pages as a view: float32 [P, K, S, D], bfloat16 [P, K, S/2, D, 2], int8 (int8
        codes) [P, K, S/4, D, 4]."""
        k, d, s = self.num_kv_heads, self.head_dim, self.page_size
        inner = {"float32": (k, s, d), "bfloat16": (k, s // 2, d, 2), "int8": (k, s // 4, d, 4)}
        part = self._part(inner[self.dtype], 2 * layer + 1)
        return part.view(torch.int8) if self.dtype == "int8" else part

    def k_scales(self, layer: int) -> torch.Tensor:
        """Scales of an int8 layer's K over all pages as a view, float32 [P, K, S]."""
        return self._scales(2 * layer)

    def v_scales(self, layer: int) -> torch.Tensor:
        """Scales of an int8 layer's V over all pages as a view, float32 [P, K, S]."""
        return self._scales(2 * layer + 1)

    def _scales(self, index: int) -> torch.Tensor:
        assert self.dtype == "int8"
        scales = self._part((self.num_kv_heads, self.page_size, 4), index, self._code_elems)
        return scales.view(torch.float32).squeeze(-1)

    def _part(self, inner: tuple[int, ...], index: int, skip: int = 0) -> torch.Tensor:
        strides = [1]
        for size in reversed(inner[1:]):
            strides.insert(0, strides[0] * size)
        offset = self.storage.storage_offset() + index * self.part_elems + skip
        return self.storage.as_strided((self.num_pages, *inner), (self.page_stride, *strides), offset)


def read_kv(kv: KVView, layer: int, slots_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by slot (page * page_size + row) in plain order: (k_TKD, v_TKD), float32 where pages are int8. For
    references and tests."""
    page, row = slots_T.long() // kv.page_size, slots_T.long() % kv.page_size
    k, v = kv.k_part(layer), kv.v_part(layer)
    if kv.dtype == "float32":
        return k[page, :, :, row], v[page, :, row, :]
    if kv.dtype == "int8":
        k_codes_TKD = k[page, :, :, row, :].flatten(2).float() - 128
        v_codes_TKD = v[page, :, row // 4, :, row % 4].float()
        k_scale_TK1 = kv.k_scales(layer)[page, :, row, None]
        return k_codes_TKD * k_scale_TK1, v_codes_TKD * kv.v_scales(layer)[page, :, row, None]
    return k[page, :, :, row, :].flatten(2), v[page, :, row // 2, :, row % 2]
