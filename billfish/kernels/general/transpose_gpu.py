"""The transpose on a GPU, in Triton; see `transpose.py`.

Triton gives each memory access of a tile the arrangement of threads that makes it contiguous, and
passes the tile through shared memory (swizzled, so that banks do not collide) between the two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import BITS
from billfish.kernels.general.gpu import _on


@triton.jit
def _transpose_kernel(
    x, out, m, n, across, x_batch, x_row, x_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Program (tile, batch): a tile of [m, n], `across` of them in a row."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < m) & (column < n)
    value = tl.load(x + batch * x_batch + row * x_row + column * x_column, mask=inside)
    tl.store(out + batch * m * n + column * m + row, value, mask=inside)


def transpose_copy(x: Tensor, *, tiled: bool = True) -> Tensor:
    """x: [batch, m, n]."""
    batch, m, n = x.shape
    out = torch.empty(batch, n, m, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    bits = BITS[x.dtype.itemsize]
    # 256 bytes a side: whole lines of memory both ways, two at a time.
    side = 256 // x.dtype.itemsize if x.dtype.itemsize > 1 else 64
    rows, columns = (side, side) if tiled else (1, 1024)
    across = triton.cdiv(n, columns)
    with _on(x):
        for first in range(0, batch, 65535):  # the most programs a grid has in its second dimension
            part, into = x[first : first + 65535], out[first : first + 65535]
            _transpose_kernel[(across * triton.cdiv(m, rows), part.shape[0])](
                part.view(bits), into.view(bits), m, n, across, *x.stride(),
                ROWS=rows, COLUMNS=columns, num_warps=side // 8 if tiled else 4,
            )  # fmt: skip
    return out
