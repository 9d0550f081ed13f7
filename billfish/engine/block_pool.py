"""Who holds which KV block: a free list and reference counts over fixed-size blocks."""

from collections import deque
from collections.abc import Iterable, Sequence

from billfish.engine.plan import NULL_BLOCK
from billfish.errors import BillfishError, ConfigError


class InvariantError(BillfishError):
    """The engine's books do not balance: a defect of Billfish, never of a request."""


class BlockPool:
    """Blocks 1..num_blocks, each free or referenced; block 0 is the null block and always neither.

    Blocks are handed out in least recently freed order, so that what a block held stays in the
    cache for as long as possible. Allocating and freeing cost O(1) a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks: usable blocks. block_size: tokens a block holds. ConfigError below 1."""
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._ref_counts = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take count blocks, each with one reference.

        InvariantError, and no change, if fewer are free: callers look at num_free first.
        """
        if not 0 <= count <= len(self._free):
            raise InvariantError(f"{count} blocks are wanted and {len(self._free)} are free")
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block; those without any become free, in this order.

        InvariantError, and no change, if a block is foreign, the null block, free already, or
        given more often than it is referenced.
        """
        freed = []
        for position, block_id in enumerate(block_ids):
            if not NULL_BLOCK < block_id <= self.num_blocks:
                self._undo(block_ids[:position])
                raise InvariantError(
                    f"block {block_id} is not of this pool, which has blocks 1..{self.num_blocks}"
                )
            if not self._ref_counts[block_id]:
                self._undo(block_ids[:position])
                raise InvariantError(f"block {block_id} is freed but nothing refers to it")
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                freed.append(block_id)
        self._free.extend(freed)

    def _undo(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._ref_counts[block_id] += 1

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Compare the books with the block tables of all live requests. O(num_blocks).

        InvariantError unless free + in use == total, no block is both, every reference count is the
        number of tables that hold the block, and the null block is untouched.
        """
        references = [0] * (self.num_blocks + 1)
        for table in block_tables:
            for block_id in table:
                if not NULL_BLOCK < block_id <= self.num_blocks:
                    raise InvariantError(f"a block table holds {block_id}, not a block of the pool")
                references[block_id] += 1
        if references != self._ref_counts:
            wrong = [
                f"block {block_id}: {count} counted, {held} held"
                for block_id, (count, held) in enumerate(
                    zip(self._ref_counts, references, strict=True)
                )
                if count != held
            ]
            raise InvariantError("reference counts are wrong: " + "; ".join(wrong[:5]))
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a block is in the free list twice")
        if NULL_BLOCK in free:
            raise InvariantError("the null block is in the free list")
        if any(map(references.__getitem__, free)):
            raise InvariantError("a block is both free and in use")
        in_use = self.num_blocks - references[1:].count(0)
        if len(free) + in_use != self.num_blocks:
            raise InvariantError(f"{len(free)} free + {in_use} in use != {self.num_blocks} blocks")
