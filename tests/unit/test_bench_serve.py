"""bench serve: its arithmetic on clocks that tests turn, its traces, its arrivals."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from rich.console import Console

from billfish.bench import serve, serve_plot
from billfish.bench.serve_report import Result, rows, show, summarize
from billfish.bench.serve_requests import Words, arrivals, choose, read_trace, synthetic
from billfish.client import Piece, ServerError, Usage
from billfish.errors import ConfigError


class FakeTime:
    """A clock that moves only when everybody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, len(self._sleepers), woken))
        await woken

    async def run(self, work) -> object:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):  # whoever is awake goes to sleep, or ends
                await asyncio.sleep(0)
            if not task.done() and self._sleepers:
                first = min(self._sleepers, key=lambda each: each[:2])
                self._sleepers.remove(first)
                self.now = first[0]
                first[2].set_result(None)
        return task.result()


def script(time: FakeTime, gaps: Sequence[float], usage: Usage, error: ServerError | None = None):
    async def events() -> AsyncIterator[Piece | Usage]:
        for gap in gaps:
            await time.sleep(gap)
            yield Piece("x")
        if error is not None:
            raise error
        await time.sleep(5.0)  # what comes after the text counts for nothing
        yield usage

    return events()


def test_times_of_one_request():
    time = FakeTime()
    work = serve.measure(script(time, (0.5, 0.1, 0.3), Usage(7, 5)), time.clock)
    result = asyncio.run(time.run(work))
    assert result.ttft == pytest.approx(0.5)
    assert result.itls == pytest.approx([0.1, 0.3])
    assert result.e2el == pytest.approx(0.9)
    assert result.tpot == pytest.approx((0.9 - 0.5) / (5 - 1))  # by the server's count of tokens
    assert (result.prompt_tokens, result.output_tokens, result.error) == (7, 5, None)


def test_one_token_has_no_tpot():
    assert Result(0.0, [1.0], 3, 1).tpot is None
    assert Result(0.0, [], 3, 0).ttft is None


@pytest.mark.parametrize(
    ("usage", "error", "kind"),
    [
        (Usage(1, 1), ServerError("HTTP 429", "busy", 429), "HTTP 429"),
        (Usage(1, 1), ServerError("ended early", "..."), "ended early"),
        (Usage(1, 0), None, "no token counts came"),
    ],
)
def test_a_failure_is_counted_by_its_kind(usage, error, kind):
    time = FakeTime()
    result = asyncio.run(time.run(serve.measure(script(time, (1.0,), usage, error), time.clock)))
    summary = summarize([result, Result(0, [1, 2], 5, 2)], 2.0)
    assert summary["errors"] == {kind: 1}
    assert (summary["completed"], summary["failed"]) == (1, 1)
    assert summary["mean_ttft_ms"] == 1000  # of the one that succeeded


def test_requests_are_sent_when_they_arrive():
    time = FakeTime()
    sent: list[tuple[int, float]] = []

    def send(number: int):
        sent.append((number, time.now - 100))
        return script(time, (1.0, 1.0), Usage(1, 2))

    work = serve.replay(send, [0, 0.5, 7.0], clock=time.clock, sleep=time.sleep)
    results = asyncio.run(time.run(work))
    assert sent == [(0, 0), (1, 0.5), (2, 7.0)]
    assert [result.ttft for result in results] == pytest.approx([1, 1, 1])


def test_max_concurrency_holds_back_and_is_not_counted_as_waiting():
    time = FakeTime()
    done: list[Result] = []

    def send(number: int):
        return script(time, (1.0,), Usage(1, 1))

    work = serve.replay(send, [0.0] * 4, 2, on_done=done.append, clock=time.clock, sleep=time.sleep)
    results = asyncio.run(time.run(work))
    assert [result.sent - 100 for result in results] == pytest.approx([0, 0, 6, 6])
    assert [result.ttft for result in results] == pytest.approx([1.0] * 4)
    assert len(done) == 4
    assert summarize(results, 12.0)["max_concurrent_requests"] == 2


def test_a_summary_is_numpy_s():
    draw = np.random.default_rng(0)
    results = []
    for i in range(50):
        pieces = list(i + np.cumsum(draw.uniform(0.01, 1, 5)))
        results.append(Result(float(i), pieces, 10, 9))
    summary = summarize(results, 25.0, {"ttft": 0.5, "tpot": 0.3})
    ttfts = np.array([result.pieces[0] - result.sent for result in results]) * 1000
    tpots = np.array([(r.pieces[-1] - r.pieces[0]) / 8 for r in results]) * 1000
    itls = np.concatenate([np.diff(result.pieces) for result in results]) * 1000
    for name, values in (("ttft", ttfts), ("tpot", tpots), ("itl", itls)):
        assert summary[f"mean_{name}_ms"] == pytest.approx(values.mean(), abs=1e-3)
        for p in (50, 90, 95, 99):
            expected = np.percentile(values, p)
            assert summary[f"p{p}_{name}_ms"] == pytest.approx(expected, abs=1e-3)
    assert summary["request_throughput"] == 2.0
    assert summary["output_throughput"] == 18.0
    assert summary["total_token_throughput"] == 38.0
    kept = ((ttfts <= 500) & (tpots <= 300)).sum()
    assert 0 < kept < 50
    assert summary["request_goodput"] == pytest.approx(kept / 25)
    shown = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    show(summary, shown)
    text = shown.export_text()
    assert "ttft <= 500 ms, tpot <= 300 ms" in text
    assert f"{summary['p99_itl_ms']:.2f}" in text


