"""Where the rows of the Hopper decode kernel go: merged over warps, stored, combined over parts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from billfish.kernels.gluon_compat import aggregate
from billfish.kernels.paged_attention.tile import LOG2E, NO_SCORE

WARPS = gl.constexpr(4)
ROWS = gl.constexpr(16)


@aggregate
class Rows:
    """Where queries come from, where results go, and what happens to the scores."""

    query: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    sinks: gl.tensor
    parts: gl.tensor
    acc: gl.tensor
    sums: gl.tensor
    arrivals: gl.tensor
    num_tokens: gl.tensor
    token_stride: gl.tensor
    head_stride: gl.tensor
    scale: gl.tensor
    soft_cap: gl.tensor
    HKV: gl.constexpr
    GROUP: gl.constexpr
    D: gl.constexpr
    USED: gl.constexpr
    HAS_CAP: gl.constexpr
    HAS_SINKS: gl.constexpr
    HAS_LSE: gl.constexpr

    @gluon.jit
    def store(self, top, total, acc, head, begin, end):
        """As `tile.store_output`, packed rows of a request."""
        LAYOUT: gl.constexpr = acc.type.layout
        row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        d = gl.arange(0, self.D, layout=gl.SliceLayout(0, LAYOUT))
        q_head = head * self.GROUP + row % self.GROUP
        live = row < (end - begin) * self.GROUP
        if self.HAS_SINKS:
            sink = gl.load(self.sinks + q_head, mask=live, other=0.0).to(gl.float32) * LOG2E
            new_top = gl.maximum(top, sink)
            decay = gl.exp2(top - new_top)
            total = total * decay + gl.exp2(sink - new_top)
            acc = acc * gl.expand_dims(decay, 1)
            top = new_top
        acc = acc / gl.expand_dims(gl.where(total > 0.0, total, 1.0), 1)
        token = (begin + row // self.GROUP).to(gl.int64)
        out_row = token * (self.HKV * self.GROUP) + q_head
        if self.HAS_LSE:
            gl.store(self.lse + out_row, (top + gl.log2(total)) / LOG2E, mask=live)
        where = self.out + gl.expand_dims(out_row * self.D, 1) + gl.expand_dims(d, 0)
        mask = gl.expand_dims(live, 1) & (gl.expand_dims(d, 0) >= 0)
        gl.store(where, acc.to(self.out.dtype.element_ty), mask=mask)

    @gluon.jit
    def leave(self, top, total, acc, slot):
        """Store a partial result, the USED first rows of it."""
        LAYOUT: gl.constexpr = acc.type.layout
        row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        d = gl.arange(0, self.D, layout=gl.SliceLayout(0, LAYOUT))
        offset = gl.expand_dims(row, 1) * self.D + gl.expand_dims(d, 0)
        at = self.acc + slot.to(gl.int64) * (ROWS * self.D)
        gl.store(at + offset, acc, mask=offset < self.USED * self.D)
        at = self.sums + slot * (2 * ROWS) + row
        gl.store(at, top, mask=row < self.USED)
        gl.store(at + ROWS, total, mask=row < self.USED)

    @gluon.jit
    def combine(self, first, last, head, LAYOUT: gl.constexpr, CHUNK: gl.constexpr):
        """Combine the partial results of parts first..last in this order; LAYOUT is 3-D."""
        FLAT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
        SUMS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
        ROW: gl.constexpr = gl.SliceLayout(1, FLAT)
        row = gl.arange(0, self.USED, layout=gl.SliceLayout(0, SUMS))
        row_d = gl.arange(0, self.USED, layout=ROW)
        d = gl.arange(0, self.D, layout=gl.SliceLayout(0, FLAT))
        offset = gl.expand_dims(row_d, 1) * self.D + gl.expand_dims(d, 0)
        top = gl.full([self.USED], NO_SCORE, gl.float32, gl.SliceLayout(0, SUMS))
        total = gl.zeros([self.USED], gl.float32, gl.SliceLayout(0, SUMS))
        acc = gl.zeros([self.USED, self.D], gl.float32, FLAT)
        for start in range(first, last + 1, CHUNK):
            part = start + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, SUMS))
            slot = (part * self.HKV + head) * 2 + (part == first).to(gl.int32)
            slot = gl.expand_dims(slot, 1) + gl.expand_dims(row * 0, 0)
            here = gl.expand_dims(part <= last, 1) & (gl.expand_dims(row, 0) >= 0)
            at = self.sums + slot * (2 * ROWS) + gl.expand_dims(row, 0)
            # .cg: written by other multiprocessors, so not to be found in this one's L1.
            part_top = gl.load(at, mask=here, other=NO_SCORE, cache_modifier=".cg")
            part_total = gl.load(at + ROWS, mask=here, other=0.0, cache_modifier=".cg")
            at = self.acc + gl.expand_dims(slot.to(gl.int64) * (ROWS * self.D), 2)
            at = at + gl.expand_dims(offset, 0)
            mask = gl.expand_dims(here, 2) & (gl.expand_dims(offset, 0) >= 0)
            part_acc = gl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
            new_top = gl.maximum(top, gl.max(part_top, 0))
            decay = gl.exp2(top - new_top)
            weight = gl.exp2(part_top - gl.expand_dims(new_top, 0))
            total = total * decay + gl.sum(part_total * weight, 0)
            decay = gl.expand_dims(gl.convert_layout(decay, ROW), 1)
            acc = acc * decay + gl.sum(part_acc * gl.expand_dims(weight, 2), 0)
            top = new_top
        return gl.convert_layout(top, ROW), gl.convert_layout(total, ROW), acc

    @gluon.jit
    def zero_rest(self, head, first, step, end, LAYOUT: gl.constexpr):
        """As `tile.zero_rows`, of tokens end + first, + step, ..."""
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        d = gl.arange(0, self.D, layout=gl.SliceLayout(0, LAYOUT))
        offset = gl.expand_dims(row, 1) * self.D + gl.expand_dims(d, 0)
        zeros = gl.zeros([ROWS, self.D], self.out.dtype.element_ty, LAYOUT)
        empty = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
        if self.HAS_SINKS:
            sink = self.sinks + head * self.GROUP + row
            empty = gl.load(sink, mask=row < self.GROUP, other=0.0).to(gl.float32)
        token = (end + first).to(gl.int64)
        while token < self.num_tokens:
            at = self.out + (token * self.HKV + head) * (self.GROUP * self.D)
            gl.store(at + offset, zeros, mask=offset < self.GROUP * self.D)
            if self.HAS_LSE:
                at_lse = self.lse + (token * self.HKV + head) * self.GROUP
                gl.store(at_lse + row, empty, mask=row < self.GROUP)
            token += step


@gluon.jit
def merge_warps(top, total, acc, USED: gl.constexpr, LAYOUT: gl.constexpr):
    """Merge the warps' results [WARPS, ROWS]; keep 8 rows if USED are no more."""
    D: gl.constexpr = acc.shape[2]
    if USED <= 8:
        # Row bit 3 lies in a register of each thread: dropping the upper rows moves nothing.
        acc, _ = acc.reshape([WARPS, 2, 8, D]).permute([0, 2, 3, 1]).split()
        top, _ = top.reshape([WARPS, 2, 8]).permute([0, 2, 1]).split()
        total, _ = total.reshape([WARPS, 2, 8]).permute([0, 2, 1]).split()
    SUMS: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    top = gl.convert_layout(top, SUMS)
    total = gl.convert_layout(total, SUMS)
    all_top = gl.max(top, 0)
    decay = gl.exp2(top - gl.expand_dims(all_top, 0))
    all_total = gl.convert_layout(gl.sum(total * decay, 0), ROW)
    all_acc = gl.convert_layout(gl.sum(acc * gl.expand_dims(decay, 2), 0), LAYOUT)
    return gl.convert_layout(all_top, ROW), all_total, all_acc
