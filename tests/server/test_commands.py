"""Commands that talk to a running server: bench serve and chat --url."""

import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from billfish.bench import serve
from billfish.cli import app, common
from billfish.cli import serve as serve_command
from billfish.client import ServerError
from billfish.config import EngineConfig
from billfish.errors import BillfishError, QueueFullError
from billfish.server.fake_engine import FakeEngine
from billfish.server.messages import Launch
from tests.server.live import KEY, live

ANSWER = "Hello! I am a fake model, and this is all I say. 🐟"


def bench(server, *options: str) -> dict:
    out = Path(options[options.index("--out") + 1])
    serve.main(["--url", server.url, *options])
    return json.loads(out.read_text())


class TestBenchServe:
    def test_lengths_are_what_was_asked_for(self, server, tmp_path, capsys):
        trace, out = tmp_path / "lengths.json", str(tmp_path / "out.json")
        trace.write_text("[[40, 5], [20, 9], [33, 1]]")
        found = bench(server, "--trace", str(trace), "--out", out, "--goodput", "e2el:60000")
        assert sorted((row["prompt"], row["output"]) for row in found["rows"]) == [
            (20, 9), (33, 1), (40, 5),
        ]  # fmt: skip
        summary = found["summary"]
        assert (summary["completed"], summary["failed"]) == (3, 0)
        assert summary["total_output_tokens"] == 15
        assert summary["request_goodput"] == summary["request_throughput"] > 0
        assert found["server"]["model"] == "fake"
        assert "Time per output token" in capsys.readouterr().out

    def test_a_sharegpt_trace_over_chat(self, server, tmp_path):
        turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
        trace, out = tmp_path / "trace.json", str(tmp_path / "out.json")
        trace.write_text(json.dumps([{"conversations": turns}]))
        found = bench(
            server, "--trace", str(trace), "--requests", "4", "--chat", "--out", out,
            "--arrival", "constant", "--rate", "1000", "--max-concurrency", "2",
        )  # fmt: skip
        assert [row["output"] for row in found["rows"]] == [len("Because.")] * 4
        assert found["summary"]["max_concurrent_requests"] <= 2

    def test_failures_are_counted_and_a_key_is_not_written(self, tmp_path):
        with live(api_keys=(KEY,)) as server:
            taken, submit = [], server.engine.submit

            async def some(request):
                taken.append(request)
                if len(taken) % 2:
                    return await submit(request)
                raise QueueFullError("full")

            server.engine.submit = some
            out = str(tmp_path / "out.json")
            found = bench(
                server, "--requests", "6", "--output-len", "4", "--prompt-len", "8",
                "--warmup", "0", "--api-key", KEY, "--out", out,
            )  # fmt: skip
            assert found["summary"]["errors"] == {"HTTP 429": 3}
            assert found["summary"]["completed"] == 3
            assert KEY not in Path(out).read_text()
            with pytest.raises(BillfishError, match="401"):
                serve.main(["--url", server.url, "--api-key", "a-wrong-key"])

    def test_no_server_is_one_sentence(self):
        with pytest.raises(BillfishError, match=r"no server answers at http://127\.0\.0\.1:9"):
            serve.main(["--url", "http://127.0.0.1:9"])

    def test_the_engine_dies_meanwhile(self, tmp_path):
        with live(lambda: FakeEngine("")) as server:
            left = 10

            def die(_plan: object) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    server.loop.call_soon(server.engine.die)

            server.engine.executor.on_step = die
            with pytest.raises(BillfishError, match="no request succeeded"):
                serve.main(
                    ["--url", server.url, "--requests", "2", "--output-len", "2000",
                     "--prompt-len", "8", "--warmup", "0"]
                )  # fmt: skip


class TestChat:
    def chat(self, server, text: str, *options: str, **more):
        arguments = ["chat", "--url", server.url, *options]
        return CliRunner().invoke(app, arguments, input=text, **more)

    def test_a_conversation(self, server):
        prompts: list[str] = []
        server.engine.executor.reply = lambda prompt: prompts.append(prompt) or ANSWER
        done = self.chat(server, "One\nTwo\n/reset\nThree\n/exit\n", "--system", "Be brief.")
        server.engine.executor.reply = ANSWER
        assert done.exit_code == 0, done.output
        assert done.stdout.count(ANSWER) == 3
        assert [ANSWER in prompt for prompt in prompts] == [False, True, False]
        assert all("Be brief." in prompt for prompt in prompts)

    def test_options_are_sent(self, server):
        done = self.chat(server, "One\n", "--max-tokens", "5", "--temperature", "0.5")
        assert ANSWER[:5] in done.stdout
        assert ANSWER not in done.stdout

    def test_the_key(self):
        with live(api_keys=(KEY,)) as server:
            done = self.chat(server, "One\n", "--api-key", KEY)
            assert ANSWER in done.stdout
            done = self.chat(server, "One\n", env={"BILLFISH_API_KEY": KEY})
            assert ANSWER in done.stdout
            done = self.chat(server, "One\n")
            assert isinstance(done.exception, BillfishError)
            assert "401" in str(done.exception)

    def test_an_answer_that_is_refused_does_not_end_the_conversation(self, server):
        done = self.chat(server, f"{'x' * 5000}\nOne\n")
        assert "error: the server says:" in done.stdout
        assert ANSWER in done.stdout


