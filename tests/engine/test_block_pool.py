import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from billfish.engine.block_pool import BlockPool
from billfish.engine.plan import NULL_BLOCK
from billfish.errors import ConfigError, InvariantError


class PoolMachine(RuleBasedStateMachine):
    """The pool against the obvious model: queues of free and cached ids, and a list of holdings."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 9
        self.pool = BlockPool(self.total, 4)
        self.free = list(range(1, self.total + 1))
        self.cached: list[int] = []
        self.kept: set[int] = set()
        self.held: list[list[int]] = []
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.append

    def in_use(self) -> list[int]:
        return sorted({block for holding in self.held for block in holding})

    @rule(count=st.integers(0, 11))
    def allocate(self, count: int) -> None:
        available = self.free + self.cached
        if count > len(available):
            with pytest.raises(InvariantError, match=f"{count} .* {len(available)} are available"):
                self.pool.allocate(count)
            return
        gone = self.cached[: max(0, count - len(self.free))]
        self.evicted.clear()
        self.held.append(available[:count])
        assert self.pool.allocate(count) == available[:count]
        assert self.evicted == gone
        self.free, self.cached = self.free[count:], self.cached[len(gone) :]
        self.kept.difference_update(gone)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        holding = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        order = data.draw(st.permutations(holding))
        self.pool.free(order)
        for block in order:
            if block not in self.in_use():
                (self.cached if block in self.kept else self.free).append(block)

    @precondition(lambda self: self.held or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A fork, or a hit: blocks in use, cached ones, or both."""
        known = st.sampled_from([*self.in_use(), *self.cached] or [NULL_BLOCK])
        blocks = data.draw(st.lists(known, max_size=4, unique=True))
        blocks = [block for block in blocks if block != NULL_BLOCK]
        self.pool.share(blocks)
        self.cached = [block for block in self.cached if block not in blocks]
        self.held.append(blocks)

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.in_use()))
        self.pool.keep(block)
        self.kept.add(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.drop(block)
        self.kept.remove(block)
        if block in self.cached:
            self.cached.remove(block)
            self.free.append(block)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def what_is_free_cannot_be_freed_shared_or_kept(self, data: st.DataObject) -> None:
        mine = self.in_use()
        wrong = data.draw(st.sampled_from([*self.free, NULL_BLOCK, -1, self.total + 1]))
        for refused in (self.pool.free, self.pool.share):
            with pytest.raises(InvariantError, match=str(wrong)):
                refused([*mine, wrong])
        with pytest.raises(InvariantError, match=str(wrong)):
            self.pool.keep(wrong)

    @invariant()
    def agrees_with_the_model(self) -> None:
        pool = self.pool
        assert (pool.num_free, pool.num_cached) == (len(self.free), len(self.cached))
        assert pool.num_free + pool.num_cached + pool.in_use == self.total
        assert pool.in_use == len(self.in_use())
        pool.check(self.held)


PoolMachine.TestCase.settings = settings(
    derandomize=True, max_examples=100, stateful_step_count=40, deadline=None
)
TestPoolMachine = PoolMachine.TestCase


def test_least_recently_freed_comes_first() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.free([3])
    pool.free([2, 1])
    assert pool.allocate(2) == [3, 2]


def test_free_blocks_come_before_cached_ones() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(4)
    for block in (1, 2):
        pool.keep(block)
    pool.free([2, 1, 3, 4])
    pool.share([2])
    pool.free([2])  # used more recently than 1 now
    assert (pool.num_free, pool.num_cached) == (2, 2)
    assert pool.allocate(4) == [3, 4, 1, 2]


def test_a_refused_free_changes_nothing() -> None:
    pool = BlockPool(4, 16)
    held = pool.allocate(3)
    with pytest.raises(InvariantError, match="block 1 is freed but nothing refers to it"):
        pool.free([1, 2, 1])
    with pytest.raises(InvariantError, match=r"block 5 .* 1\.\.4"):
        pool.free([2, 5])
    pool.check([held])


def test_negative_count_is_refused() -> None:
    with pytest.raises(InvariantError, match="-1"):
        BlockPool(4, 16).allocate(-1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 16)])
def test_sizes_are_checked(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError):
        BlockPool(num_blocks, block_size)


def _leak(pool: BlockPool) -> None:
    pool._free.popleft()


def _free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def _free_while_held(pool: BlockPool) -> None:
    pool._free.append(1)


def _free_null(pool: BlockPool) -> None:
    pool._free.append(NULL_BLOCK)


def _cache_without_keeping(pool: BlockPool) -> None:
    pool._cached[pool._free.popleft()] = None


def _cache_while_held(pool: BlockPool) -> None:
    pool.keep(1)
    pool._cached[1] = None


def _keep_what_is_free(pool: BlockPool) -> None:
    pool._kept.add(pool._free[0])


def _miscount(pool: BlockPool) -> None:
    pool.ref_counts[2] += 1


@pytest.mark.parametrize(
    "damage",
    [
        _leak, _free_twice, _free_while_held, _free_null, _cache_without_keeping,
        _cache_while_held, _keep_what_is_free, _miscount,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_check_sees_damage(damage) -> None:
    pool = BlockPool(6, 16)
    held = pool.allocate(2)
    assert held == [1, 2]
    pool.check([held])
    damage(pool)
    with pytest.raises(InvariantError):
        pool.check([held])


def test_check_compares_with_the_block_tables() -> None:
    pool = BlockPool(6, 16)
    held = pool.allocate(2)
    for tables in ([], [[1]], [held, held], [[0, 1, 2]], [[1, 2, 7]]):
        with pytest.raises(InvariantError):
            pool.check(tables)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(1),
        lambda pool: pool.allocate(1),
        lambda pool: pool.share([1]),
    ],
)
def test_numbers_are_checked_without_looking_at_blocks(spoil):
    pool = BlockPool(10, 4)
    table = pool.allocate(3)
    pool.share(table[:1])
    tables = [table, table[:1]]
    pool.check_numbers(tables)
    pool.check(tables)
    spoil(pool)
    with pytest.raises(InvariantError):
        pool.check_numbers(tables)


def test_numbers_follow_blocks_that_are_cached_and_found_again():
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    pool.keep(table[0])
    pool.free(table)
    pool.check_numbers([])
    pool.share(table[:1])
    pool.check_numbers([table[:1]])
    pool.check([table[:1]])
    with pytest.raises(InvariantError):
        pool.free([table[0], table[0]])
    pool.check([table[:1]])
