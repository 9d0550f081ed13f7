"""Who computes what in the Hopper kernel, and how shared tiles are put together.

A tile is a block of W's rows times a block of tokens; it takes `steps` steps of 128 columns. While
there is a full wave of tiles left, every block takes whole ones (`whole` tiles in all, dealt round
robin). The steps of the remaining tiles are divided evenly: block p gets `share` of them, the first
`extra` blocks one more. This is Stream-K (Osama et al., 2023, arXiv 2301.03598) with its
data-parallel waves first.

Blocks that share a tile each leave their fp32 sums in the workspace and count themselves in; the
last to arrive adds all sums in the order of the steps and stores the tile. Nobody waits for
anybody, and the result does not depend on who was last. The counter is zero again afterwards.

With `OWNED`, each of the remaining tiles belongs to one of the first blocks, which computes its
first `own` steps after all else. The other blocks, the helpers, share the steps after those evenly
and compute them before all else, so their sums are there when the owner comes: it then adds them to
its own, which never leave its registers. Large tiles are shared like that, whose sums take as long
to store and to load as several steps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from billfish.kernels.gluon_compat import aggregate, barrier
from billfish.kernels.marlin.hopper_layouts import output_layout


@aggregate
class Schedule:
    """The tiles and steps of block `pid` of `blocks`."""

    pid: gl.tensor
    blocks: gl.tensor
    steps: gl.tensor
    tiles_n: gl.tensor
    tiles_m: gl.tensor
    whole: gl.tensor
    share: gl.tensor
    extra: gl.tensor
    own: gl.tensor
    GROUP_M: gl.constexpr
    OWNED: gl.constexpr

    @gluon.jit
    def start(self, pid):
        """The first step of block `pid`, counted over the tiles that are divided.

        With OWNED, of helper `pid`, counted over the steps that are not the owners'.
        """
        return pid * self.share + gl.minimum(pid, self.extra)

    @gluon.jit
    def block_of(self, step):
        """The block (with OWNED, the helper) that computes `step`, the inverse of `start`."""
        longer = self.extra * (self.share + 1)
        after = self.extra + (step - longer) // gl.maximum(self.share, 1)
        return gl.where(step < longer, step // (self.share + 1), after)

    @gluon.jit
    def count(self):
        """Steps of this block in all."""
        tiles = gl.maximum(self.whole - self.pid + self.blocks - 1, 0) // self.blocks
        if self.OWNED:
            helper = self.helper()
            part = gl.where(helper < 0, self.own, self.start(helper + 1) - self.start(helper))
            return tiles * self.steps + part
        return tiles * self.steps + self.start(self.pid + 1) - self.start(self.pid)

    @gluon.jit
    def helper(self):
        """Which helper this block is, with OWNED; negative for the owner of a tile."""
        return self.pid - (self.tiles_n * self.tiles_m - self.whole)

    @gluon.jit
    def _helps(self, tile):
        """Whether this block computes steps of `tile` as a helper."""
        return (tile >= self.whole) & (self.helper() >= 0)

    @gluon.jit
    def shared_step(self, tile, step):
        """A helper's step, counted over the steps that are not the owners'."""
        return (tile - self.whole) * (self.steps - self.own) + step - self.own

    @gluon.jit
    def _divided(self):
        """Tile and step at which this block's part of the divided tiles begins."""
        start = self.start(self.pid)
        tile = start // self.steps
        return self.whole + tile, start - tile * self.steps

    @gluon.jit
    def first(self):
        if self.OWNED:
            helper = self.helper()
            start = self.start(helper)
            shared = gl.maximum(self.steps - self.own, 1)
            tile = start // shared
            helps = (helper >= 0) & (start < self.start(helper + 1))
            step = self.own + start - tile * shared
            return gl.where(helps, self.whole + tile, self.pid), gl.where(helps, step, 0)
        tile, step = self._divided()
        deals = self.pid < self.whole
        return gl.where(deals, self.pid, tile), gl.where(deals, 0, step)

    @gluon.jit
    def next(self, tile, step):
        """Tile and step after this one."""
        step += 1
        if self.OWNED:
            if self._helps(tile):
                if step == self.steps:
                    tile += 1
                    step = self.own
                if self.shared_step(tile, step) == self.start(self.helper() + 1):
                    tile = self.pid
                    step = self.own * 0
            elif step == self.steps:
                tile += self.blocks
                step = self.own * 0
                if tile >= self.whole:
                    tile = self.whole + self.pid
        elif step == self.steps:
            step = 0
            if tile >= self.whole:
                tile += 1
            else:
                tile += self.blocks
                if tile >= self.whole:
                    tile, step = self._divided()
        return tile, step

    @gluon.jit
    def run(self, tile, step, left):
        """Steps from this one on that this block computes of `tile`; left: of all its tiles."""
        run = gl.minimum(left, self.steps - step)
        if not self.OWNED:
            return run
        if self._helps(tile):
            rest = self.start(self.helper() + 1) - self.shared_step(tile, step)
            run = gl.minimum(run, rest)
        return run

    @gluon.jit
    def after(self, tile, step, run):
        """Tile and step after a run of steps that begins at this one."""
        # All runs but those with OWNED end with their tile, or with the block's work.
        last = step + run - 1 if self.OWNED else self.steps - 1
        return self.next(tile, last)

    @gluon.jit
    def place(self, tile):
        """(block of tokens, block of rows) of a tile, in groups of GROUP_M token blocks."""
        if self.GROUP_M == 0:  # one block of tokens in all
            return tile * 0, tile
        else:
            width = self.GROUP_M * self.tiles_n
            group = tile // width
            inside = tile - group * width
            high = gl.minimum(self.tiles_m - group * self.GROUP_M, self.GROUP_M)
            block = inside // high
            return group * self.GROUP_M + inside - block * high, block


