"""A step that a device was given: what it chose, once it is done."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from billfish.engine.logprobs import PromptLogprobs
from billfish.engine.plan import NOT_FINITE, StepResult
from billfish.worker.input_batch import Row
from billfish.worker.logprobs import PendingLogprobs
from billfish.worker.model_runner import why_nothing_left
from billfish.worker.sampler import NO_TOKEN


@dataclass(slots=True)
class DeviceStep:
    """A step that is queued; see `billfish.engine.plan.PendingStep`.

    tokens: int32 [S] in host memory, valid once `done` has come. finite: whether the model's own
    logits were numbers, bool [S], where rules may have left nothing to choose. grammars: whether
    any of the sequences has one.
    """

    step: int
    sampled: tuple[tuple[str, Row], ...] = ()
    tokens: Tensor | None = None
    finite: Tensor | None = None
    grammars: bool = False
    done: Any = None
    logprobs: tuple[list[str], PendingLogprobs] | None = None
    prompt_logprobs: list[tuple[str, int, list[PendingLogprobs]]] = field(default_factory=list)
    followed: bool = False

    def follow(self) -> None:
        """Let the grammars follow the tokens of this step, once it is done."""
        if self.done is not None:
            self.done.synchronize()
        if self.followed or self.tokens is None or not self.grammars:
            return
        self.followed = True
        for (_, row), token_id in zip(self.sampled, self.tokens.tolist(), strict=True):
            grammar = row.rules.grammar if row.rules else None
            if grammar and token_id != NO_TOKEN and token_id not in grammar.stop_ids:
                grammar.advance((token_id,))

    def result(self) -> StepResult:
        self.follow()
        result = StepResult(self.step)
        if self.tokens is not None:
            chosen = self.tokens.tolist()
            result.token_ids.update(zip([name for name, _ in self.sampled], chosen, strict=True))
            if NO_TOKEN in chosen:
                finite = [False] * len(chosen) if self.finite is None else self.finite.tolist()
                for (name, row), is_finite in zip(self.sampled, finite, strict=True):
                    if result.token_ids[name] == NO_TOKEN:
                        del result.token_ids[name]
                        result.failed[name] = why_nothing_left(row) if is_finite else NOT_FINITE
        if self.logprobs is not None:
            names, pending = self.logprobs
            found = zip(names, pending.collect(), strict=True)
            result.logprobs.update((n, each) for n, each in found if n in result.token_ids)
        for request_id, start, parts in self.prompt_logprobs:
            tokens = tuple(each for part in parts for each in part.collect())
            result.prompt_logprobs[request_id] = PromptLogprobs(start, tokens)
        return result
