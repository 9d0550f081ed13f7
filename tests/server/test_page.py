"""The page at /, as HTTP serves it. What it does in a browser: test_page_in_a_browser.py."""

import re
from collections.abc import Callable, Iterator
from importlib.resources import files

import httpx
import pytest

from billfish.server import page
from billfish.server.fake_engine import FakeEngine
from tests.server.conftest import chat
from tests.server.live import KEY, LiveServer, live, wait_until

BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def locked() -> Iterator[httpx.Client]:
    with live(api_keys=(KEY,)) as server:
        yield server.http


@pytest.mark.parametrize("path", sorted(page.PATHS))
def test_its_files_need_no_key_and_are_kept_from_harm(locked, path):
    answer = locked.get(path.decode())
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    again = locked.get(path.decode(), headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert locked.head(path.decode()).headers["content-length"] == str(len(answer.content))


def test_every_file_of_the_page_is_served():
    folder = files("billfish.server.page")
    there = {file.name for file in folder.iterdir() if not file.name.startswith("__")}
    assert there == {*page.NAMES, "index.html"}


def test_nothing_is_inline_and_nothing_is_from_elsewhere():
    folder = files("billfish.server.page")
    texts = {file.name: file.read_text() for file in folder.iterdir() if "__" not in file.name}
    html = texts["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|javascript:", html)
    for name, text in texts.items():
        found = re.findall(r"https?://[^\s\"']+|\b(?:src|href)=\"//", text)
        assert set(found) <= {"http://www.w3.org/2000/svg"}, name
    scripts = "".join(text for name, text in texts.items() if name.endswith(".js"))
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    assert not re.search(markup, scripts)


def test_the_state_of_the_engine_needs_the_key(locked):
    assert locked.get("/engine/state").status_code == 401
    assert locked.get("/engine/state", headers=BEARER).status_code == 200


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live(lambda: FakeEngine(reply="", num_blocks=64)) as running:
        yield running


def until(client: httpx.Client, true: Callable[[dict], bool]) -> dict:
    """The first state of which it is true: one answer serves for a tenth of a second."""
    states: list[dict] = []

    def come() -> bool:
        states[:] = [client.get("/engine/state").json()]
        return true(states[0])

    wait_until(come)
    return states[0]


def codes(blocks: dict) -> list[int]:
    runs = blocks["runs"]
    return [code for n, code in zip(runs[::2], runs[1::2], strict=True) for _ in range(n)]


def test_state_tells_blocks_groups_and_steps(server):
    client = server.http
    before = client.get("/engine/state").json()
    assert before["health"]["status"] == "ready"
    assert before["model"]["num_blocks"] == 64
    assert codes(before["engine"]["blocks"]) == [0] * 64
    assert before["engine"]["steps"] == []

    server.pause_after(20)
    body = chat("x" * 100, stream=True, n=2, max_tokens=300)
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert stream.status_code == 200
        server.wait_paused()
        state = until(client, lambda state: state["engine"]["counters"]["running"] == 2)
        server.call(server.engine.resume)
    engine = state["engine"]
    held = [code for code in codes(engine["blocks"]) if code > 1]
    assert len(held) == engine["counters"]["blocks_in_use"]
    groups = engine["blocks"]["groups"]
    shared = [code for code in held if groups[code - 2] == [2, [0, 1]]]
    # The prompt's full blocks are both samples'; what they write is their own.
    assert len(shared) >= 100 // 16
    assert {count for count, who in groups if len(who) == 1} == {1}
    assert engine["ttft"]["latest"] > 0
    numbers = [step[0] for step in engine["steps"]]
    assert numbers == sorted(numbers)
    assert engine["steps"][0][2] >= 100  # prefill tokens

    server.wait_idle()
    until(client, lambda state: state["engine"]["counters"]["running"] == 0)
    after = client.get("/engine/state", params={"after": numbers[-1]}).json()["engine"]
    assert all(step[0] > numbers[-1] for step in after["steps"])
    assert set(codes(after["blocks"])) == {0, 1}
    assert after["blocks"]["requests"] == []


def test_those_who_look_at_once_share_one_answer(server):
    asked = []

    def count() -> None:
        stats = server.engine.stats

        async def counted(**options):
            asked.append(options)
            return await stats(**options)

        server.engine.stats = counted

    server.call(count)
    client = server.http
    client.get("/version")
    assert asked == []  # nobody looked
    client.get("/engine/state")
    assert asked == [{"block_map": True}]


def test_state_of_an_engine_that_is_dead(server):
    client = server.http
    client.get("/engine/state")
    server.call(server.engine.die, "killed by /some/path")
    until(client, lambda state: state["engine"] is None)
    answer = client.get("/engine/state")
    assert answer.status_code == 200
    assert answer.json()["health"]["status"] == "dead"
    assert "/some/path" not in answer.text


@pytest.mark.parametrize("after", ["x", "-2", "1e3", str(2**53), ""])
def test_steps_after_what_is_no_number(server, after):
    answer = server.http.get("/engine/state", params={"after": after})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "after"
