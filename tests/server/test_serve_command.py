"""`billfish serve` as a user runs it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e import tiny_gguf
from tests.server.live import ONE_REQUEST, PATIENCE, wait_until
from tests.server.processes import NEEDS_PROC, alive, wait_until_gone

COMMAND = [sys.executable, "-m", "billfish", "serve"]
KEY = "a-key-for-this-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny-1.5.gguf"))


class Serving:
    """`billfish serve` on a port that it finds itself. log: the lines it wrote, so far."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments, "--port", "0"],
            stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
        )  # fmt: skip
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(iter(self.process.stderr.readline, ""))

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        return any("ready: " in line for line in self.log)

    @property
    def url(self) -> str:
        return re.search(r"listens on (http://[\d.:]+)", "".join(self.log))[1]

    def wait(self) -> int:
        """For its end, and for all that it wrote; its exit status."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def end(self) -> None:
        self.process.kill()  # unless it has ended
        self.wait()
        self.process.stderr.close()


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[Serving, httpx.Client]]:
    """The command, once it is ready, and a client of it."""
    server = Serving(*arguments, **environment)
    try:
        wait_until(server.is_ready)
        with httpx.Client(base_url=server.url, timeout=PATIENCE, limits=ONE_REQUEST) as http:
            yield server, http
    finally:
        server.end()


def test_it_serves_and_ends(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"# of this test\n\n{KEY}\n")
    config = tmp_path / "billfish.toml"
    config.write_text('[serve]\nlog-format = "json"\nserved-model-name = ["from-the-file"]\n')
    with serving(
        model, "--dtype", "float32", "--api-key-file", str(keys), "--shutdown-seconds", "60",
        BILLFISH_CONFIG=str(config), BILLFISH_SERVED_MODEL_NAME="mine other", BILLFISH_SEED="1",
    ) as (server, http):  # fmt: skip
        assert http.get("/health").json()["status"] == "ready"
        assert http.get("/v1/models").status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        models = http.get("/v1/models", headers=headers).json()["data"]
        assert [each["id"] for each in models] == ["mine", "other"]
        body = {"model": "other", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] in range(1, 5)
        # A stream that runs when the signal comes is served to its end.
        body |= {"max_tokens": 200, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() in (0, -signal.SIGTERM)
        log = [json.loads(line) for line in server.log]
        requests = [line for line in log if line["logger"] == "billfish.access"]
        assert requests[-1]["completion_tokens"] == 200
        assert requests[-1]["outcome"] == "length"
        assert {"request_id", "client", "method", "path", "status", "seconds"} <= set(requests[-1])
        assert not any(KEY in json.dumps(line) for line in log)


def test_ctrl_c_ends_it_and_its_engine(model):
    with serving(model, "--dtype", "float32", "--shutdown-seconds", "0") as (server, http):
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny-1.5"
        pid = server.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        engines = children.read_text().split() if children.exists() else []
        server.process.send_signal(signal.SIGINT)
        assert server.wait() in (130, -signal.SIGINT)
        assert not any(alive(int(engine)) for engine in engines)


@NEEDS_PROC
def test_kill_9_of_the_engine_and_of_both_leaves_nothing_behind(model):
    """The server outlives its engine and starts another; no engine outlives the server."""
    with serving(model, "--dtype", "float32") as (server, http):
        path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        (first,) = map(int, path.read_text().split())
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: http.get("/health").json()["restarts"] == 1)
        body = {"model": "tiny-1.5", "prompt": "Hi", "max_tokens": 2}
        wait_until(lambda: http.post("/v1/completions", json=body).status_code == 200)
        (second,) = map(int, path.read_text().split())
        assert first != second
        for pid in (server.process.pid, second):
            os.kill(pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        wait_until_gone(second)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--port", "USED"], "Address already in use; choose another with --port"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--api-key", "short"], "an API key must be 8 or more"),
        (["--api-key-file", "EMPTY"], "holds no API key"),
        (["--tool-call-parser", "nonsense"], "hermes, llama3_json, mistral, pythonic"),
        (["--dtype", "int8"], "dtype must be"),
        (["--kv-memory", "900000"], "GiB"),
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
            [*COMMAND, model, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert result.returncode == 1
    assert reason in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_an_empty_secret_does_not_open_the_server(model):
    result = subprocess.run(
        [*COMMAND, model, "--port", "0"], env={**os.environ, "BILLFISH_API_KEY": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "BILLFISH_API_KEY is set, and empty" in " ".join(result.stderr.split())


def test_a_model_that_is_not_there(tmp_path):
    result = subprocess.run(
        [*COMMAND, str(tmp_path / "nothing.gguf"), "--port", "0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "error:" in result.stderr
    assert "Traceback" not in result.stderr