@aggregate
class Output:
    """Where results go and what is added to them; the workspace and the counters of arrivals.

    y [M, N]; with SILU_MUL, W has 2 N rows, eight of the gate and eight of up by turns.
    """

    y: gl.tensor
    bias: gl.tensor
    residual: gl.tensor
    partial: gl.tensor
    arrived: gl.tensor
    M: gl.tensor
    N: gl.tensor
    ROWS: gl.constexpr
    CONSUMERS: gl.constexpr
    HAS_BIAS: gl.constexpr
    HAS_RESIDUAL: gl.constexpr
    SILU_MUL: gl.constexpr
    TOGETHER: gl.constexpr

    @gluon.jit
    def store(self, acc, tile_m, row0):
        """Store fp32 sums [ROWS, TILE_M] of the rows from row0 on as y's dtype."""
        TILE_M: gl.constexpr = acc.shape[1]
        if self.HAS_BIAS:
            acc += self.bias_of(row0, gl.SliceLayout(1, acc.type.layout))[:, None]
        if self.SILU_MUL:
            acc = _silu_mul(acc)
            row0 = row0 // 2
        rows: gl.constexpr = acc.shape[0]
        LAYOUT: gl.constexpr = output_layout(rows)
        n = row0 + gl.arange(0, rows, layout=gl.SliceLayout(1, LAYOUT))
        m = gl.arange(0, TILE_M, layout=gl.SliceLayout(0, LAYOUT))
        corner = (tile_m * TILE_M).to(gl.int64) * self.N
        at = (m * self.N)[None, :] + n[:, None]
        live = (tile_m * TILE_M + m < self.M)[None, :] & (n < self.N)[:, None]
        if self.HAS_RESIDUAL:
            residual = gl.load(self.residual + corner + at, mask=live, other=0.0)
            # Its 16 bits change layout, not the 32 of the sums: half of the shared memory.
            acc += gl.convert_layout(residual, acc.type.layout).to(gl.float32)
        y = gl.convert_layout(acc.to(self.y.dtype.element_ty), LAYOUT)
        gl.store(self.y + corner + at, y, mask=live)

    @gluon.jit
    def bias_of(self, row0, LAYOUT: gl.constexpr):
        """The bias of rows row0 to row0 + ROWS, float32."""
        row = row0 + gl.arange(0, self.ROWS, layout=LAYOUT)
        if self.SILU_MUL:
            n = row // 16 * 8 + row % 8
            live = n < self.N
            n = gl.where(row % 16 < 8, n, self.N + n)
        else:
            n = row
            live = n < self.N
        return gl.load(self.bias + n, mask=live, other=0.0).to(gl.float32)


