"""What passes between the engine, which decides, and an executor, which computes. Plain data.

A plan carries only what is new. The executor keeps, for each admitted request, its token ids and
its block table, and appends to them: the tokens that it samples itself, and the block ids of each
plan. So a plan of a decode step is small however long the sequences are, and a plan for step t + 1
can be made before the tokens of step t are known.
"""

from dataclasses import dataclass, field
from typing import Protocol

from billfish.engine.logprobs import PromptLogprobs, TokenLogprobs
from billfish.sampling_params import SamplingParams

NULL_BLOCK = 0
"""Block id that pads block tables. It is never given to a request and its content is never read."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that the executor does not know yet.

    token_ids: the prompt and, where the request was preempted, the tokens generated before.
    num_prompt_tokens: how many of token_ids are the prompt.
    stop_ids: all token ids that end it, so that min_tokens can ban them.
    bad_word_ids: token sequences that must not be generated.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """The share of one request in a step: compute tokens [start, start + num_tokens).

    new_block_ids are appended to the request's block table first, so that it covers
    start + num_tokens tokens. `samples` says that these are the last tokens known, so the next one
    is to be chosen and appended.
    """

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The executor handles its parts in the order of the fields.

    released: requests to forget (finished, aborted or preempted). An id that the executor does not
    know is passed over: after a step failed, all that it spoke of is released again.
    admitted: requests to learn; an id may be in both, released first.
    work: what to compute, each request at most once.
    """

    step: int
    released: tuple[str, ...] = ()
    admitted: tuple[Admission, ...] = ()
    work: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of each request whose work samples: a token, or the reason why there is none.

    failed: requests for which no token can be chosen, such as those whose logits are not numbers.
    They end; the others in the step are not touched.
    logprobs: of each token in token_ids whose request asks for them.
    prompt_logprobs: of the prompt tokens that follow those computed in this step, for each request
    that asks for them and whose prompt was not complete when it was admitted. What a preempted
    request computes again comes again.
    """

    step: int
    token_ids: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)


class Executor(Protocol):
    """Computes plans. Implemented by `billfish.worker.ModelRunner`, and by fakes in tests."""

    def execute(self, plan: StepPlan) -> StepResult: ...
