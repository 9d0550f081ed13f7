"""What Prometheus reads at /metrics. Names are those that users of vLLM know, with our prefix."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from time import monotonic

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.types import Scope

from billfish.engine.outputs import EngineStats
from billfish.server.messages import EngineHealth, EngineOutput

PREFIX = "billfish:"

_SHORT = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LONG = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_TOKENS = tuple(float(a * 10**b) for b in range(6) for a in (1, 2, 5))
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Histogram:
    """Counts of observations by upper bound. For one thread: cheaper by far than a lock a token."""

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self.name, self.documentation = name, documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, model: str) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family = HistogramMetricFamily(self.name, self.documentation, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


class ServerMetrics(Collector):
    """Everything counted in the server, and what the engine last said of itself."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.health: EngineHealth | None = None
        self.engine: EngineStats | None = None
        self.prompt_tokens = self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.responses: Counter[tuple[str, str]] = Counter()

        def histogram(name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, documentation, bounds)

        self.ttft = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _SHORT
        )
        self.itl = histogram(
            "inter_token_latency_seconds", "Between one token of a sample and the next.", _SHORT
        )
        self.tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, by sample.", _SHORT,
        )  # fmt: skip
        self.e2e = histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _LONG
        )
        self.queue = histogram("request_queue_time_seconds", "In the engine's queue.", _LONG)
        self.prefill = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _LONG
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LONG
        )
        self.prompt_length = histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self.output_length = histogram(
            "request_generation_tokens", "Tokens generated, by sample.", _TOKENS
        )
        self.samples = histogram("request_params_n", "The option n.", _SAMPLES)
        self._histograms = [each for each in vars(self).values() if isinstance(each, Histogram)]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def track(self, samples: int, prompt_tokens: int, arrived: float) -> "RequestMeter":
        self.samples.observe(samples)
        self.prompt_length.observe(prompt_tokens)
        self.prompt_tokens += prompt_tokens
        return RequestMeter(self, arrived)

    def count_response(self, scope: Scope, status: int | None) -> None:
        """By the path's pattern, for clients can make up any number of paths."""
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self.responses[path, "none" if status is None else str(status)] += 1

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for histogram in self._histograms:
            yield histogram.family(self._model)
        yield self._counter("prompt_tokens", "Tokens of prompts.", self.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        success = CounterMetricFamily(
            f"{PREFIX}request_success", "Samples that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )  # fmt: skip
        for reason, count in self.finished.items():
            success.add_metric([self._model, reason], count)
        yield success
        responses = CounterMetricFamily(
            f"{PREFIX}http_responses", "Responses by path and status.", labels=["path", "status"]
        )
        for labels, count in self.responses.items():
            responses.add_metric(labels, count)
        yield responses
        if self.health is not None:
            yield from self._of_health(self.health)
        if self.engine is not None:
            yield from self._of_engine(self.engine)

    def _of_health(self, health: EngineHealth) -> Iterator[Metric]:
        alive = health.state in ("ready", "busy")
        yield self._gauge("engine_up", "Whether the engine serves.", alive)
        yield self._counter("engine_restarts", "Times the engine was restarted.", health.restarts)
        yield self._gauge("num_requests_running", "Samples that are computed.", health.running)
        yield self._gauge("num_requests_waiting", "Samples in the queue.", health.waiting)

    def _of_engine(self, stats: EngineStats) -> Iterator[Metric]:
        used = stats.blocks_in_use / max(1, stats.blocks_total)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        for state in ("total", "free", "cached", "in_use"):
            count = getattr(stats, f"blocks_{state}")
            yield self._gauge(f"kv_cache_blocks_{state}", f"KV blocks: {state}.", count)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits)
        yield self._counter("num_preemptions", "Samples that lost their blocks.", stats.preemptions)
        yield self._counter("engine_steps", "Steps of the engine.", stats.steps)
        yield self._counter("engine_step_seconds", "Time spent in steps.", stats.step_seconds)
        yield self._counter(
            "engine_wait_seconds", "Of that, waiting for the model.", stats.wait_seconds
        )

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


class RequestMeter:
    """Times the tokens of one request as they pass. arrived: by the monotonic clock."""

    __slots__ = ("_arrived", "_latest", "_metrics")

    def __init__(self, metrics: ServerMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._latest: dict[int, float] = {}  # by sample: when its last token came

    def take(self, output: EngineOutput) -> None:
        count = len(output.token_ids)
        if count:
            metrics, now = self._metrics, monotonic()
            metrics.generation_tokens += count
            before = self._latest.get(output.index)
            if before is not None:
                metrics.itl.observe((now - before) / count, count)
            else:
                if not self._latest:
                    metrics.ttft.observe(now - self._arrived)
                if count > 1:  # they came together
                    metrics.itl.observe(0.0, count - 1)
            self._latest[output.index] = now
        if output.finish_reason is not None:
            self._finish(output)

    def _finish(self, output: EngineOutput) -> None:
        metrics, record = self._metrics, output.metrics
        metrics.finished[output.finish_reason or ""] += 1
        metrics.e2e.observe(monotonic() - self._arrived)
        metrics.output_length.observe(output.completion_tokens)
        if record is None:
            return
        if record.queue_time is not None:
            metrics.queue.observe(record.queue_time)
        if record.first_token is not None and record.first_scheduled is not None:
            metrics.prefill.observe(record.first_token - record.first_scheduled)
            if record.finished_at is not None:
                metrics.decode.observe(record.finished_at - record.first_token)
        if record.tpot is not None:
            metrics.tpot.observe(record.tpot)