def test_nothing_succeeded():
    summary = summarize([Result(0.0, error="HTTP 503")], 1.0, {"ttft": 1.0})
    assert summary["mean_ttft_ms"] is None
    assert summary["request_goodput"] == 0
    show(summary, Console(quiet=True))
    serve_plot.in_terminal([], Console(quiet=True))


def test_limits():
    assert serve.limits(["ttft:500", "e2el:2000"]) == {"ttft": 0.5, "e2el": 2.0}
    for wrong in ("ttft", "itl:5", "ttft:x", "ttft:-1", "tpot:inf", "tpot:nan"):
        with pytest.raises(ConfigError, match="--goodput"):
            serve.limits([wrong])


class TestRequests:
    def test_arrivals(self):
        assert arrivals(3, 4.0, "constant", 0) == [0, 0.25, 0.5]
        assert arrivals(5, 4.0, "burst", 0, burst=2) == [0, 0, 0.5, 0.5, 1.0]
        assert arrivals(3, float("inf"), "poisson", 0) == [0, 0, 0]
        times = arrivals(4000, 8.0, "poisson", 1)
        gaps = np.diff(times)
        assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
        assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # what exponential gaps have
        assert times == arrivals(4000, 8.0, "poisson", 1) != arrivals(4000, 8.0, "poisson", 2)

    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
    def test_gaps_of_a_gamma_distribution(self, burstiness):
        gaps = np.diff(arrivals(8000, 8.0, "gamma", 1, burstiness=burstiness))
        assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.06)

    def test_a_sharegpt_file(self, tmp_path):
        turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
        path = tmp_path / "trace.json"
        path.write_text(
            json.dumps([{"id": "a", "conversations": turns}, {"conversations": turns[:1]}])
        )
        (prompt,) = read_trace(path)
        assert (prompt.text, prompt.reply, prompt.output_tokens) == ("Why?", "Because.", None)

    def test_a_file_of_lengths(self, tmp_path):
        path = tmp_path / "lengths.json"
        path.write_text("[[100, 20], [7, 1]]")
        trace = read_trace(path)
        assert [(p.tokens, p.output_tokens) for p in trace] == [(100, 20), (7, 1)]
        assert choose(trace, None, 0) == trace
        assert sorted(p.tokens for p in choose(trace, 4, 0)) == [7, 7, 100, 100]

    @pytest.mark.parametrize(
        "text", ["", "{}", "[]", "[[1]]", "[[1, 0]]", "[[1, 2], [true, 2]]", "[1]", '[{"x": 1}]']
    )
    def test_files_that_are_neither(self, tmp_path, text):
        path = tmp_path / "trace.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"trace\.json"):
            read_trace(path)

    def test_synthetic_lengths(self):
        drawn = synthetic(200, 100, 10, 0.5, 0)
        assert {p.tokens for p in drawn} <= set(range(50, 151))
        assert min(p.tokens for p in drawn) < 60 < 140 < max(p.tokens for p in drawn)
        assert synthetic(2, 8, 4, 0.0, 0)[0].tokens == 8

    def test_prompts_share_the_prefix_and_no_more(self):
        words = Words(range(1000), 16, 0)
        one, other = words.prompt(64), words.prompt(64)
        assert len(one) == len(other) == 64
        assert one[:16] == other[:16]
        assert one[16:24] != other[16:24]
        assert len(Words(None, 4, 0).prompt(10).split()) == 10


def test_bars_and_a_picture(tmp_path, monkeypatch, capsys):
    results = [Result(i, [i + 0.1, i + 0.2 + i / 10], 5, 2) for i in range(20)]
    bins = serve_plot.histogram(np.array([1.0, 2.0, 2.0, 50.0]))
    assert sum(count for _, _, count in bins) == 4
    assert bins[-1][1] == 50.0
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    serve._plot(results, 0.0, str(tmp_path / "plot.png"))
    captured = capsys.readouterr()
    assert "billfish[plot]" in captured.err
    assert "█" in captured.out
    assert not (tmp_path / "plot.png").exists()


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: billfish[plot]")
    results = [Result(i, [i + 0.1, i + 0.2 + i / 10], 5, 2) for i in range(20)]
    path = tmp_path / "plot.png"
    serve._plot(results, 0.0, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="--plot"):
        serve._plot(results, 0.0, str(tmp_path / "plot.nonsense"))


def test_rows_are_in_the_order_of_sending():
    results = [Result(5.0, [6.0, 7.0], 3, 2), Result(4.0, error="timeout")]
    assert rows(results, 4.0) == [
        {"sent_s": 0.0, "prompt": 0, "output": 0, "ttft_ms": None, "tpot_ms": None,
         "e2el_ms": None, "error": "timeout"},
        {"sent_s": 1.0, "prompt": 3, "output": 2, "ttft_ms": 1000.0, "tpot_ms": 1000.0,
         "e2el_ms": 2000.0, "error": None},
    ]  # fmt: skip
