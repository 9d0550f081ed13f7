"""An engine that costs next to nothing, to measure what the server itself does."""

import time
from collections.abc import Callable

from billfish.engine import EngineStats
from billfish.server.messages import (
    Abort,
    Ask,
    EngineOutput,
    EngineRequest,
    FromEngine,
    Outputs,
    RequestMetrics,
    Snapshot,
    Submit,
    ToEngine,
)


class InstantHost:
    """A host without an engine: a token a step for each request, at next to no cost.

    What is measured with it is the rest of the way. It knows max_tokens and nothing else.
    step_seconds: from one step to the next; a server that is slower merges outputs. counters: what
    it says of itself when it is asked.
    """

    def __init__(self, step_seconds: float, counters: EngineStats) -> None:
        self._step_seconds = step_seconds
        self._counters = counters
        self._next_step = 0.0
        self.draining = False
        self.wake: Callable[[], None] = lambda: None
        self.steps_done = 0
        self._text = " token"
        self._left: dict[str, int] = {}
        self._requests: dict[str, EngineRequest] = {}
        self._accepted: list[str] = []
        self._answers: list[FromEngine] = []

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._answers)

    @property
    def idle(self) -> bool:
        return not self.busy

    def handle(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                self._requests[request.request_id] = request
                self._left[request.request_id] = request.sampling.max_tokens or 1
                self._accepted.append(request.request_id)
            case Abort():
                for request_id in message.request_ids:
                    self._forget(request_id)
            case Ask():
                self._answers.append(
                    Snapshot(
                        number=message.number,
                        counters=self._counters,
                        steps=[],
                        ttfts=[],
                        tokens_per_second=0.0,
                    )
                )

    def step(self) -> list[FromEngine]:
        self.steps_done += 1
        self._pace()
        messages, self._answers = self._answers, []
        outputs, ended = [], []
        for request_id, left in self._left.items():
            count = (self._requests[request_id].sampling.max_tokens or 1) - left + 1
            output = EngineOutput(request_id, 0, self._text, [32], count)
            if left == 1:
                output.finish_reason = "length"
                output.metrics = self._metrics(request_id, count)
                ended.append(request_id)
            self._left[request_id] = left - 1
            outputs.append(output)
        for request_id in ended:
            self._forget(request_id)
        if outputs or self._accepted:
            messages.append(Outputs(outputs, self._accepted, [], len(self._left), 0))
            self._accepted = []
        return messages

    def _pace(self) -> None:
        now = time.monotonic()
        if now < self._next_step:
            time.sleep(self._next_step - now)
        self._next_step = max(now, self._next_step) + self._step_seconds

    def abort_all(self) -> list[FromEngine]:
        for request_id in list(self._requests):
            self._forget(request_id)
        return []

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._left.pop(request_id, None)

    def _metrics(self, request_id: str, count: int) -> RequestMetrics:
        now, prompt = time.monotonic(), self._requests[request_id].prompt_token_ids
        return RequestMetrics(
            arrival=now,
            first_scheduled=now,
            first_token=now,
            finished_at=now,
            num_prompt_tokens=len(prompt),
            num_output_tokens=count,
            peak_blocks=0,
            shared_blocks=0,
            cached_tokens=0,
            preemptions=0,
            swaps=0,
        )
