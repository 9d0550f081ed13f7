"""Which blocks hold the KV of which request: found, forked, extended, copied, swapped, given up.

A block is written by one sequence only. Others may share what is written and will not change: full
blocks, from the prefix cache, and the blocks of the sample that they were forked from, the last and
partly filled one included. Whoever writes to a shared block first gets a copy of it
(copy-on-write), and once nobody shares it any more, its last owner writes in place.
"""

from collections.abc import Iterable
from itertools import chain

from billfish.config import SchedulerConfig
from billfish.engine.block_pool import BlockPool
from billfish.engine.plan import BlockPairs, StepPlan
from billfish.engine.prefix_cache import CachedBlock, PrefixCache
from billfish.engine.request import Request

Pair = tuple[int, int]


class BlockManager:
    """The KV blocks of all live requests, and the copies of blocks that the next plan must bring.

    pool: blocks of the KV cache. prefix_cache: finds those of other requests; None: nothing is ever
    found. host: blocks of host memory; None: nothing is swapped. config: when to swap.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        prefix_cache: PrefixCache | None = None,
        host: BlockPool | None = None,
    ) -> None:
        self.preemption, self.swap_cost = config.preemption, config.swap_cost
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.host = host
        self.num_copies = 0
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self._swap_out: list[Pair] = []
        self._copies: list[Pair] = []
        self._swap_in: list[Pair] = []

    def take_moves(self) -> tuple[BlockPairs, BlockPairs, BlockPairs]:
        """What the plan made now has to swap out, copy and swap in."""
        moves = tuple(self._swap_out), tuple(self._copies), tuple(self._swap_in)
        for pairs in (self._swap_out, self._copies, self._swap_in):
            pairs.clear()
        return moves

    def count(self, plan: StepPlan, queries: int, hits: int) -> None:
        """Add what a plan that has succeeded moved and found to the totals."""
        self.num_swapped_out += len(plan.swap_out)
        self.num_copies += len(plan.copies)
        self.num_swapped_in += len(plan.swap_in)
        if self.prefix_cache:
            self.prefix_cache.count(queries, hits)

    def find(self, request: Request) -> list[CachedBlock]:
        """The beginning of a waiting request that the prefix cache holds, in blocks.

        Nothing where the prompt's log-probabilities are still to come: they need all its logits.
        """
        if self.prefix_cache is None or request.needs_prompt_logits:
            return []
        return self.prefix_cache.find(request)

    def cost(self, found: list[CachedBlock], num_tokens: int) -> int:
        """How many available blocks it takes to hold num_tokens tokens, when these are found."""
        counts = self.pool.ref_counts
        in_use = sum(1 for block in found if counts[block.block_id])
        return self.pool.blocks_for(num_tokens) - in_use

    def start(self, request: Request, found: list[CachedBlock]) -> None:
        """Give a waiting request its first blocks: those found, and those that are swapped in.

        At least one token is left to be computed, because the next one is chosen from its logits.
        """
        pool, table = self.pool, request.block_table
        table += (block.block_id for block in found)
        pool.share(table)
        request.num_found_tokens = len(found) * pool.block_size
        request.chain = found
        if self.host and request.host_blocks:
            missing = request.host_blocks[len(found) :]
            targets = pool.allocate(len(missing))
            self._swap_in += zip(missing, targets, strict=True)
            table += targets
            self.forget_swapped(request)
        computed = max(request.num_computed_tokens, request.num_found_tokens)
        request.num_computed_tokens = min(computed, request.num_tokens - 1)

    def fork(self, source: Request, request: Request) -> None:
        """Let another sample begin on the blocks of its source, whose prompt is complete."""
        request.block_table += source.block_table
        self.pool.share(request.block_table)
        request.num_computed_tokens = source.num_computed_tokens
        request.num_found_tokens = source.num_computed_tokens
        request.digests = source.digests[:]
        request.chain = source.chain[:]

    def lacks(self, request: Request, num_tokens: int) -> int:
        """How many more blocks a running request needs to hold num_tokens tokens."""
        pool = self.pool
        count = -(-num_tokens // pool.block_size) - len(request.block_table)
        return count + 1 if pool.shares and self.must_copy(request) else count

    def must_copy(self, request: Request) -> bool:
        """Whether the next token that the request writes falls into a block that others share."""
        table = request.block_table
        room = len(table) * self.pool.block_size
        # What was found is not written again, though the last token of it may be computed.
        return (
            request.num_computed_tokens < room > request.num_found_tokens
            and self.pool.ref_counts[table[-1]] > 1
        )

    def extend(self, request: Request, count: int) -> tuple[tuple[int, ...], bool]:
        """Give the request the blocks that it lacks; whether the first replaces its last one."""
        replaces = self.must_copy(request)
        block_ids = self.pool.allocate(count)
        if replaces:
            shared = request.block_table.pop()
            self._copies.append((shared, block_ids[0]))
            self.pool.free([shared])
        request.block_table += block_ids
        return tuple(block_ids), replaces

    def give_up(self, request: Request) -> None:
        """Take all blocks of a running request; what is computed is lost, or left to be found."""
        # Last block first: the beginning of a sequence is what others are likeliest to share.
        self.pool.free(request.block_table[::-1])
        request.block_table.clear()
        request.num_computed_tokens = request.num_found_tokens = 0
        request.chain = []

    def should_swap(self, request: Request) -> bool:
        """Whether a request that has to give way goes to host memory, or is computed again."""
        host, pool, computed = self.host, self.pool, request.num_computed_tokens
        if host is None or not computed or pool.blocks_for(computed) > host.available:
            return False
        if self.preemption != "auto":
            return self.preemption == "swap"
        if self.swap_cost is None:
            return False
        # What others hold too will be found again, and need not be computed.
        shared = sum(1 for block in request.block_table if pool.ref_counts[block] > 1)
        if request.needs_prompt_logits or self.prefix_cache is None:  # nothing will be found
            shared = 0
        return computed * self.swap_cost < computed - shared * pool.block_size

    def swap_out(self, request: Request) -> None:
        """Take all blocks of a running request, and copy what is computed to host memory first."""
        if self.host is None:
            return
        computed = request.num_computed_tokens
        request.host_blocks = self.host.allocate(self.pool.blocks_for(computed))
        self._swap_out += zip(request.block_table, request.host_blocks, strict=False)
        self.give_up(request)
        request.num_computed_tokens = computed

    def forget_swapped(self, request: Request) -> None:
        """Free the host blocks of a request."""
        if self.host:
            self.host.free(request.host_blocks)
            request.host_blocks.clear()

    def register(self, computed: Iterable[tuple[Request, int]]) -> None:
        """Let others find the first tokens, so many, of each request: the plans that compute them
        have succeeded. Passes over those that have lost their blocks since."""
        if self.prefix_cache is None:
            return
        size = self.pool.block_size
        for request, end in computed:
            held = min(request.num_computed_tokens, len(request.block_table) * size)
            if end // size > len(request.chain) and end <= held:
                self.prefix_cache.register(request, end)

    def distrust(self, request: Request) -> None:
        """Let nobody find what this request has computed, or found: it led to no logits."""
        if self.prefix_cache is not None:
            self.prefix_cache.forget(request)

    def slots_used(self, running: list[Request]) -> int:
        """KV slots in use that hold a token, or will once the plans made so far have run."""
        size = self.pool.block_size
        # Only the last block of a table is ever partly empty; forks may share it.
        empty = {
            request.block_table[-1]: len(request.block_table) * size - request.num_computed_tokens
            for request in running
            if request.block_table
        }
        return self.pool.in_use * size - sum(empty.values())

    def check(self, running: Iterable[Request], waiting: Iterable[Request], *, every: bool) -> None:
        """InvariantError unless both pools agree with what all live requests hold.

        every: compare block by block, not only their numbers.
        """
        requests = list(chain(running, waiting))
        for pool, tables in (
            (self.pool, [request.block_table for request in requests]),
            (self.host, [request.host_blocks for request in requests]),
        ):
            if pool is not None:
                pool.check(tables) if every else pool.check_numbers(tables)