COMMANDS = [
    (), ("serve",), ("chat",), ("generate",), ("demo",), ("env",), ("bench",), ("bench", "serve"),
    ("bench", "gemm"), ("bench", "tune"), ("bench", "attention"), ("bench", "throughput"),
    ("bench", "engine"), ("bench", "step"), ("bench", "server"), ("bench", "quantize"),
    ("quantize",),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "billfish")
def test_every_command_explains_itself(command, capsys):
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    assert done.exit_code == 0, done.exception
    assert "usage" in done.output.lower()
    assert "--help" in done.output
    assert max(map(len, done.output.splitlines())) <= 100


def test_help_says_once_that_options_come_from_elsewhere():
    done = CliRunner().invoke(app, ["chat", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert "as BILLFISH_ and its name" in done.output
    assert "[env var" not in done.output


HOSTILE = "a\x1b]52;c;AAAA\x07\x9b31m\r\x08b\tc\n🐟"


@pytest.mark.parametrize("terminal", [True, False])
def test_no_text_of_a_model_commands_the_terminal(monkeypatch, terminal):
    """It could write to the clipboard, or over what stands there. A file gets what was written."""
    out = io.StringIO(newline="")
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", out)
    common.say(HOSTILE)
    written = out.getvalue()
    assert written == ("a␛]52;c;AAAA␇\ufffd31m␍␈b\tc\n🐟" if terminal else HOSTILE)


def test_no_error_of_a_server_commands_the_terminal():
    error = ServerError(f"kind{HOSTILE}", f"the server says: {HOSTILE}")
    for text in (str(error), error.kind):
        assert text.replace("\t", "").replace("\n", "").isprintable()


ENGINE_OPTIONS = {
    "--dtype": ("float16", lambda config: config.dtype),
    "--quantize": ("int4", lambda config: config.quantize),
    "--device": ("cuda:1", lambda config: config.device),
    "--head": ("int8", lambda config: config.head),
    "--batch-invariant": (True, lambda config: config.batch_invariant),
    "--kv-memory": (2.5, lambda config: config.cache.memory_bytes / 2**30),
    "--gpu-memory": (0.5, lambda config: config.cache.gpu_memory),
    "--block-size": (32, lambda config: config.cache.block_size),
    "--no-prefix-caching": (True, lambda config: not config.cache.prefix_caching),
    "--swap-blocks": (7, lambda config: config.cache.swap_blocks),
    "--max-model-len": (99, lambda config: config.scheduler.max_model_len),
    "--max-num-seqs": (5, lambda config: config.scheduler.max_num_seqs),
    "--max-num-batched-tokens": (77, lambda config: config.scheduler.max_num_batched_tokens),
    "--max-waiting": (11, lambda config: config.scheduler.max_waiting),
    "--preemption": ("swap", lambda config: config.scheduler.preemption),
}


def test_options_of_serve_reach_the_engine(monkeypatch):
    """None is accepted and ignored: each is where the engine's process builds the model from."""
    configs = []
    monkeypatch.setattr(
        serve_command, "_serve", lambda settings, config, *rest: configs.append(config)
    )
    arguments = ["serve", "a.gguf"]
    for name, (value, _) in ENGINE_OPTIONS.items():
        arguments += [name] if value is True else [name, str(value)]
    said = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert said.exit_code == 0, said.output
    CliRunner().invoke(app, ["serve", "a.gguf"], catch_exceptions=False)
    given, plain = configs
    assert given.model == "a.gguf"
    for name, (value, read) in ENGINE_OPTIONS.items():
        assert read(given) == value, name
        assert name in ("--kv-memory",) or read(plain) != value, name

    asked = []

    class Built(Exception):
        pass

    def build(**settings):
        asked.append(settings)
        raise Built

    host = pytest.importorskip("billfish.server.llm_host")
    monkeypatch.setattr(host, "LLM", build)
    with pytest.raises(Built):
        host.build(Launch(config=given, seed=3), lambda *progress: None)
    (settings,) = asked
    assert settings.pop("seed") == 3
    settings.pop("progress")
    assert EngineConfig(**settings) == given


def test_batch_invariant_takes_all_that_it_needs():
    config = EngineConfig(model="m", batch_invariant=True).invariant()
    assert config.scheduler.equal_chunks
    assert not config.cache.prefix_caching
