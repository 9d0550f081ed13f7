"""`billfish serve` as a user runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e import tiny_gguf

COMMAND = [sys.executable, "-m", "billfish", "serve"]
KEY = "a-key-for-this-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny-1.5.gguf"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, and its URL once it answers. Killed at the end, if it still runs."""
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", str(port)],
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        while not is_ready(url):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.1)
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).json()["status"] == "ready"
    except httpx.TransportError:
        return False


def test_it_serves_and_ends(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"# of this test\n\n{KEY}\n")
    config = tmp_path / "billfish.toml"
    config.write_text('[serve]\nlog-format = "json"\nserved-model-name = ["from-the-file"]\n')
    with serving(
        model, "--dtype", "float32", "--api-key-file", str(keys),
        BILLFISH_CONFIG=str(config), BILLFISH_SERVED_MODEL_NAME="mine other", BILLFISH_SEED="1",
    ) as (process, url):  # fmt: skip
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        models = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
        assert [each["id"] for each in models] == ["mine", "other"]
        body = {"model": "other", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] in range(1, 5)
        # A stream that runs when the signal comes is served to its end.
        body |= {"max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert process.stderr is not None
        log = [json.loads(line) for line in process.stderr.read().splitlines()]
        requests = [line for line in log if line["logger"] == "billfish.access"]
        assert requests[-1]["completion_tokens"] == 200
        assert requests[-1]["outcome"] == "length"
        assert {"request_id", "client", "method", "path", "status", "seconds"} <= set(requests[-1])
        assert not any(KEY in json.dumps(line) for line in log)


def test_ctrl_c_ends_it_and_its_engine(model):
    with serving(model, "--dtype", "float32", "--shutdown-seconds", "0") as (process, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny-1.5"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        engines = children.read_text().split() if children.exists() else []
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (130, -signal.SIGINT)
        for pid in engines:
            assert not is_alive(int(pid))


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--port", "USED"], "Address already in use; choose another with --port"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--api-key", "short"], "an API key must be 8 or more"),
        (["--api-key-file", "EMPTY"], "holds no API key"),
        (["--tool-call-parser", "nonsense"], "hermes, llama3_json, mistral, pythonic"),
        (["--dtype", "int8"], "dtype must be"),
        (["--max-model-len", "100000"], "max_model_len 100000 is more than the model's context"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(model, tmp_path, arguments, reason):
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    with socket.create_server(("127.0.0.1", 0)) as used:
        names = {"USED": str(used.getsockname()[1]), "EMPTY": str(empty)}
        arguments = [names.get(each, each) for each in arguments]
        if "--port" not in arguments:
            arguments += ["--port", "0"]
        result = subprocess.run(
            [*COMMAND, model, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    assert result.returncode == 1
    assert reason in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_model_that_is_not_there(tmp_path):
    result = subprocess.run(
        [*COMMAND, str(tmp_path / "nothing.gguf"), "--port", "0"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "error:" in result.stderr
    assert "Traceback" not in result.stderr
