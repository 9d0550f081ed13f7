"""Adds up what the Hopper prefill kernel left of items whose keys were shared out.

In a launch of its own, a few rows a program: the last program of an item to finish would take
longer for all of its rows than all multiprocessors for these.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels._library import launches_early
from billfish.kernels.paged_attention.prefill_items import ENTRY, INFO, ROWS
from billfish.kernels.paged_attention.tile import NO_SCORE, store_output

_ROWS_AT_ONCE = 4
_PARTS_AT_ONCE = 4
_PROGRAMS_A_SLOT = 8


@triton.jit(do_not_specialize=["num_requests"])
def _combine_kernel(
    items, split_acc, split_sums, split_info, sinks, out, lse, num_requests,
    HEADS: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    ENTRY: tl.constexpr, INFO: tl.constexpr, OWN: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The programs of a slot take their share of the rows of its item, OWN at once, over all parts
    in order. All slots of an item take part, so that all multiprocessors are equally busy.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(0)
    info = split_info + INFO * slot
    token = tl.load(info)
    rows = tl.load(info + 1) * PACK
    head0 = tl.load(info + 2)
    parts = tl.load(info + 3)
    part = tl.load(info + 4)
    if slot >= tl.load(items + ENTRY * (num_requests + 1) + 1):
        return
    first = slot - part
    d = tl.arange(0, D)
    mine = (part * tl.num_programs(1) + tl.program_id(1)) * OWN
    for begin in range(mine, rows, parts * tl.num_programs(1) * OWN):
        row = begin + tl.arange(0, OWN)
        top = tl.full([OWN], NO_SCORE, tl.float32)
        total = tl.zeros([OWN], tl.float32)
        acc = tl.zeros([OWN, D], tl.float32)
        for start in range(0, parts, CHUNK):
            each = start + tl.arange(0, CHUNK)
            here = (each < parts)[None, :]
            sums = split_sums + (first + each)[None, :] * (2 * ROWS) + row[:, None]
            part_top = tl.load(sums, mask=here, other=NO_SCORE)
            part_total = tl.load(sums + ROWS, mask=here, other=0.0)
            at = (first + each).to(tl.int64)[None, :, None] * (ROWS * D)
            at += row[:, None, None] * D + d[None, None, :]
            part_acc = tl.load(split_acc + at, mask=here[:, :, None], other=0.0)
            new_top = tl.maximum(top, tl.max(part_top, 1))
            decay = tl.exp2(top - new_top)
            weight = tl.exp2(part_top - new_top[:, None])
            total = total * decay + tl.sum(part_total * weight, 1)
            acc = acc * decay[:, None] + tl.sum(part_acc * weight[:, :, None], 1)
            top = new_top
        store_output(
            out, lse, token + row // PACK, head0 + row % PACK, row < rows, top, total, acc, sinks,
            HEADS, D, D, HAS_SINKS, HAS_LSE,
        )  # fmt: skip


def combine(
    items: Tensor,
    split_acc: Tensor,
    split_sums: Tensor,
    split_info: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    num_requests: int,
    pack: int,
) -> None:
    """Write the rows of out [T, H, D], and of lse [T, H] if given, whose parts are in the slots of
    a plan, see `Workspace`.
    """
    early = launches_early(out.device)
    _combine_kernel[(split_acc.shape[0], _PROGRAMS_A_SLOT)](
        items, split_acc, split_sums, split_info, out if sinks is None else sinks, out,
        out if lse is None else lse, num_requests,
        HEADS=out.shape[1], PACK=pack, D=out.shape[2], ROWS=ROWS, ENTRY=ENTRY, INFO=INFO,
        OWN=_ROWS_AT_ONCE, CHUNK=_PARTS_AT_ONCE, HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None, PDL=early, launch_pdl=early, num_warps=4,
    )  # fmt: skip
