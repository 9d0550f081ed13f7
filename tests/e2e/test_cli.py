"""The commands as a person runs them, over a small random model; processes where that matters."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from billfish.cli import main
from billfish.version import __version__
from tests.e2e import tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("cli") / "tiny.gguf"))


COMMAND = [sys.executable, "-c", "from billfish.cli import main; main()"]


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True,
        check=False, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip


def run_here(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The same in this process, which has loaded torch already; that takes most of a command."""
    out, errors, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "120"}),
        mock.patch.multiple(sys, argv=["billfish", *arguments], stdin=io.StringIO(stdin)),
        redirect_stdout(out),
        redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), errors.getvalue())


def test_generate_one_json_equals_streamed(tiny: str) -> None:
    options = ["--model", tiny, "--max-tokens", "12", "--dtype", "float32"]
    streamed = run("generate", *options, "Hello there")
    as_json = run("generate", *options, "--json", "Hello there", "Another")
    assert streamed.returncode == 0, streamed.stderr
    first, second = map(json.loads, as_json.stdout.splitlines())
    assert streamed.stdout == first["text"] + "\n"
    assert first["prompt"] == "Hello there"
    assert first["output_tokens"] <= 12
    assert first["finish_reason"] in ("length", "stop")
    assert second["prompt"] == "Another"


def test_generate_options_reach_the_sampler(tiny: str) -> None:
    def text(*options: str) -> str:
        result = run_here("generate", "-m", tiny, "--max-tokens", "12", *options, "Hello there")
        assert result.returncode == 0, result.stderr
        return result.stdout

    seeded = text("--temperature", "3", "--seed", "5")
    assert text("--temperature", "3", "--seed", "5") == seeded
    assert text("--temperature", "3", "--seed", "6") != seeded
    assert text("--temperature", "3", "--seed", "5", "--top-k", "1") == text()


def test_generate_options_of_the_distribution(tiny: str) -> None:
    def text(*options: str) -> str:
        result = run_here("generate", "-m", tiny, "--max-tokens", "16", *options, "Hello there")
        assert result.returncode == 0, result.stderr
        return result.stdout

    plain = text()
    hot = ("--temperature", "5", "--seed", "3")
    assert text(*hot, "--min-p", "1") == plain
    for option in ("--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
        assert text(option, "2") != plain
    letter = plain.strip()[0]
    assert letter not in text("--bad-word", letter)
    stop = plain.rstrip("\n")[3:5]
    assert text("--stop", stop, "--include-stop") == text("--stop", stop)[:-1] + stop + "\n"


def test_generate_json_logprobs(tiny: str) -> None:
    options = ["--json", "--logprobs", "3", "--max-tokens", "5", "--seed", "1"]
    result = run_here("generate", "-m", tiny, *options, "--temperature", "1", "Hello there")
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout)
    assert len(line["logprobs"]) == line["output_tokens"]
    for each in line["logprobs"]:
        assert each["rank"] >= 1
        assert each["logprob"] < 0
        assert len(each["top"]) == 3
        assert set(each["top"][0]) == {"id", "token", "logprob"}


def test_generate_samples(tiny: str) -> None:
    options = ["-m", tiny, "--max-tokens", "8", "--temperature", "1", "--seed", "1"]
    result = run_here("generate", *options, "-n", "3", "--json", "Hello", "Bye")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["prompt"], line["index"]) for line in lines] == [
        (prompt, index) for prompt in ("Hello", "Bye") for index in range(3)
    ]
    assert len({line["text"] for line in lines[:3]}) == 3
    shown = run_here("generate", *options, "-n", "3", "--ledger", "Hello")
    assert shown.stdout == "".join(
        f"\n>>> Hello [{line['index']}]\n{line['text']}\n" for line in lines[:3]
    )
    assert "samples forked" in shown.stderr
    one = run_here("generate", *options, "--json", "Hello", "Bye")
    assert json.loads(one.stdout.splitlines()[0]) == lines[0]


def test_a_models_own_defaults_are_shown_and_give_way(tmp_path: Path) -> None:
    path = tmp_path / "hot.gguf"
    tiny_gguf.write(path, metadata=lambda w: w.add_float32("general.sampling.temp", 5.0))
    common = ["generate", "-m", str(path), "--max-tokens", "12", "--seed", "1", "Hello there"]
    hot, cold = run_here(*common), run_here(*common, "--temperature", "0")
    again = run_here(*common, "--temperature", "5")
    assert "sampling defaults of the model file: temperature=5" in hot.stderr
    assert hot.stdout == again.stdout != cold.stdout


def test_generate_chat_uses_the_template_and_shows_the_ledger(tiny: str) -> None:
    result = run_here("generate", "-m", tiny, "--max-tokens", "4", "--chat", "--ledger", "Hi")
    assert result.returncode == 0
    # <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n: one token a byte, or control.
    assert f" {1 + 5 + 2 + 1 + 1 + 1 + 10} " in result.stderr
    for words in ("TTFT", "TPOT", "KV memory wasted", "most in use", "tokens/s"):
        assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1", "x"], "temperature"),
        (["--top-p", "0", "x"], "top_p"),
        (["--min-p", "2", "x"], "min_p"),
        (["--presence-penalty", "3", "x"], "presence_penalty"),
        (["--json", "--logprobs", "21", "x"], "logprobs"),
        (["--logprobs", "2", "x"], "--json"),
        (["--min-tokens", "200", "x"], "min_tokens"),
        (["-n", "0", "x"], "n: must be between 1 and 128"),
        (["-n", "3", "--max-tokens", "100000", "x"], "max_model_len is 512"),
        (["--dtype", "int8", "x"], "dtype"),
        (["--max-tokens", "100000", "x"], "max_model_len is 512"),
        (["--kv-memory", "0.00001", "x"], "KV cache"),
        ([""], "prompt_token_ids"),
    ],
)
def test_bad_arguments_are_one_line(tiny: str, arguments: list[str], words: str) -> None:
    result = run_here("generate", "-m", tiny, *arguments)
    assert result.returncode == 1
    assert result.stdout.strip() == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert words in line
    assert "Traceback" not in result.stderr


