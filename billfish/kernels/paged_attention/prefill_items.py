"""The work of the Hopper prefill kernel, listed on the device once a step for all layers.

The packed query rows of a request (see `tile`) are cut into blocks of ROWS; an item is a block of
them for one set of heads. Where a step has fewer items than the GPU has multiprocessors, as with a
few new tokens over long contexts, the keys of an item are shared out: a request gets the number of
parts that its share of all the work makes up, rounded down, so that there are never more parts than
multiprocessors. Whole prompts are not split, as their first rows see few keys.
"""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 128
"""Packed query rows of an item."""

KEYS = 128
"""Keys of a tile."""

FEWEST_TILES = 6
"""Tiles of a part, at least: below that, combining costs more than it saves."""

ENTRY = 4
"""Integers of a request in the list."""

INFO = 5
"""Integers of a slot that say what a partial result is of: first token, tokens, first head, parts
of the item, and which of them it is."""

_REQUESTS_AT_ONCE = 256
_REQUESTS_A_PROGRAM = 8


@triton.jit
def _row_blocks(
    seq_lens, query_start, r, num_requests, num_tokens, decoded_len,
    PACK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(KV length, row blocks, tiles of the first block, of the last) of requests r; request
    num_requests stands for the tokens of none. No blocks for those that the decode kernel has.
    """
    real = r < num_requests
    kv_len = tl.load(seq_lens + r, mask=real, other=-1)
    begin = tl.load(query_start + r, mask=r <= num_requests, other=num_tokens)
    query_len = tl.load(query_start + r + 1, mask=real, other=num_tokens) - begin
    blocks = (query_len * PACK + ROWS - 1) // ROWS
    blocks = tl.where(real & (query_len <= decoded_len), 0, blocks)
    seen = kv_len - query_len + tl.minimum(query_len, ROWS // PACK)
    first = tl.maximum((seen + KEYS - 1) // KEYS, 1)
    last = tl.maximum((kv_len + KEYS - 1) // KEYS, 1)
    return kv_len, blocks, first, last


@triton.jit
def _parts(first, work, programs, FEWEST: tl.constexpr):
    """Into how many parts the keys of a request's items are split; work: twice the tiles of all."""
    share = first * programs * 2 // tl.maximum(work, 1)
    return tl.maximum(tl.minimum(share, first // FEWEST), 1)


@triton.jit
def list_requests(
    program, seq_lens, query_start, items, num_requests, num_tokens, decoded_len, programs,
    SETS: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    FEWEST: tl.constexpr, ENTRY: tl.constexpr, OWN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """items[r] for r <= num_requests, see `list_items`. Every program repeats the sums."""
    # Names that differ by shape: the compiler takes what a loop assigns again to be carried.
    work = 0
    for start in range(0, num_requests + 1, CHUNK):
        r = start + tl.arange(0, CHUNK)
        _kv_len, blocks, first, last = _row_blocks(
            seq_lens, query_start, r, num_requests, num_tokens, decoded_len, PACK, ROWS, KEYS
        )
        work += tl.sum(blocks * (first + last), 0) * SETS
    mine = program * OWN + tl.arange(0, OWN)
    my_len, _my_blocks, my_first, _my_last = _row_blocks(
        seq_lens, query_start, mine, num_requests, num_tokens, decoded_len, PACK, ROWS, KEYS
    )
    before = tl.zeros([OWN], tl.int32)
    slots = tl.zeros([OWN], tl.int32)
    total = 0
    all_slots = 0
    for start in range(0, num_requests + 1, CHUNK):
        r = start + tl.arange(0, CHUNK)
        kv_len, blocks, first, _last = _row_blocks(
            seq_lens, query_start, r, num_requests, num_tokens, decoded_len, PACK, ROWS, KEYS
        )
        parts = _parts(first, work, programs, FEWEST)
        count = blocks * parts
        ahead = (kv_len[None, :] > my_len[:, None]) | (
            (kv_len[None, :] == my_len[:, None]) & (r[None, :] < mine[:, None])
        )
        before += tl.sum(tl.where(ahead, count[None, :], 0), 1)
        split = ahead & (parts > 1)[None, :]
        slots += tl.sum(tl.where(split, count[None, :] * SETS, 0), 1)
        total += tl.sum(count, 0)
        all_slots += tl.sum(tl.where(parts > 1, count * SETS, 0), 0)
    entry = items + ENTRY * mine
    inside = mine <= num_requests
    tl.store(entry, before, mask=inside)
    tl.store(entry + 1, _parts(my_first, work, programs, FEWEST), mask=inside)
    tl.store(entry + 2, slots, mask=inside)
    if program == 0:
        tl.store(items + ENTRY * (num_requests + 1), total)
        tl.store(items + ENTRY * (num_requests + 1) + 1, all_slots)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "decoded_len", "programs"])
def _list_kernel(
    seq_lens, query_start, items, num_requests, num_tokens, decoded_len, programs,
    SETS: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    FEWEST: tl.constexpr, ENTRY: tl.constexpr, OWN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    list_requests(
        tl.program_id(0), seq_lens, query_start, items, num_requests, num_tokens, decoded_len,
        programs, SETS, PACK, ROWS, KEYS, FEWEST, ENTRY, OWN, CHUNK,
    )  # fmt: skip


def list_items(
    seq_lens: Tensor,
    query_start: Tensor,
    num_tokens: int,
    decoded_len: int,
    num_heads: int,
    pack: int,
    items: Tensor,
    programs: int,
) -> None:
    """Fill items int32 [R + 2 or more, ENTRY] for requests of more than decoded_len new tokens.

    items[r] = (blocks, times their parts, of the requests with more KV than r; parts of each of its
    own; slots for the partial results of those before). r = R stands for tokens of no request;
    items[R + 1] = (all blocks times parts, all slots). pack: heads packed as rows. programs: the
    multiprocessors among which keys are shared out and the most slots, or 0 to split nothing.
    """
    num_requests = seq_lens.shape[0]
    _list_kernel[(list_programs(num_requests),)](
        seq_lens, query_start, items, num_requests, num_tokens, decoded_len, programs,
        **list_sizes(num_heads, pack), CHUNK=_REQUESTS_AT_ONCE,
    )  # fmt: skip


def list_programs(num_requests: int) -> int:
    """How many programs run `list_requests`."""
    return triton.cdiv(num_requests + 1, _REQUESTS_A_PROGRAM)


def list_sizes(num_heads: int, pack: int) -> dict[str, int]:
    """The constants of `list_requests`."""
    return {
        "SETS": num_heads // pack, "PACK": pack, "ROWS": ROWS, "KEYS": KEYS,
        "FEWEST": FEWEST_TILES, "ENTRY": ENTRY, "OWN": _REQUESTS_A_PROGRAM,
    }  # fmt: skip


def sharers(
    programs: int, num_tokens: int, num_requests: int, max_seq_len: int, decoded_len: int,
    sets: int, pack: int,
) -> int:  # fmt: skip
    """`programs` for a step with so few items that some may be split, else 0. From what the host
    knows: it decides about time, not about results.
    """
    # Whoever is prefilled has at least decoded_len tokens beyond the one that all have.
    prefilled = min(num_requests, max(1, (num_tokens - num_requests) // max(decoded_len, 1)))
    tokens = num_tokens - (num_requests - prefilled)
    most_items = (tokens * pack // ROWS + prefilled) * sets
    pays = max_seq_len >= 2 * FEWEST_TILES * KEYS and most_items <= programs
    return programs if pays else 0


def packed_heads(group: int) -> int:
    """How many query heads the Hopper prefill kernel packs as rows of an item."""
    return group if group & (group - 1) == 0 and group <= ROWS // 2 else 1
