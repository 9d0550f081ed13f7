"""What passes between the engine, which decides, and an executor, which computes. Plain data.

A plan carries only what is new. The executor keeps, for each admitted sequence, its token ids and
its block table, and appends to them: the tokens that it samples itself, and the block ids of each
plan. So a plan of a decode step is small however long the sequences are, and a plan for step t + 1
can be made before the tokens of step t are known.

Each of the samples of a request is one sequence. A plan calls it by an id of its own, in fields
named request_id: the first sample has the id of the request.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from billfish.engine.logprobs import PromptLogprobs, TokenLogprobs
from billfish.sampling_params import SamplingParams

NULL_BLOCK = 0
"""Block id that pads block tables. It is never given to a request and its content is never read."""

BlockPairs = tuple[tuple[int, int], ...]
"""(source block id, destination block id) each, the destinations all different."""

NOT_FINITE = "the model's logits are not finite"
"""Why no token can be chosen where something computed before, perhaps the KV itself, is broken."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that the executor does not know yet.

    token_ids: the prompt and, where it was preempted, the tokens generated before.
    num_prompt_tokens: how many of token_ids are the prompt.
    stop_ids: all token ids that end it, so that min_tokens can ban them.
    bad_word_ids: token sequences that must not be generated.
    block_ids: its block table so far: blocks of the prefix cache, and blocks that this plan swaps
    in. num_computed_tokens: the tokens whose KV is in them. That KV is never written again, not
    even where work begins before its end, as it does to choose a token after a prompt that was
    found whole: the last token is computed once more, for its logits alone.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    block_ids: tuple[int, ...] = ()
    num_computed_tokens: int = 0


class Work(NamedTuple):
    """The share of one sequence in a step: compute tokens [start, start + num_tokens).

    new_block_ids are appended to its block table first, so that it covers start + num_tokens
    tokens. With `replaces_last`, the first of them takes the place of the table's last block, of
    which it is a copy (one of `StepPlan.copies`). `samples` says that these are the last tokens
    known, so the next one is to be chosen and appended.
    """

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool
    replaces_last: bool = False


@dataclass(frozen=True, slots=True)
class Fork:
    """One more sample of a prompt that is complete in this step.

    It begins as a copy of the sequence `source`, whose work in this plan samples: the same tokens,
    sampling parameters and block table, the last block included. Its first token is chosen from the
    logits of the source, with its own seed.
    """

    request_id: str
    source: str
    seed: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The executor handles its parts in the order of the fields.

    released: sequences to forget (finished, aborted or preempted). An id that the executor does not
    know is passed over: after a step failed, all that it spoke of is released again.
    swap_out: blocks to copy from the KV cache to host memory.
    copies: blocks to copy within the KV cache, all read before any is written.
    swap_in: blocks to copy from host memory to the KV cache.
    admitted: sequences to learn; an id may be in both, released first.
    work: what to compute, each sequence at most once. Only now are tokens written.
    forks: sequences to learn once their source's work has extended its block table, and before its
    next token is appended.

    A block that one part reads may be handed out again in the same plan, and then a later part
    writes it: hence the order.
    """

    step: int
    released: tuple[str, ...] = ()
    swap_out: BlockPairs = ()
    copies: BlockPairs = ()
    swap_in: BlockPairs = ()
    admitted: tuple[Admission, ...] = ()
    work: tuple[Work, ...] = ()
    forks: tuple[Fork, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of each sequence whose work samples, and of each fork: a token, or why none.

    failed: sequences for which no token can be chosen, such as those whose logits are not numbers.
    They end; the others in the step are not touched. Where the reason is NOT_FINITE, nobody is to
    use their KV either.
    logprobs: of each token in token_ids whose sequence asks for them.
    prompt_logprobs: of the prompt tokens that follow those computed in this step, for each
    sequence that asks for them and that came without generated tokens. What is computed again, by a
    sequence that was preempted or by another sample of the prompt, comes again.
    """

    step: int
    token_ids: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)


class Executor(Protocol):
    """Computes plans. Implemented by `billfish.worker.ModelRunner`, and by fakes in tests."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class PendingStep(Protocol):
    """A step that is being computed."""

    def result(self) -> StepResult:
        """Waits for it; raises what went wrong. To be asked once, the oldest step first."""
        ...


class OverlappingExecutor(Executor, Protocol):
    """An executor that can take the next plan while it computes the last one.

    The next plan speaks of tokens that are being chosen: a work item may begin at the place of the
    token that the step before samples. A sequence for which that step finds no token is computed
    all the same, and its part of the result means nothing. Plans are computed in the order in which
    they are submitted, as if each had waited for the one before.
    """

    def submit(self, plan: StepPlan) -> PendingStep: ...


class SleepingExecutor(Executor, Protocol):
    """An executor that can give its memory back while it knows no sequence, and take it again."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...
