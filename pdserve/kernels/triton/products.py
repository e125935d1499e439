"""What the kernels share: a product that the interpreter computes too. No kernel lives here.

Triton's interpreter keeps bfloat16 as 16-bit integers and multiplies these as such; there operands are
widened first, which changes no product: bfloat16 ones are exact in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run without a GPU (TRITON_INTERPRET=1 in the environment before the first import)."""


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a @ b in float32, float32 operands unrounded. WIDEN: INTERPRETED."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
