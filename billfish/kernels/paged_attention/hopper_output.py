"""Where the rows of the Hopper prefill kernel go: combined over parts, normalized, stored."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from billfish.kernels.gluon_compat import aggregate, barrier
from billfish.kernels.paged_attention.hopper_feed import HALF, ROWS
from billfish.kernels.paged_attention.tile import LOG2E, NO_SCORE


@aggregate
class Partials:
    """Results of the parts of items whose keys are shared out, until the last part is done."""

    acc: gl.tensor
    sums: gl.tensor
    arrivals: gl.tensor

    @gluon.jit
    def exchange(self, c: gl.constexpr, o, top, total, parts, part, slot):
        """Leave the rows of warpgroup c; combine those of all parts, in order, if this is the last
        to come: (whether it is, sum of weights times V, top, sum of weights [HALF]).
        """
        ACC: gl.constexpr = o.type.layout
        ROW: gl.constexpr = gl.SliceLayout(1, ACC)
        D: gl.constexpr = o.shape[1]
        row = c * HALF + gl.arange(0, HALF, layout=ROW)
        d = gl.arange(0, D, layout=gl.SliceLayout(0, ACC))
        offset = gl.expand_dims(row, 1) * D + gl.expand_dims(d, 0)
        gl.store(self.acc + slot.to(gl.int64) * (ROWS * D) + offset, o)
        gl.store(self.sums + slot * (2 * ROWS) + row, top)
        gl.store(self.sums + slot * (2 * ROWS) + ROWS + row, total)
        first = slot - part
        arrival = self.arrivals + first * 2 + c
        barrier()  # all four warps have stored before one thread announces it
        arrived = gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
        last = arrived == parts - 1
        if last:
            gl.store(arrival, 0)
            top = gl.full([HALF], NO_SCORE, gl.float32, ROW)
            total = gl.zeros([HALF], gl.float32, ROW)
            o = gl.zeros([HALF, D], gl.float32, ACC)
            sums = self.sums + first * (2 * ROWS)
            acc = self.acc + first.to(gl.int64) * (ROWS * D)
            for _ in range(parts):
                # .cg: written by other multiprocessors, so not to be found in this one's L1.
                part_top = gl.load(sums + row, cache_modifier=".cg")
                part_total = gl.load(sums + ROWS + row, cache_modifier=".cg")
                part_o = gl.load(acc + offset, cache_modifier=".cg")
                sums += 2 * ROWS
                acc += ROWS * D
                new_top = gl.maximum(top, part_top)
                decay = gl.exp2(top - new_top)
                weight = gl.exp2(part_top - new_top)
                total = total * decay + part_total * weight
                o = o * gl.expand_dims(decay, 1) + part_o * gl.expand_dims(weight, 1)
                top = new_top
        return last, o, top, total


@aggregate
class Output:
    out: gl.tensor
    desc: tma.tensor_descriptor
    sinks: gl.tensor
    partials: Partials
    HEADS: gl.constexpr
    PACK: gl.constexpr
    HAS_SINKS: gl.constexpr

    @gluon.jit
    def normalize(self, o, top, total, head0):
        """Divide by the row sums; a sink joins the denominator here."""
        ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
        if self.HAS_SINKS:
            head = head0 + gl.arange(0, HALF, layout=ROW) % self.PACK
            sink = gl.load(self.sinks + head).to(gl.float32) * LOG2E
            new_top = gl.maximum(top, sink)
            decay = gl.exp2(top - new_top)
            total = total * decay + gl.exp2(sink - new_top)
            o = o * gl.expand_dims(decay, 1)
        return o * gl.expand_dims(1.0 / gl.where(total > 0.0, total, 1.0), 1)

    @gluon.jit
    def store(self, o, buffer, token, tokens, head0):
        """Rows of a warpgroup through its buffer; `tokens` of them exist."""
        D: gl.constexpr = o.shape[1]
        SHARE: gl.constexpr = HALF // self.PACK
        buffer.store(o.to(self.desc.dtype))
        fence_async_shared()
        if tokens >= SHARE:
            packed = buffer._reinterpret(self.desc.dtype, [SHARE, self.PACK, D], self.desc.layout)
            tma.async_copy_shared_to_global(self.desc, [token, head0, 0], packed)
        else:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
            row = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
            d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
            head = head0 + row % self.PACK
            offset = ((token + row // self.PACK).to(gl.int64) * self.HEADS + head) * D
            where = self.out + gl.expand_dims(offset, 1) + gl.expand_dims(d, 0)
            live = gl.expand_dims(row < tokens * self.PACK, 1) & (gl.expand_dims(d, 0) >= 0)
            gl.store(where, buffer.load(LAYOUT), mask=live)
