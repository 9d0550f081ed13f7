"""What users of other servers have reported again and again, each a test."""

import asyncio
import json
import socket
import threading

import httpx
import pytest

from billfish.config import SchedulerConfig
from billfish.engine.plan import NOT_FINITE, StepResult
from billfish.server.fake_engine import FakeEngine
from tests.server.conftest import chat
from tests.server.live import PATIENCE, LiveServer, live, wait_until
from tests.server.raw import connect

REPLY = "Hello! I am a fake model, and this is all I say. 🐟"
CHAT = "/v1/chat/completions"


def endless(**options) -> FakeEngine:
    """An engine whose answers end at max_tokens only; without it they outlast any test."""
    return FakeEngine("", max_model_len=1_000_000, num_blocks=70_000, **options)


def post(server: LiveServer, **options) -> httpx.Response:
    return server.http.post(CHAT, json=chat(**options))


BAD = [
    {"logit_bias": {"999999": 1}},
    {"stop_token_ids": [999_999]},
    {"allowed_token_ids": list(range(1025))},
    {"allowed_token_ids": [999_999]},
    {"bad_words": ["\ud83d"[:0] or "x" * 300]},
    {"n": -1},
    {"messages": []},
    {"min_tokens": 99_999},
    {"structured_outputs": {"regex": "("}, "ignore_eos": True},
]


def test_a_bad_request_neither_kills_the_engine_nor_changes_its_neighbours():
    """vllm #16529, #54196, #55164, #7283."""
    with live() as server:
        alone = post(server, text="a neighbour").json()["choices"]
        results = []
        server.call(server.engine.pause)
        neighbour = threading.Thread(
            target=lambda: results.append(post(server, text="a neighbour").json()["choices"])
        )
        neighbour.start()
        wait_until(lambda: server.engine._open)
        server.call(server.engine.resume)
        for bad in BAD:
            assert post(server, **bad).status_code == 400, bad
        for prompt in ("", [], [-1], [999_999], [[]], [5, None]):
            answer = server.http.post("/v1/completions", json={"model": "fake", "prompt": prompt})
            assert answer.status_code == 400, prompt
        neighbour.join(PATIENCE)
        assert results == [alone]
        assert server.http.get("/health").json()["restarts"] == 0
        server.wait_idle()


def test_echo_with_no_tokens():
    with live() as server:
        body = {"model": "fake", "prompt": "abc", "echo": True, "max_tokens": 0}
        answer = server.http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["running", "queued"])
def test_when_the_client_goes_its_blocks_come_back(stream, state):
    """vllm #9428, #54947."""
    scheduler = SchedulerConfig(max_num_seqs=1)
    with live(lambda: endless(scheduler=scheduler)) as server:
        clients = [begin(server, stream) for _ in range(1 if state == "running" else 2)]
        wait_for(server, running=1, waiting=len(clients) - 1)
        for client in reversed(clients):  # the queued one first
            client.close()
        server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_when_the_client_goes_in_the_middle_of_its_prompt_its_blocks_come_back(stream):
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16)
    with live(lambda: endless(scheduler=scheduler)) as server:
        server.pause_after(3)
        client = begin(server, stream, "x" * 1000)
        server.wait_paused()
        assert 0 < server.counters().blocks_in_use < 1000 // 16
        client.close()
        wait_until(lambda: not server.call(lambda: len(server.engine._streams)))
        server.call(server.engine.resume)
        server.wait_idle()
        assert server.counters().steps < 10


