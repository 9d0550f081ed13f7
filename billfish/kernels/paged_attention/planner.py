"""The work of attention split on the device, once a step for all layers; that of prefill is listed
by `prefill_items`, that of decode cut into equal parts here.

The KV range of every short request (at most `max_query_len` new tokens) is cut into tiles of
`kv_tile` tokens. Laid end to end, the tiles form one line, which is cut into `num_splits` parts of
equal length; each part is the work of one program of the decode kernel for each KV head. A request
that lies in several parts leaves partial results, which its last program to finish combines in the
order of the parts: the result does not depend on which one that is.

Nothing here waits for the device, and all sizes are fixed when the plan is allocated, so that a
plan may be updated inside a captured CUDA graph.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.errors import KernelArgumentError
from billfish.kernels.gluon_compat import gluon_supported
from billfish.kernels.paged_attention.metadata import FARTHEST, AttentionMetadata
from billfish.kernels.paged_attention.prefill_items import (
    ENTRY,
    INFO,
    ROWS,
    list_programs,
    list_requests,
    list_sizes,
    packed_heads,
    sharers,
)

SEGMENT_CHARGE = 1
"""What the start and end of a request cost a program, in tiles."""

BORDER: tl.constexpr = tl.constexpr(8)
"""Fields of a border, padded: the lengths save the kernel a round trip to memory."""

HOPPER_HEAD_DIMS = (64, 128)

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


@triton.jit
def _split_requests(
    program, seq_lens, query_start, borders, parts, draws, num_requests, max_query_len, window,
    num_splits,
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
    split = program * SPLITS + tl.arange(0, SPLITS)
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
        if program == 0:
            # Part c begins at c * total // used, so the last part that begins at or before x is
            # ((x + 1) * used - 1) // total.
            whole = tl.maximum(total, 1)
            first = ((ends - tiles + 1) * used - 1) // whole
            last = (ends * used - 1) // whole
            tl.store(parts + 2 * r, first.to(tl.int32), mask=r < num_requests)
            tl.store(parts + 2 * r + 1, last.to(tl.int32), mask=r < num_requests)
    if program == 0:
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


_COUNTS = ["num_requests", "num_splits", "num_tokens", "decoded_len", "sharers"]


@triton.jit(do_not_specialize=_COUNTS)
def _plan_kernel(
    seq_lens, query_start, borders, parts, draws, items, num_requests, max_query_len, window,
    num_splits, num_tokens, decoded_len, sharers,
    KV_TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, CHARGE: tl.constexpr, WHOLE: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, LIST: tl.constexpr, SETS: tl.constexpr,
    PACK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FEWEST: tl.constexpr,
    ENTRY: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """The first programs split decode, those after, where LIST, list the items of prefill."""
    program = tl.program_id(0)
    splitters = num_splits // SPLITS + 1
    if program < splitters:
        _split_requests(
            program, seq_lens, query_start, borders, parts, draws, num_requests, max_query_len,
            window, num_splits, KV_TILE, HAS_WINDOW, CHARGE, WHOLE, SPLITS, CHUNK,
        )  # fmt: skip
    elif LIST:
        list_requests(
            program - splitters, seq_lens, query_start, items, num_requests, num_tokens,
            decoded_len, sharers, SETS, PACK, ROWS, KEYS, FEWEST, ENTRY, OWN, CHUNK,
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

    For the Hopper prefill kernel, on M multiprocessors: items int32 [R + 2, 4], see
    `prefill_items.list_items`; draws int32 [1], 0 between launches; split_acc float32 [M, 128, head
    dim], split_sums float32 [M, 2, 128] and split_info int32 [M, 5] for M parts of items.
    """

    borders: Tensor
    parts: Tensor
    acc: Tensor
    sums: Tensor
    arrivals: Tensor
    items: Tensor
    draws: Tensor
    split_acc: Tensor
    split_sums: Tensor
    split_info: Tensor

    def sharers(
        self, num_tokens: int, num_requests: int, max_seq_len: int, decoded_len: int,
        num_heads: int, pack: int, sliding_window: int | None,
    ) -> int:  # fmt: skip
        """Multiprocessors among which a prefill step shares out keys, or 0: the same when a step is
        planned and when it runs. A window bounds the keys of an item, so nothing is split there.
        """
        programs = self.split_acc.shape[0] if sliding_window is None else 0
        sets = num_heads // pack
        return sharers(programs, num_tokens, num_requests, max_seq_len, decoded_len, sets, pack)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """How the work of a step is split; shared by all layers with these heads and window.

    Requests of at most max_query_len new tokens go to the decode kernel, others to prefill, whose
    items are listed on Hopper GPUs. The workspace serves one launch at a time: use one plan a
    stream.

    batch_invariant: no request is split, neither here nor in prefill, so that its result does not
    depend, to the bit, on the requests beside it; a long context then keeps few multiprocessors
    busy.
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
    ) -> "AttentionPlan":
        """A plan for steps of at most max_requests requests; `nbytes` is all it will ever take.

        block_size: of the cache. num_programs: how many programs of the decode kernel share the
        work; by default as many as run at once.
        """
        padded_dim = triton.next_power_of_2(head_dim)
        packed = max_query_len * (num_heads // num_kv_heads)
        device = torch.device(device)
        sms = multiprocessors(device)
        hopper = is_hopper(device)
        if num_programs is None:
            hopper_decodes = hopper and hopper_covers(head_dim, block_size, packed)
            num_programs = sms if hopper_decodes else 2 * sms
        splits_prefill = hopper and head_dim in HOPPER_HEAD_DIMS and not batch_invariant
        shares = sms if splits_prefill else 0
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
            items=torch.empty(max_requests + 2, ENTRY, dtype=torch.int32, device=device),
            draws=torch.zeros(1, dtype=torch.int32, device=device),
            split_acc=torch.empty(shares, ROWS, head_dim, dtype=torch.float32, device=device),
            split_sums=torch.empty(shares, 2, ROWS, dtype=torch.float32, device=device),
            split_info=torch.empty(shares, INFO, dtype=torch.int32, device=device),
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
        """Plan a step, in two small launches.

        Returns the metadata with this plan in place of its like. The metadata must not change after
        that. Raises KernelArgumentError: more requests than the plan was allocated for.
        """
        device = self.workspace.borders.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.split(metadata.seq_lens.contiguous(), metadata.query_start.contiguous(), metadata)
        # No count outlives a step that was broken off. Also, it puts a kernel between this plan
        # and the first decode kernel, which may read the plan before the one ahead has ended.
        self.workspace.arrivals.zero_()
        others = tuple(plan for plan in metadata.plans if not self._is_like(plan))
        return replace(metadata, plans=(*others, self))

    def _is_like(self, other: "AttentionPlan") -> bool:
        def key(plan: AttentionPlan) -> tuple:
            return (plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.sliding_window)

        return key(self) == key(other)

    def split(
        self, seq_lens: Tensor, query_start: Tensor, step: AttentionMetadata | None = None
    ) -> None:
        """Fill `borders` and `parts` for a step's lengths, and `items` if the step has prefill."""
        num_requests, limit = seq_lens.shape[0], self.workspace.parts.shape[0]
        if num_requests > limit:
            raise KernelArgumentError(
                f"metadata: got {num_requests} requests, expected at most {limit}, the plan's"
            )
        workspace = self.workspace
        num_splits = workspace.acc.shape[0]
        programs = num_splits // _SPLITS_AT_ONCE + 1
        num_tokens = decoded_len = sharers = 0
        pack = packed_heads(self.num_heads // self.num_kv_heads)
        lists = False
        if step is not None and step.max_query_len > self.max_query_len:
            lists = True
            programs += list_programs(num_requests)
            num_tokens, longest = step.slot_mapping.shape[0], step.max_query_len
            decoded_len = short_limit(self.max_query_len, num_tokens, num_requests, longest)
            sharers = workspace.sharers(
                num_tokens, num_requests, step.max_seq_len, decoded_len, self.num_heads, pack,
                self.sliding_window,
            )  # fmt: skip
        _plan_kernel[(programs,)](
            seq_lens, query_start, workspace.borders, workspace.parts, workspace.draws,
            workspace.items, num_requests, self.max_query_len,
            min(self.sliding_window or 0, FARTHEST), num_splits, num_tokens, decoded_len, sharers,
            KV_TILE=kv_tile(workspace), HAS_WINDOW=self.sliding_window is not None,
            CHARGE=SEGMENT_CHARGE, WHOLE=self.batch_invariant, SPLITS=_SPLITS_AT_ONCE,
            CHUNK=_REQUESTS_AT_ONCE, LIST=lists, **list_sizes(self.num_heads, pack),
        )  # fmt: skip


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the Gluon kernels for Hopper run on a device with the installed Triton."""
    return (
        gluon_supported()
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for a CPU, where kernels run in the interpreter."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def hopper_covers(head_dim: int, block_size: int, packed_rows: int) -> bool:
    """Whether `hopper_decode` has a kernel for such a cache and so many packed query rows."""
    blocks = block_size in (8, 16, 32) or block_size % 64 == 0
    return head_dim in HOPPER_HEAD_DIMS and blocks and packed_rows <= 16


def short_limit(decode_len: int, num_tokens: int, num_requests: int, max_query_len: int) -> int:
    """Most new tokens of requests that are decoded: decode_len, or 0 for none at all where all
    requests have as many, and more than that.
    """
    all_long = max_query_len > decode_len and num_tokens == num_requests * max_query_len
    return 0 if all_long else decode_len


def kv_tile(workspace: Workspace) -> int:
    """Keys a tile: 16 KB of K whatever the head dim, up to 64 keys."""
    return 64 if workspace.acc.shape[-1] <= 128 else 32


def _round_splits(splits: int) -> int:
    """Down to a power of two where that idles under 7%: common batches then split evenly."""
    power = 1 << (splits.bit_length() - 1)
    return power if power >= 0.93 * splits else splits