@gluon.jit
def _silu_mul(acc):
    """Sums of gate and up rows by turns [rows, tokens] -> silu(gate) * up [rows / 2, tokens].

    A thread holds both factors: rows r and r + 8 of 16.
    """
    rows: gl.constexpr = acc.shape[0]
    tokens: gl.constexpr = acc.shape[1]
    pairs = acc.reshape([rows // 16, 2, 8, tokens]).permute([0, 2, 3, 1])
    gate, up = gl.split(pairs)
    return (gate / (1 + gl.exp(-gate)) * up).reshape([rows // 2, tokens])


@gluon.jit
def finish_tile(acc, tile, c: gl.constexpr, work, out):
    """Store consumer c's part of a tile, or leave it for the last of the blocks that share it."""
    tile_m, block = work.place(tile)
    row0 = (block * out.CONSUMERS + c) * out.ROWS
    if work.OWNED:
        if tile < work.whole:
            out.store(acc, tile_m, row0)
        else:
            _finish_owned(acc, tile, c, work, out, tile_m, row0)
    else:
        _finish_shared(acc, tile, c, work, out, tile_m, row0)


@gluon.jit
def _finish_shared(acc, tile, c: gl.constexpr, work, out, tile_m, row0):
    begin = (tile - work.whole) * work.steps
    first = work.block_of(begin)
    last = work.block_of(begin + work.steps - 1)
    if (tile < work.whole) | (first == last):
        out.store(acc, tile_m, row0)
    else:
        flat = _flatten(acc)
        SIZE: gl.constexpr = flat.shape[0]
        LAYOUT: gl.constexpr = flat.type.layout
        at = c * SIZE + gl.arange(0, SIZE, layout=LAYOUT)
        SLOT: gl.constexpr = out.CONSUMERS * SIZE
        # A block has two slots: for the tile that its part begins in, and for the one it ends in.
        slot = work.pid * 2 + (work.start(work.pid) < begin).to(gl.int32)
        gl.store(out.partial + slot.to(gl.int64) * SLOT + at, flat)
        barrier()
        counter = out.arrived + (tile - work.whole) * out.CONSUMERS + c
        arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == last - first:
            # Past the L1 cache, which does not see what other multiprocessors wrote.
            slot = first * 2 + (work.start(first) < begin).to(gl.int32)
            total = gl.load(out.partial + slot.to(gl.int64) * SLOT + at, cache_modifier=".cg")
            others = out.partial + (first + 1).to(gl.int64) * (2 * SLOT) + at
            count = last - first
            if out.TOGETHER == 1:
                for _ in range(count):
                    total += gl.load(others, cache_modifier=".cg")
                    others += 2 * SLOT
            else:
                for i in range(0, count, out.TOGETHER):
                    total = _add_together(total, others, at, count - i, 2 * SLOT, out.TOGETHER)
                    others += out.TOGETHER * 2 * SLOT
            out.store(_unflatten(total, acc), tile_m, row0)
            gl.store(counter, 0)


@gluon.jit
def _finish_owned(acc, tile, c: gl.constexpr, work, out, tile_m, row0):
    flat = _flatten(acc)
    SIZE: gl.constexpr = flat.shape[0]
    at = c * SIZE + gl.arange(0, SIZE, layout=flat.type.layout)
    SLOT: gl.constexpr = out.CONSUMERS * SIZE
    index = tile - work.whole
    first = work.block_of(work.shared_step(tile, work.own))
    helpers = work.block_of(work.shared_step(tile, work.steps - 1)) - first + 1
    # A slot for each helper's part, in the order of the steps, and after those one for each owner.
    theirs = out.partial + (index + first).to(gl.int64) * SLOT + at
    owners = out.partial + (work.blocks + index).to(gl.int64) * SLOT + at
    counter = out.arrived + index * out.CONSUMERS + c
    owns = work.helper() < 0
    arrived = helpers * 0 - 1
    if owns:
        arrived = gl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
    kept = arrived == helpers  # all others have arrived: the owner's sums need not leave
    if not kept:
        mine = out.partial + (index + work.helper()).to(gl.int64) * SLOT + at
        gl.store(gl.where(owns, owners, mine), flat)
        barrier()
        arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == helpers:
        # Past the L1 cache, which does not see what other multiprocessors wrote.
        total = flat
        if not kept:
            total = gl.load(owners, cache_modifier=".cg")
        for _ in range(helpers):
            total += gl.load(theirs, cache_modifier=".cg")
            theirs += SLOT
        out.store(_unflatten(total, acc), tile_m, row0)
        gl.store(counter, 0)


@gluon.jit
def _add_together(total, sums, at, count, APART: gl.constexpr, TOGETHER: gl.constexpr):
    """total + the first `count` of TOGETHER blocks' sums, all loaded before any is added."""
    parts = ()
    for i in gl.static_range(TOGETHER):
        part = _part(sums + i * APART, at, count > i)
        parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(TOGETHER):
        total = total + parts[i]
    return total


@gluon.jit
def _part(sums, at, live):
    """One block's sums, 0 where there is no such block. The mask is made of `at` for its layout."""
    return gl.load(sums, mask=(at >= 0) & live, other=0.0, cache_modifier=".cg")


@gluon.jit
def _flatten(acc):
    """Sums [rows, tokens] in the order in which threads hold them: 16 bytes a thread and access."""
    rows: gl.constexpr = acc.shape[0]
    tokens: gl.constexpr = acc.shape[1]
    # Rows: 64-row block, warp, r3, r; tokens: block of 8, c, pair.
    parts = acc.reshape([rows // 64, 4, 2, 8, tokens // 8, 4, 2])
    return parts.permute([0, 4, 1, 3, 5, 2, 6]).reshape([rows * tokens])


@gluon.jit
def _unflatten(flat, like):
    """The inverse of `_flatten`; `like` has the shape and layout that result."""
    rows: gl.constexpr = like.shape[0]
    tokens: gl.constexpr = like.shape[1]
    parts = flat.reshape([rows // 64, tokens // 8, 4, 8, 4, 2, 2])
    acc = parts.permute([0, 2, 5, 3, 1, 4, 6]).reshape([rows, tokens])
    return gl.convert_layout(acc, like.type.layout, assert_trivial=True)