def begin(server: LiveServer, stream: bool, text: str = "Hi") -> socket.socket:
    """A connection with a request that has no end."""
    body = json.dumps(chat(text, stream=stream)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = connect(server)
    connection.sendall(head.encode() + body)
    return connection


def wait_for(server: LiveServer, **counts: int) -> None:
    wait_until(lambda: all(getattr(server.counters(), k) == n for k, n in counts.items()))


def test_when_the_client_goes_during_tokenization_nothing_is_started():
    with live(endless) as server:
        started, go = threading.Event(), threading.Event()
        real = server.engine.tokenizer.encode_chat

        def slow(*args, **kwargs):
            started.set()
            go.wait(PATIENCE)
            return real(*args, **kwargs)

        server.engine.tokenizer.encode_chat = slow
        client = begin(server, True)
        assert started.wait(PATIENCE)
        client.close()
        wait_until(lambda: not server.uvicorn.server_state.tasks)  # it has noticed
        go.set()
        server.wait_idle()
        assert server.counters().steps == 0


def test_emoji_across_tokens_and_no_half_characters():
    """vllm #48853: every chunk is whole characters, and together they are the text."""
    with live(lambda: FakeEngine("a🐟é\u200d👩\u200d🚀 ẞ 漢字 end")) as server:
        body = chat(stream=True)
        with server.http.stream("POST", CHAT, json=body) as answer:
            chunks = deltas(answer)
        assert "\ufffd" not in "".join(chunks)
        assert "".join(chunks) == "a🐟é\u200d👩\u200d🚀 ẞ 漢字 end"


def deltas(answer: httpx.Response) -> list[str]:
    events = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [json.loads(event)["choices"][0] for event in events]
    return [choice["delta"].get("content") or "" for choice in choices]


def test_a_text_that_ends_in_half_a_character():
    with live(lambda: FakeEngine("ab🐟")) as server:
        for stream in (False, True):
            with server.http.stream("POST", CHAT, json=chat(max_tokens=4, stream=stream)) as answer:
                if stream:
                    text = "".join(deltas(answer))
                else:
                    text = json.loads(answer.read())["choices"][0]["message"]["content"]
            assert text == "ab\ufffd"


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_ends_in_half_a_character_is_continued(stream):
    """What the model adds completes it: the whole character belongs to the answer."""
    fish = "🐟".encode()
    with live(lambda: FakeEngine(lambda prompt: "X")) as server:
        server.engine.executor._script = lambda prompt: [*fish[2:], ord("!")]
        body = {"model": "fake", "prompt": [*b"ab", *fish[:2]], "stream": stream}
        answer = server.http.post("/v1/completions", json=body)
        if stream:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
        else:
            text = answer.json()["choices"][0]["text"]
        assert text == "🐟!"


def test_a_partial_stop_string_is_neither_leaked_nor_lost():
    """vllm #3574."""
    with live(lambda: FakeEngine("one END two EN")) as server:
        for stop, expected in ((["END"], "one "), (["ENDE"], "one END two EN"), (["N"], "one E")):
            with server.http.stream("POST", CHAT, json=chat(stop=stop, stream=True)) as answer:
                seen = ""
                for part in deltas(answer):
                    seen += part
                    assert expected.startswith(seen)
            assert seen == expected
            assert post(server, stop=stop).json()["choices"][0]["message"]["content"] == expected


def test_a_cache_hit_does_not_change_the_answer():
    """vllm #5543, #22808, #13105: nor does it break log-probabilities of the prompt."""
    with live() as server:
        body = {"model": "fake", "prompt": "the same prompt " * 20, "logprobs": 2, "echo": True}
        first, second = (server.http.post("/v1/completions", json=body).json() for _ in range(2))
        assert first["choices"] == second["choices"]


def test_health_tells_the_truth():
    """sglang #6624, #22511: not yes while dead, nor no while busy."""
    scheduler = SchedulerConfig(max_num_seqs=1)
    with live(lambda: endless(scheduler=scheduler, start_by_hand=True)) as server:

        def health() -> tuple[int, str]:
            answer = server.http.get("/health")
            return answer.status_code, answer.json()["status"]

        assert health() == (503, "starting")
        refused = post(server)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_starting"
        assert "retry-after" in refused.headers
        assert server.http.get("/v1/models").status_code == 503
        server.call(server.engine.revive)
        assert health() == (200, "ready")
        clients = [begin(server, True) for _ in range(2)]
        wait_for(server, running=1, waiting=1)
        wait_until(lambda: health() == (200, "busy"))
        server.call(server.engine.die)
        assert health() == (503, "dead")
        assert "SIGKILL" not in server.http.get("/health").text
        assert post(server).json()["error"]["code"] == "engine_dead"
        server.call(server.engine.revive)
        assert health()[0] == 200
        assert post(server, max_tokens=3).status_code == 200
        for client in clients:
            client.close()


def test_when_the_engine_dies_in_mid_stream_the_client_is_told(caplog):
    caplog.set_level("INFO", "billfish.access")
    with live(endless) as server:
        with server.http.stream("POST", CHAT, json=chat(stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.call(server.engine.die)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_died"
        assert "data: [DONE]" not in rest  # what came is not the whole answer
    assert "status=200" in caplog.text  # which was sent before
    assert "outcome=engine_died" in caplog.text


def test_when_the_engine_dies_a_request_that_does_not_stream_gets_500():
    with live(endless) as server:
        results = []
        client = threading.Thread(target=lambda: results.append(post(server)))
        client.start()
        wait_for(server, running=1)
        server.call(server.engine.die)
        client.join(PATIENCE)
        assert results[0].status_code == 500
        assert results[0].json()["error"]["code"] == "engine_died"


def test_a_full_queue_is_told_with_429():
    scheduler = SchedulerConfig(max_num_seqs=1, max_waiting=2)
    with live(lambda: endless(scheduler=scheduler)) as server:
        clients = [begin(server, True)]
        wait_for(server, running=1)
        clients += [begin(server, True) for _ in range(2)]
        wait_for(server, running=1, waiting=2)
        answer = post(server)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        for client in clients:
            client.close()
        server.wait_idle()
        assert post(server, max_tokens=2).status_code == 200


def test_health_answers_at_once_during_a_huge_prompt():
    """vllm #24910: a long prompt is cut into tokens elsewhere than where requests are answered."""
    with live() as server:
        busy, go = threading.Event(), threading.Event()
        real = server.engine.tokenizer.encode

        def slow(*args, **kwargs):
            busy.set()
            assert go.wait(PATIENCE)
            return real(*args, **kwargs)

        server.engine.tokenizer.encode = slow
        body = {"model": "fake", "prompt": "x" * 4000}
        results = []
        client = threading.Thread(
            target=lambda: results.append(
                server.http.post("/v1/completions", json=body).status_code
            )
        )
        client.start()
        assert busy.wait(PATIENCE)
        assert server.http.get("/health").json()["status"] == "ready"
        go.set()
        client.join(PATIENCE)
        assert results == [200]


def test_a_prompt_of_a_megabyte_is_refused_without_tokenizing_it():
    with live() as server:
        server.engine.tokenizer.encode = None  # nobody calls it
        body = {"model": "fake", "prompt": "x" * (1 << 20)}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_request_that_can_never_fit_gets_numbers():
    """vllm #2248: what was asked, what there is."""
    with live() as server:
        body = {"model": "fake", "prompt": "x" * 3000, "max_tokens": 2000}
        message = server.http.post("/v1/completions", json=body).json()["error"]["message"]
        for number in ("3000", "2000", "4096"):
            assert number in message


def test_defaults_of_the_checkpoint_are_shown_and_requests_win():
    """vllm #15241: generation_config silently overriding."""

    def engine() -> FakeEngine:
        fake = FakeEngine()
        model = fake._local._model
        options = {"temperature": 0.3, "top_k": 7}
        fake._local._model = type(model)(
            **{name: getattr(model, name) for name in model.__struct_fields__}
            | {"default_sampling": options}
        )
        return fake

    with live(engine) as server:
        card = server.http.get("/v1/models").json()["data"][0]
        assert card["default_sampling"] == {"temperature": 0.3, "top_k": 7}
        seen = []
        server.engine.executor.on_step = lambda plan: seen.extend(plan.admitted)
        post(server, temperature=1.0)
        post(server)
        assert [(each.sampling.temperature, each.sampling.top_k) for each in seen] == [
            (1.0, 7), (0.3, 7),
        ]  # fmt: skip


def test_a_failed_sample_is_an_error_not_an_answer():
    def engine() -> FakeEngine:
        fake = FakeEngine()
        real = fake.executor.execute

        def broken(plan):
            result = real(plan)
            return StepResult(plan.step, failed=dict.fromkeys(result.token_ids, NOT_FINITE))

        fake.executor.execute = broken
        return fake

    with live(engine) as server:
        answer = post(server)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        server.wait_idle()


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones():
    with live(lambda: FakeEngine("x" * 3000), shutdown_seconds=PATIENCE) as server:
        server.pause_after(5)
        results = []
        client = threading.Thread(target=lambda: results.append(post(server)))
        client.start()
        server.wait_paused()
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        wait_until(server.refuses)
        server.call(server.engine.resume)
        client.join(PATIENCE)
        stopping.join(PATIENCE)
        assert results[0].status_code == 200
        assert len(results[0].json()["choices"][0]["message"]["content"]) == 3000
        with pytest.raises(httpx.ConnectError):
            post(server)


def test_what_still_runs_at_the_deadline_is_told():
    with live(endless, shutdown_seconds=0.2) as server:
        with server.http.stream("POST", CHAT, json=chat(stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            rest = [line for line in lines if line]
        stopping.join(PATIENCE)
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_draining"


def test_a_hundred_requests_leave_nothing_behind():
    """vllm #28726, #44175; sglang #6888, #11970: whatever way they end."""

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = chat(f"request {number}", stream=number % 2 == 0, n=1 + number % 3)
        if number % 5 == 0:
            body["stop"] = "model"
        if number % 7 == 0:
            body["temperature"] = "hot"
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if number % 3 == 0:
                async for _ in answer.aiter_raw():
                    break
            else:
                await answer.aread()

    async def main(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            await asyncio.gather(*(one(client, number) for number in range(100)))

    with live() as server:
        asyncio.run(main(server.url))
        server.wait_idle()
        assert not server.engine._streams
        assert server.engine._open == 0
