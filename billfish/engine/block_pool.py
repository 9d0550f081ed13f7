"""Who holds which KV block: reference counts, a free list, and blocks kept for their content."""

import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from billfish.engine.plan import NULL_BLOCK
from billfish.errors import ConfigError, InvariantError

MAX_GROUPS = 2**16 - 2
"""Groups of blocks, by their holders, that a map of the blocks tells apart."""
MAX_HOLDERS = 256
"""Holders of a block that it names."""

Group = tuple[int, tuple[int, ...]]
"""A reference count, and indexes of block tables."""


def _ignore(block_id: int) -> None:
    pass


class BlockPool:
    """Blocks 1..num_blocks, each free, cached or in use; block 0 is the null block and never any.

    A block in use has references. Without any it is cached if its content was said to be worth
    keeping, else free. Both can be allocated: free ones first, then cached ones, least recently
    used first, so that what a block holds stays for as long as possible. Allocating, sharing and
    freeing cost O(1) a block.

    on_evict: called with the id of each cached block that is allocated for something else.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks: usable blocks. block_size: tokens a block holds. ConfigError below 1."""
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] = _ignore
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self.ref_counts = [0] * (num_blocks + 1)
        self._references = 0  # the sum of the counts
        self._referenced = 0  # how many are not 0

    @property
    def num_free(self) -> int:
        """Blocks with nothing worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nothing refers to, kept for their content."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def in_use(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def references(self) -> int:
        """The sum of all reference counts: blocks in all tables, those shared counted each time."""
        return self._references

    @property
    def shares(self) -> bool:
        """Whether any block has more than one reference."""
        return self._references > self._referenced

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take count blocks, each with one reference.

        InvariantError, and no change, if fewer are available: callers look first.
        """
        if not 0 <= count <= self.available:
            raise InvariantError(f"{count} blocks are wanted and {self.available} are available")
        block_ids = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        while len(block_ids) < count:
            block_id, _ = self._cached.popitem(last=False)
            self._kept.remove(block_id)
            self.on_evict(block_id)
            block_ids.append(block_id)
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        self._references += count
        self._referenced += count
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block, in use or cached.

        InvariantError, and no change, if one is free, foreign or the null block.
        """
        for block_id in block_ids:
            self._check_own(block_id)
            if not self.ref_counts[block_id] and block_id not in self._cached:
                raise InvariantError(f"block {block_id} is shared but nothing is in it")
        for block_id in block_ids:
            if not self.ref_counts[block_id]:
                del self._cached[block_id]
                self._referenced += 1
            self.ref_counts[block_id] += 1
        self._references += len(block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block; those without any are free or cached, in this order.

        InvariantError, and no change, if a block is foreign, the null block, free already, or
        given more often than it is referenced.
        """
        released = []
        for position, block_id in enumerate(block_ids):
            if not NULL_BLOCK < block_id <= self.num_blocks or not self.ref_counts[block_id]:
                for undone in block_ids[:position]:
                    self.ref_counts[undone] += 1
                self._check_own(block_id)
                raise InvariantError(f"block {block_id} is freed but nothing refers to it")
            self.ref_counts[block_id] -= 1
            if not self.ref_counts[block_id]:
                released.append(block_id)
        self._references -= len(block_ids)
        self._referenced -= len(released)
        for block_id in released:
            if block_id in self._kept:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def keep(self, block_id: int) -> None:
        """Say that the content of a block in use is worth keeping. InvariantError if not in use."""
        self._check_own(block_id)
        if not self.ref_counts[block_id]:
            raise InvariantError(f"block {block_id} is kept but nothing refers to it")
        self._kept.add(block_id)

    def drop(self, block_id: int) -> None:
        """Say that the content of a kept block is worth nothing any more."""
        self._kept.remove(block_id)
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def map(self, block_tables: Sequence[Sequence[int]]) -> tuple[bytes, tuple[Group, ...]]:
        """The codes and groups of a BlockMap, whose requests hold these tables."""
        codes = array("H", bytes(2 * (self.num_blocks + 1)))
        for block_id in self._cached:
            codes[block_id] = 1
        groups: dict[Group, int] = {}
        shared: dict[int, list[int]] = {}
        for index, table in enumerate(block_tables):
            own = None  # most blocks are held once, and have one group a table
            for block_id in table:
                if self.ref_counts[block_id] > 1:
                    shared.setdefault(block_id, []).append(index)
                    continue
                if own is None:
                    own = groups.setdefault((1, (index,)), len(groups))
                codes[block_id] = 2 + min(own, MAX_GROUPS - 1)
        for block_id, holders in shared.items():
            group = (self.ref_counts[block_id], tuple(holders[:MAX_HOLDERS]))
            codes[block_id] = 2 + min(groups.setdefault(group, len(groups)), MAX_GROUPS - 1)
        if sys.byteorder == "big":
            codes.byteswap()
        return codes[1:].tobytes(), tuple(groups)[:MAX_GROUPS]

    def _check_own(self, block_id: int) -> None:
        if not NULL_BLOCK < block_id <= self.num_blocks:
            raise InvariantError(
                f"block {block_id} is not of this pool, which has blocks 1..{self.num_blocks}"
            )

    def check_numbers(self, block_tables: Iterable[Sequence[int]]) -> None:
        """The part of `check` that costs nothing: InvariantError unless free + cached + in use ==
        total and there are as many references as places in the block tables."""
        free, cached, in_use = len(self._free), len(self._cached), self._referenced
        if free + cached + in_use != self.num_blocks:
            raise InvariantError(
                f"{free} free + {cached} cached + {in_use} in use != {self.num_blocks} blocks"
            )
        held = sum(map(len, block_tables))
        if held != self._references:
            raise InvariantError(
                f"block tables hold {held} blocks, and {self._references} references are counted"
            )

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Compare the books with the block tables of all live requests. O(num_blocks).

        InvariantError unless free + cached + in use == total, no block is two of them, every
        reference count is the number of tables that hold the block, and the null block is
        untouched.
        """
        block_tables = list(block_tables)
        references = [0] * (self.num_blocks + 1)
        for table in block_tables:
            for block_id in table:
                if not NULL_BLOCK < block_id <= self.num_blocks:
                    raise InvariantError(f"a block table holds {block_id}, not a block of the pool")
                references[block_id] += 1
        if references != self.ref_counts:
            wrong = [
                f"block {block_id}: {count} counted, {held} held"
                for block_id, (count, held) in enumerate(
                    zip(self.ref_counts, references, strict=True)
                )
                if count != held
            ]
            raise InvariantError("reference counts are wrong: " + "; ".join(wrong[:5]))
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            raise InvariantError("a block is in the free list twice")
        if NULL_BLOCK in free | cached:
            raise InvariantError("the null block is in the free list")
        if any(map(references.__getitem__, free | cached)) or free & cached:
            raise InvariantError("a block is in two of free, cached and in use")
        if not cached <= self._kept or free & self._kept:
            raise InvariantError("a free block is kept, or a cached one is not")
        if self.num_blocks - references[1:].count(0) != self._referenced:
            raise InvariantError(f"{self._referenced} blocks in use are counted, and others are")
        self.check_numbers(block_tables)