def test_missing_and_damaged_models_are_one_line(tmp_path: Path) -> None:
    missing = run("generate", "-m", str(tmp_path / "none.gguf"), "x")
    assert (missing.returncode, missing.stderr.count("Traceback")) == (1, 0)
    assert "no such file" in missing.stderr
    (tmp_path / "bad.gguf").write_text("not a model")
    damaged = run("generate", "-m", str(tmp_path / "bad.gguf"), "x")
    assert (damaged.returncode, damaged.stderr.count("Traceback")) == (1, 0)
    assert "bad.gguf" in damaged.stderr


def test_chat_with_a_model_that_cannot_is_refused_at_start(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "plain.gguf", template=None)
    result = run_here("chat", "-m", str(path), stdin="hello\n")
    assert result.returncode == 1
    assert "no chat template" in result.stderr
    assert "> " not in result.stdout


def test_any_encoding_of_the_terminal(tiny: str) -> None:
    for encoding in ("ascii:strict", "latin-1:strict", "utf-8:strict"):
        result = subprocess.run(
            [*COMMAND, "chat", "-m", tiny, "--max-tokens", "8"],
            input=b"\xff\xfe\n/exit\n", capture_output=True, check=False,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr


def test_a_full_disk_is_one_line(tiny: str) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*COMMAND, "generate", "-m", tiny, "--max-tokens", "3", "Hi"], stdout=full,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert result.returncode == 1
    assert "No space left" in result.stderr


def test_a_request_without_an_answer_is_an_error(tmp_path: Path) -> None:
    """A model whose last norm overflows gives logits that are not numbers."""
    huge = {"output_norm.weight": np.full(tiny_gguf.HIDDEN, 3e38, np.float32)}
    path = tiny_gguf.write(
        tmp_path / "huge.gguf", change_shapes=lambda s: s.pop("output_norm.weight"), extra=huge
    )
    for options in ([], ["--json"]):
        result = run_here("generate", "-m", str(path), *options, "Hi")
        assert result.returncode == 1
        assert "not finite" in result.stderr


def test_chat_remembers_resets_and_leaves(tiny: str) -> None:
    lines = "first\n\nsecond\n/reset\nthird\n/exit\nnever read\n"
    result = run("chat", "-m", tiny, "--max-tokens", "3", "--system", "S", stdin=lines)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n> ") == 6


def test_chat_too_long_for_the_context_can_go_on(tiny: str) -> None:
    lines = "x" * 600 + "\nshort\n/exit\n"
    result = run_here("chat", "-m", tiny, "--max-tokens", "3", stdin=lines)
    assert result.returncode == 0
    assert "max_model_len is 512" in result.stdout
    assert result.stdout.count("error:") == 1


def test_ctrl_c_stops_the_answer_not_the_program(tmp_path: Path) -> None:
    # Greedy, the random model repeats one token: no machine is done with 50,000 before the signal.
    path = tiny_gguf.write(tmp_path / "m.gguf", metadata=lambda w: w.add_context_length(100_000))
    options = ["--max-tokens", "50000", "--temperature", "0", "--dtype", "float32"]
    process = subprocess.Popen(
        [*COMMAND, "chat", "-m", str(path), *options, "--kv-memory", "0.25"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def read_until(come: Callable[[bytes], object]) -> bytes:
        read = b""
        while not come(read):
            chunk = process.stdout.read1()
            assert chunk, (read, process.stderr and process.stderr.read())
            read += chunk
        return read

    read_until(lambda read: read.endswith(b"\n> "))
    for line in (b"talk\n", b"again\n"):
        process.stdin.write(line)
        process.stdin.flush()
        read_until(bytes.strip)  # the answer has begun
        process.send_signal(signal.SIGINT)
        read_until(lambda read: b"[stopped]" in read and read.endswith(b"\n> "))
    _, errors = process.communicate(b"/exit\n")
    assert process.returncode == 0, errors


def test_env_names_the_versions() -> None:
    result = run("env")
    assert result.returncode == 0
    for words in ("python", "torch", "cpu", "gpu", __version__):
        assert words in result.stdout


def test_bench_passes_options_on_and_says_when_there_is_no_gpu() -> None:
    listed = run("bench", "throughput", "--help")
    assert listed.returncode == 0
    assert "usage: billfish bench throughput" in listed.stdout
    assert "--batches" in listed.stdout
    if not torch.cuda.is_available():
        refused = run("bench", "gemm", "--out", "nowhere.json")
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: bench gemm measures a GPU: torch ")
        assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("command", [("generate", "Hello"), ("chat",)], ids=["generate", "chat"])
def test_a_gpu_that_is_not_there_is_told_before_anything_is_loaded(command) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    told = run(*command, "--model", "no-such-file.gguf", "--device", "cuda")
    assert told.returncode == 1
    (line,) = told.stderr.strip().splitlines()
    assert line.startswith("error: device 'cuda': torch ")
