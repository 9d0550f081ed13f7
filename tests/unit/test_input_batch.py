"""Plans become tensors: worked out by hand, and rows come back."""

from functools import partial

import pytest
import torch

from billfish.engine.plan import Admission, Fork, StepPlan, Work
from billfish.errors import ConfigError
from billfish.sampling_params import SamplingParams
from billfish.structured_output import StructuredOutput
from billfish.worker.device_batch import DeviceBatch
from billfish.worker.input_batch import InputBatch

PARAMS = SamplingParams()


def admission(request_id: str, *token_ids: int) -> Admission:
    return Admission(request_id, token_ids, len(token_ids), PARAMS, seed=1)


def test_a_mixed_step() -> None:
    """ "a" decodes its 6th token, "b" computes tokens 2 and 3 of 5, "c" its whole prompt of 3."""
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=4)
    batch.apply(
        StepPlan(
            0,
            admitted=(admission("a", 1, 2, 3, 4, 5), admission("b", 11, 12, 13, 14, 15)),
            work=(Work("a", 0, 5, (7, 3), True), Work("b", 0, 2, (9,), False)),
        )
    )
    batch.append("a", 6)
    plan = StepPlan(
        1,
        admitted=(admission("c", 21, 22, 23),),
        work=(
            Work("a", 5, 1, (), True),
            Work("b", 2, 2, (), False),
            Work("c", 0, 3, (5,), True),
        ),
    )
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs.token_ids.tolist() == [6, 13, 14, 21, 22, 23]
    assert inputs.positions.tolist() == [5, 2, 3, 0, 1, 2]
    assert inputs.sampled == ("a", "c")
    assert inputs.sample_index.tolist() == [0, 5]
    metadata = inputs.metadata
    assert metadata.seq_lens.tolist() == [6, 4, 3]
    assert metadata.query_start.tolist() == [0, 1, 3, 6]
    assert metadata.block_table[:, :2].tolist()[0] == [7, 3]
    assert [row[0] for row in metadata.block_table.tolist()] == [7, 9, 5]
    # Slots: block id * 4 + offset within the block.
    assert metadata.slot_mapping.tolist() == [3 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 20, 21, 22]
    assert (metadata.max_query_len, metadata.max_seq_len) == (3, 6)


def test_rows_are_used_again_and_start_clean() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=4)
    for step in range(20):
        request_id = str(step)
        plan = StepPlan(
            step,
            released=(str(step - 1), "never known"),
            admitted=(admission(request_id, step, step),),
            work=(Work(request_id, 0, 2, (step + 1,), True),),
        )
        batch.apply(plan)
        inputs = batch.build(plan)
        assert inputs.token_ids.tolist() == [step, step]
        assert inputs.metadata.slot_mapping.tolist() == [4 * (step + 1), 4 * (step + 1) + 1]
    assert batch.rows.keys() == {"19"}


@pytest.mark.parametrize("kind", [InputBatch, partial(DeviceBatch, device=torch.device("cpu"))])
def test_an_admission_that_fails_keeps_no_row(kind) -> None:
    """There are no grammars, and a form is asked for, many more times than there are rows."""
    batch = kind(max_num_seqs=2, max_model_len=8, block_size=4)
    form = SamplingParams(structured=StructuredOutput.regex("a"))
    bad = Admission("bad", (1, 2), 2, form, seed=1)
    for step in range(5):
        with pytest.raises(ConfigError, match="no grammars"):
            batch.apply(StepPlan(step, released=("x", "bad"), admitted=(admission("x", 1), bad)))
    plan = StepPlan(6, released=("x", "bad"), admitted=(admission("a", 1), admission("b", 2)))
    batch.apply(plan)
    assert batch.rows.keys() == {"a", "b"}


def test_an_id_may_be_released_and_admitted_in_one_plan() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=4)
    first = StepPlan(0, admitted=(admission("a", 1),), work=(Work("a", 0, 1, (1,), True),))
    batch.apply(first)
    again = StepPlan(
        1,
        released=("a",),
        admitted=(admission("a", 1, 2, 3),),
        work=(Work("a", 0, 3, (2,), True),),
    )
    batch.apply(again)
    assert batch.build(again).metadata.slot_mapping.tolist() == [8, 9, 10]


def test_the_last_token_of_the_context_has_no_place_and_needs_none() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=2, block_size=4)
    batch.apply(StepPlan(0, admitted=(admission("a", 1), admission("b", 5))))
    batch.append("a", 2)
    batch.append("a", 3)
    assert batch.rows["a"].num_tokens == 3
    assert batch.token_ids.tolist() == [[1, 2], [5, 0]]


@pytest.mark.parametrize("sampled", [(True, False), (False, False)])
def test_only_those_that_sample_are_sampled(sampled: tuple[bool, bool]) -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=8, block_size=4)
    work = (Work("a", 0, 2, (1,), sampled[0]), Work("b", 0, 1, (2,), sampled[1]))
    plan = StepPlan(0, admitted=(admission("a", 1, 2), admission("b", 3, 4)), work=work)
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs.sampled == (("a",) if sampled[0] else ())
    assert torch.equal(inputs.sample_index, torch.tensor([1] if sampled[0] else []).long())


def test_a_fork_begins_as_its_source_and_goes_its_own_way() -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=8, block_size=4)
    params = SamplingParams(n=2, presence_penalty=1.0)
    plan = StepPlan(
        0,
        admitted=(admission("b", 9), Admission("a", (1, 2, 3), 3, params, seed=5)),
        work=(Work("b", 0, 1, (7,), True), Work("a", 0, 3, (2,), True)),
        forks=(Fork("c", "a", 6),),
    )
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs.sampled == ("b", "a", "c")
    assert inputs.sample_index.tolist() == [0, 3, 3]
    source, fork = batch.rows["a"], batch.rows["c"]
    assert (source.seed, fork.seed) == (5, 6)
    assert (fork.num_tokens, fork.num_prompt_tokens, fork.resumed) == (3, 3, False)
    assert source.rules is not None
    assert fork.rules is not None
    source.rules.num_counted = 4
    assert fork.rules.num_counted == 0
    batch.append("a", 11)
    batch.append("c", 12)
    # The first to write to the shared block gets a copy of it, and the fork keeps the other.
    work = (Work("a", 3, 1, (4,), True, replaces_last=True), Work("c", 3, 1, (), True))
    plan = StepPlan(1, copies=((2, 4),), work=work)
    batch.apply(plan)
    inputs = batch.build(plan)
    assert inputs.token_ids.tolist() == [11, 12]
    assert inputs.metadata.slot_mapping.tolist() == [4 * 4 + 3, 2 * 4 + 3]


def test_what_was_found_is_computed_for_its_logits_and_not_written() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=4)
    found = Admission("a", (1, 2, 3, 4), 4, PARAMS, 1, block_ids=(6,), num_computed_tokens=4)
    plan = StepPlan(0, admitted=(found,), work=(Work("a", 3, 1, (), True),))
    batch.apply(plan)
    inputs = batch.build(plan)
    assert (inputs.token_ids.tolist(), inputs.positions.tolist()) == ([4], [3])
    assert inputs.metadata.slot_mapping.tolist() == [-1]
