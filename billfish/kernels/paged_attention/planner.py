"""Decode work split into equal parts on the device, once a step for all layers.

The KV range of every short request (at most `max_query_len` new tokens) is cut into tiles of
`kv_tile` tokens. Laid end to end, the tiles form one line, which is cut into `num_splits` parts of
equal length; each part is the work of one program of the decode kernel for each KV head. A request
that lies in several parts leaves partial results, which its last program to finish combines in the
order of the parts: the result does not depend on which one that is.

Nothing here waits for the device, and all sizes are fixed when the plan is allocated, so that a
plan may be updated inside a captured CUDA graph.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.errors import KernelArgumentError
from billfish.kernels.gluon_compat import gluon_supported
from billfish.kernels.paged_attention.metadata import AttentionMetadata

SEGMENT_CHARGE = 4
"""What the start and end of a request cost a program, in tiles."""

BORDER: tl.constexpr = tl.constexpr(8)
"""Fields of a border, padded: the lengths save the kernel a round trip to memory."""

PREFILL_ROWS = 128
"""Packed query rows of an item of the Hopper prefill kernel."""

_SPLITS_AT_ONCE = 8
_REQUESTS_AT_ONCE = 256


@triton.jit
def request_tiles(
    seq_lens, query_start, r, num_requests, max_query_len, window, KV_TILE, HAS_WINDOW: tl.constexpr
):
    """Tiles of each request, 0 for those that are not decoded here, else at least 1."""
    inside = r < num_requests
    kv_len = tl.load(seq_lens + r, mask=inside, other=0)
    start = tl.load(query_start + r, mask=inside, other=0)
    query_len = tl.load(query_start + r + 1, mask=inside, other=0) - start
    first = first_tile(kv_len, query_len, window, KV_TILE, HAS_WINDOW)
    tiles = tl.maximum((kv_len + KV_TILE - 1) // KV_TILE - first, 1)
    return tl.where((query_len > 0) & (query_len <= max_query_len), tiles, 0)


@triton.jit
def first_tile(kv_len, query_len, window, KV_TILE, HAS_WINDOW: tl.constexpr):
    """The first tile that any query of a request sees."""
    if HAS_WINDOW:
        return tl.maximum(kv_len - query_len + 1 - window, 0) // KV_TILE
    else:
        return kv_len * 0


@triton.jit(do_not_specialize=["num_requests", "num_splits"])
def _plan_kernel(
    seq_lens, query_start, borders, parts, draws, num_requests, max_query_len, window, num_splits,
    KV_TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, CHARGE: tl.constexpr, WHOLE: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """borders[c] = (request, tile, KV length, first and last + 1 new token of that request, ...)
    where part c begins; parts[r] = (first, last) part of request r.

    Every program repeats the prefix sums, which are short, rather than wait for another.
    """
    total = 0
    active = 0
    for start in range(0, num_requests, CHUNK):
        r = start + tl.arange(0, CHUNK)
        tiles = request_tiles(
            seq_lens, query_start, r, num_requests, max_query_len, window, KV_TILE, HAS_WINDOW
        )
        total += tl.sum(tiles, 0)
        active += tl.sum((tiles > 0).to(tl.int32), 0)
    # A charge pays off only where programs handle several requests each.
    charge = tl.where(active > num_splits, CHARGE, 0)
    total = (total + active * charge).to(tl.int64)
    # More parts than units would leave empty parts between full ones.
    used = tl.minimum(total, num_splits)
    split = tl.program_id(0) * SPLITS + tl.arange(0, SPLITS)
    at = tl.minimum(split, used) * total // tl.maximum(used, 1)
    request = tl.zeros([SPLITS], tl.int32)
    before = tl.zeros([SPLITS], tl.int64)
    done = total * 0
    for start in range(0, num_requests, CHUNK):
        r = start + tl.arange(0, CHUNK)
        tiles = request_tiles(
            seq_lens, query_start, r, num_requests, max_query_len, window, KV_TILE, HAS_WINDOW
        )
        cost = tl.where(tiles > 0, tiles + charge, 0).to(tl.int64)
        ends = done + tl.cumsum(cost, 0)
        passed = (ends[None, :] <= at[:, None]) & (r < num_requests)[None, :]
        request += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        done += tl.sum(cost, 0)
        if tl.program_id(0) == 0:
            # Part c begins at c * total // used, so the last part that begins at or before x is
            # ((x + 1) * used - 1) // total.
            whole = tl.maximum(total, 1)
            first = ((ends - tiles + 1) * used - 1) // whole
            last = (ends * used - 1) // whole
            tl.store(parts + 2 * r, first.to(tl.int32), mask=r < num_requests)
            tl.store(parts + 2 * r + 1, last.to(tl.int32), mask=r < num_requests)
    if tl.program_id(0) == 0:
        tl.store(draws, 0)
    tile = tl.maximum(at - before - charge, 0)
    if WHOLE:
        tile = tile * 0  # each request in the part that it lies in
    tile = tl.where(request < num_requests, tile, 0)
    border = borders + BORDER * split
    real = (split <= num_splits) & (request < num_requests)
    kv_len = tl.load(seq_lens + request, mask=real, other=0)
    begin = tl.load(query_start + request, mask=real, other=0)
    end = tl.load(query_start + request + 1, mask=real, other=0)
    tl.store(border, request, mask=split <= num_splits)
    tl.store(border + 1, tile.to(tl.int32), mask=split <= num_splits)
    tl.store(border + 2, kv_len, mask=split <= num_splits)
    tl.store(border + 3, begin, mask=split <= num_splits)
    tl.store(border + 4, end, mask=split <= num_splits)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "decoded_len"])
def _order_kernel(
    seq_lens, query_start, order, num_requests, num_tokens, decoded_len,
    PACK: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """order[r]: how many blocks of ROWS packed rows the requests with more KV than r have, for
    r <= num_requests; the last stands for tokens of no request. order[num_requests + 1]: all.
    """
    mine = tl.program_id(0) * OWN + tl.arange(0, OWN)
    my_len = tl.load(seq_lens + mine, mask=mine < num_requests, other=-1)
    before = tl.zeros([OWN], tl.int32)
    total = 0
    for start in range(0, num_requests + 1, CHUNK):
        r = start + tl.arange(0, CHUNK)
        real = r < num_requests
        kv_len = tl.load(seq_lens + r, mask=real, other=-1)
        first = tl.load(query_start + r, mask=r <= num_requests, other=num_tokens)
        query_len = tl.load(query_start + r + 1, mask=real, other=num_tokens) - first
        blocks = (query_len * PACK + ROWS - 1) // ROWS
        blocks = tl.where(real & (query_len <= decoded_len), 0, blocks)
        ahead = (kv_len[None, :] > my_len[:, None]) | (
            (kv_len[None, :] == my_len[:, None]) & (r[None, :] < mine[:, None])
        )
        before += tl.sum(tl.where(ahead, blocks[None, :], 0), 1)
        total += tl.sum(blocks, 0)
    tl.store(order + mine, before, mask=mine <= num_requests)
    if tl.program_id(0) == 0:
        tl.store(order + num_requests + 1, total)


def order_rows(
    seq_lens: Tensor,
    query_start: Tensor,
    num_tokens: int,
    decoded_len: int,
    pack: int,
    rows: int,
    order: Tensor,
) -> None:
    """Fill order int32 [R + 2 or more] for the Hopper prefill kernel: see `_order_kernel`."""
    num_requests = seq_lens.shape[0]
    _order_kernel[(triton.cdiv(num_requests + 1, 8),)](
        seq_lens, query_start, order, num_requests, num_tokens, decoded_len,
        PACK=pack, ROWS=rows, OWN=8, CHUNK=_REQUESTS_AT_ONCE,
    )  # fmt: skip


class Scoring(NamedTuple):
    """What happens to the products of query and key: see `attend`."""

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None


class Workspace(NamedTuple):
    """Device memory of a plan: P parts, R requests, B blocks of ROWS packed query rows.

    borders int32 [P + 1, 8]; parts int32 [R, 2]; acc float32 [P, HKV, B, 2, ROWS, padded head
    dim]; sums float32 [P, HKV, B, 2, 2, ROWS]; arrivals int32 [R, HKV, B], 0 between launches.
    For the Hopper prefill kernel: order int32 [R + 2]; draws int32 [1], 0 between launches.
    """

    borders: Tensor
    parts: Tensor
    acc: Tensor
    sums: Tensor
    arrivals: Tensor
    order: Tensor
    draws: Tensor


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """How the decode work of a step is split; shared by all layers with these heads and window.

    Requests with more than max_query_len new tokens are left to the prefill kernel. The workspace
    serves one launch at a time: use one plan a stream.

    batch_invariant: no request is split, so that its result does not depend, to the bit, on the
    requests beside it; a long context then keeps few multiprocessors busy.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_query_len: int
    sliding_window: int | None
    batch_invariant: bool
    workspace: Workspace

    @classmethod
    def allocate(
        cls,
        *,
        max_requests: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_query_len: int = 1,
        sliding_window: int | None = None,
        batch_invariant: bool = False,
        block_size: int = 16,
        num_programs: int | None = None,
        device: torch.device | str = "cuda",
    ) -> "DecodePlan":
        """A plan for steps of at most max_requests requests; `nbytes` is all it will ever take.

        block_size: of the cache. num_programs: how many programs of the decode kernel share the
        work; by default as many as run at once.
        """
        padded_dim = triton.next_power_of_2(head_dim)
        packed = max_query_len * (num_heads // num_kv_heads)
        if num_programs is None:
            hopper = is_hopper(torch.device(device)) and hopper_covers(head_dim, block_size, packed)
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            num_programs = sms if hopper else 2 * sms
        rows = min(max(triton.next_power_of_2(packed), 16), 64 if padded_dim <= 128 else 32)
        row_blocks = triton.cdiv(packed, rows)
        splits = _round_splits(max(1, num_programs // (num_kv_heads * row_blocks)))
        slots = (splits, num_kv_heads, row_blocks, 2)
        workspace = Workspace(
            borders=torch.empty(splits + 1, BORDER.value, dtype=torch.int32, device=device),
            parts=torch.empty(max_requests, 2, dtype=torch.int32, device=device),
            acc=torch.empty(*slots, rows, padded_dim, dtype=torch.float32, device=device),
            sums=torch.empty(*slots, 2, rows, dtype=torch.float32, device=device),
            arrivals=torch.zeros(
                max_requests, num_kv_heads, row_blocks, dtype=torch.int32, device=device
            ),
            order=torch.empty(max_requests + 2, dtype=torch.int32, device=device),
            draws=torch.zeros(1, dtype=torch.int32, device=device),
        )
        return cls(
            num_heads, num_kv_heads, head_dim, max_query_len, sliding_window, batch_invariant,
            workspace,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Device memory of the plan."""
        return sum(tensor.nbytes for tensor in self.workspace)

    def fits(self, query: Tensor, k_cache: Tensor, sliding_window: int | None) -> bool:
        """Whether this plan is for a layer with such a query and cache."""
        return (
            query.shape[1:] == (self.num_heads, self.head_dim)
            and k_cache.shape[2] == self.num_kv_heads
            and query.device == self.workspace.borders.device
            and sliding_window == self.sliding_window
        )

    def update(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Plan a step, in two or three small launches.

        Returns the metadata with this plan in place of its like. The metadata must not change after
        that. Raises KernelArgumentError: more requests than the plan was allocated for.
        """
        self.split(metadata.seq_lens, metadata.query_start)
        if metadata.max_query_len > self.max_query_len:
            lens, num_tokens = metadata.seq_lens, metadata.slot_mapping.shape[0]
            order_rows(
                lens, metadata.query_start, num_tokens,
                short_limit(self.max_query_len, num_tokens, lens.shape[0], metadata.max_query_len),
                packed_heads(self.num_heads // self.num_kv_heads), PREFILL_ROWS,
                self.workspace.order,
            )  # fmt: skip
        # No count outlives a step that was broken off. Also, it puts a kernel between this plan
        # and the first decode kernel, which may read the plan before the one ahead has ended.
        self.workspace.arrivals.zero_()
        others = tuple(plan for plan in metadata.plans if not self._is_like(plan))
        return replace(metadata, plans=(*others, self))

    def _is_like(self, other: "DecodePlan") -> bool:
        def key(plan: DecodePlan) -> tuple:
            return (plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.sliding_window)

        return key(self) == key(other)

    def split(self, seq_lens: Tensor, query_start: Tensor) -> None:
        """Fill `borders` and `parts` for a step's lengths."""
        num_requests, limit = seq_lens.shape[0], self.workspace.parts.shape[0]
        if num_requests > limit:
            raise KernelArgumentError(
                f"metadata: got {num_requests} requests, expected at most {limit}, the plan's"
            )
        workspace = self.workspace
        num_splits = workspace.acc.shape[0]
        _plan_kernel[(triton.cdiv(num_splits + 1, _SPLITS_AT_ONCE),)](
            seq_lens, query_start, workspace.borders, workspace.parts, workspace.draws,
            num_requests, self.max_query_len, self.sliding_window or 0, num_splits,
            KV_TILE=kv_tile(workspace), HAS_WINDOW=self.sliding_window is not None,
            CHARGE=SEGMENT_CHARGE, WHOLE=self.batch_invariant,
            SPLITS=_SPLITS_AT_ONCE, CHUNK=_REQUESTS_AT_ONCE,
        )  # fmt: skip


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the Gluon kernels for Hopper run on a device with the installed Triton."""
    return gluon_supported() and torch.cuda.get_device_capability(device) == (9, 0)


def hopper_covers(head_dim: int, block_size: int, packed_rows: int) -> bool:
    """Whether `hopper_decode` has a kernel for such a cache and so many packed query rows."""
    blocks = block_size in (8, 16, 32) or block_size % 64 == 0
    return head_dim in (64, 128) and blocks and packed_rows <= 16


def short_limit(decode_len: int, num_tokens: int, num_requests: int, max_query_len: int) -> int:
    """Most new tokens of requests that are decoded: decode_len, or 0 for none at all where all
    requests have as many, and more than that.
    """
    all_long = max_query_len > decode_len and num_tokens == num_requests * max_query_len
    return 0 if all_long else decode_len


def packed_heads(group: int) -> int:
    """How many query heads the Hopper prefill kernel packs as rows of an item."""
    return group if group & (group - 1) == 0 and group <= PREFILL_ROWS // 2 else 1


def kv_tile(workspace: Workspace) -> int:
    """Keys a tile: 16 KB of K whatever the head dim, up to 64 keys."""
    return 64 if workspace.acc.shape[-1] <= 128 else 32


def _round_splits(splits: int) -> int:
    """Down to a power of two where that idles under 7%: common batches then split evenly."""
    power = 1 << (splits.bit_length() - 1)
    return power if power >= 0.93 * splits else splits
