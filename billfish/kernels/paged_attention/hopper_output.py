"""Where the rows of the Hopper prefill kernel go: normalized and stored, or left as a part."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from billfish.kernels.gluon_compat import aggregate
from billfish.kernels.paged_attention import prefill_items
from billfish.kernels.paged_attention.hopper_feed import HALF, ROWS
from billfish.kernels.paged_attention.tile import LOG2E

INFO = gl.constexpr(prefill_items.INFO)


@aggregate
class Partials:
    """Results of the parts of items whose keys are shared out, for `prefill_combine`."""

    acc: gl.tensor
    sums: gl.tensor
    info: gl.tensor

    @gluon.jit
    def leave(self, c: gl.constexpr, o, top, total, slot, first_token, tokens, head0, parts, part):
        """Leave the rows of warpgroup c: those of one of an item's parts."""
        ACC: gl.constexpr = o.type.layout
        D: gl.constexpr = o.shape[1]
        row = c * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, ACC))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, ACC))
        at = self.acc + slot.to(gl.int64) * (ROWS * D)
        gl.store(at + gl.expand_dims(row, 1) * D + gl.expand_dims(d, 0), o)
        gl.store(self.sums + slot * (2 * ROWS) + row, top)
        gl.store(self.sums + slot * (2 * ROWS) + ROWS + row, total)
        if c == 0:
            info = self.info + slot * INFO
            gl.store(info, first_token)
            gl.store(info + 1, tokens)
            gl.store(info + 2, head0)
            gl.store(info + 3, parts)
            gl.store(info + 4, part)


@aggregate
class Output:
    out: gl.tensor
    desc: tma.tensor_descriptor
    lse: gl.tensor
    sinks: gl.tensor
    partials: Partials
    HEADS: gl.constexpr
    PACK: gl.constexpr
    HAS_SINKS: gl.constexpr
    HAS_LSE: gl.constexpr

    @gluon.jit
    def normalize(self, o, top, total, token, tokens, head0):
        """Divide by the row sums, which a sink joins here, and store their logarithms."""
        ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
        row = gl.arange(0, HALF, layout=ROW)
        head = head0 + row % self.PACK
        if self.HAS_SINKS:
            sink = gl.load(self.sinks + head).to(gl.float32) * LOG2E
            new_top = gl.maximum(top, sink)
            decay = gl.exp2(top - new_top)
            total = total * decay + gl.exp2(sink - new_top)
            o = o * gl.expand_dims(decay, 1)
            top = new_top
        if self.HAS_LSE:
            at = (token + row // self.PACK).to(gl.int64) * self.HEADS + head
            gl.store(self.lse + at, (top + gl.log2(total)) / LOG2E, mask=row < tokens * self.PACK)
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
