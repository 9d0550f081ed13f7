from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from billfish.engine.block_pool import BlockPool, InvariantError
from billfish.engine.plan import NULL_BLOCK
from billfish.errors import ConfigError


class PoolMachine(RuleBasedStateMachine):
    """The pool against the obvious model: a queue of free ids and a list of holdings."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 9
        self.pool = BlockPool(self.total, 4)
        self.free = deque(range(1, self.total + 1))
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 11))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(InvariantError, match=f"{count} .* {len(self.free)} are free"):
                self.pool.allocate(count)
        else:
            self.held.append([self.free.popleft() for _ in range(count)])
            assert self.pool.allocate(count) == self.held[-1]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        holding = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        order = data.draw(st.permutations(holding))
        self.pool.free(order)
        self.free.extend(order)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def free_what_is_free(self, data: st.DataObject) -> None:
        mine = [block for holding in self.held for block in holding]
        wrong = data.draw(st.sampled_from([*self.free, NULL_BLOCK, -1, self.total + 1]))
        with pytest.raises(InvariantError, match=str(wrong)):
            self.pool.free([*mine, wrong])

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert self.pool.in_use == self.total - len(self.free)
        self.pool.check(self.held)


PoolMachine.TestCase.settings = settings(
    derandomize=True, max_examples=60, stateful_step_count=30, deadline=None
)
TestPoolMachine = PoolMachine.TestCase


def test_least_recently_freed_comes_first() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.free([3])
    pool.free([2, 1])
    assert pool.allocate(2) == [3, 2]


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


def _miscount(pool: BlockPool) -> None:
    pool._ref_counts[2] += 1


@pytest.mark.parametrize(
    "damage",
    [_leak, _free_twice, _free_while_held, _free_null, _miscount],
    ids=lambda f: f.__name__,
)
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
