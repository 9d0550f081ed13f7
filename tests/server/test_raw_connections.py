"""Connections that no well-behaved client makes, and what becomes of their neighbours."""

import json
import logging
import re
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from billfish.server import body as bodies
from billfish.server.fake_engine import FakeEngine
from billfish.server.protocol import unread
from tests.server.conftest import chat
from tests.server.live import PATIENCE, live, wait_until
from tests.server.raw import receive, request, send

HOST = b"Host: localhost\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt":"x"}'
LAST = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def endless() -> FakeEngine:
    return FakeEngine("")


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+)", answer)]


def streaming(**options: object) -> bytes:
    body = json.dumps(chat(stream=True, **options)).encode()
    head = POST.replace(b"/tokenize", b"/v1/chat/completions")
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("target", [b"/", b"/health", b"/version", b"/v1/models", b"/metrics"])
def test_head_is_get_without_its_body(server, target):
    assert request(server, target)[0] == 200
    answer = send(server, b"HEAD %s HTTP/1.1\r\n" % target + HOST + b"Connection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b""
    assert re.search(rb"content-length: [1-9]", head)


def test_methods_that_a_path_does_not_take_are_told_which_it_does(server):
    answer = server.http.put("/health")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert server.http.head("/tokenize").status_code == 405


def test_a_trailer_does_not_pass_for_a_header(server):
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\ne\r\n" + BODY + b"\r\n0\r\n"
    answer = send(server, chunked + b"X-Request-Id: mine\r\nHost: evil.example\r\n\r\n" + LAST)
    assert statuses(answer) == [200, 200]
    assert b"x-request-id: mine" not in answer
    endless_trailers = b"".join(b"X%d: %s\r\n" % (i, b"y" * 100) for i in range(1000))
    assert send(server, chunked + endless_trailers).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Content-Encoding: gzip", 415),
        (b"Content-Encoding: identity", 200),
        (b"Content-Encoding: identity, gzip", 415),
    ],
)
def test_encoded_bodies_are_refused_and_nothing_is_unpacked(server, header, status):
    headers = (header, b"Content-Type: application/json")
    assert request(server, b"/tokenize", *headers, method=b"POST", body=BODY)[0] == status


def test_bodies_in_transfer_codings_but_chunked_are_refused(server):
    head = POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n"
    assert statuses(send(server, head + b"e\r\n" + BODY + b"\r\n0\r\n\r\n" + LAST)) == [400, 200]


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_who_offers_to_upgrade_is_answered_as_if_it_had_not(server, framing, pieces):
    """As Java's client does with every first request."""
    data = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    if framing == "length":
        data += b"Content-Length: 14\r\n\r\n" + BODY
    else:
        data += b"Transfer-Encoding: chunked\r\n\r\n4\r\n" + BODY[:4] + b"\r\na\r\n" + BODY[4:]
        data += b"\r\n0\r\n\r\n"
    data += (
        b"GET /health HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + HOST + b"\r\n"
    )
    data += LAST
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        for at in range(0, len(data), step := -(-len(data) // pieces)):
            connection.sendall(data[at : at + step])
        answer = receive(connection)
    assert statuses(answer) == [200, 200, 200]
    assert b'"tokens":[120]' in answer


def test_answers_keep_the_order_of_requests_when_a_later_one_is_malformed(server):
    good = POST + b"Content-Length: 14\r\n\r\n" + BODY
    for bad in (
        b"nonsense\r\n\r\n",
        b"GET /version HTTP/1.1\r\nBad Header: x\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    ):
        answer = send(server, good + LAST.replace(b"Connection: close\r\n", b"") + bad + LAST)
        assert statuses(answer) == [200, 200, 400]
        first, _, _ = answer.partition(b"HTTP/1.1 400")
        assert b'"tokens":[120]' in first


def test_a_malformed_request_does_not_cut_into_a_stream():
    with live(endless) as server:
        answer = send(server, streaming(max_tokens=2000) + b"nonsense\r\n\r\n")
    assert statuses(answer) == [200, 400]
    stream, _, _ = answer.partition(b"HTTP/1.1 400")
    assert stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_requests_that_wait_on_one_connection_are_limited():
    with live(endless) as server:
        server.call(server.engine.pause)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            version = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.sendall(streaming(max_tokens=3) + version * 300)
            server.call(server.engine.resume)
            answer = receive(connection)
    assert statuses(answer) == [200] * 101 + [400]


def test_a_client_that_pipelines_and_goes_aborts_what_runs(caplog):
    with live(endless) as server:
        server.pause_after(5)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(streaming(max_tokens=4000, n=4) * 3)
            server.wait_paused()
        wait_until(lambda: not server.uvicorn.server_state.connections)
        server.call(server.engine.resume)
        server.wait_idle()
        finished = server.call(server.engine.stats).counters.finished
    assert finished == {"abort": 4}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_client_that_reads_nothing_of_its_answer_is_dropped(caplog):
    with live(write_seconds=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
            with suppress(ConnectionError):  # it may be dropped before it has asked for all
                for _ in range(10):
                    connection.sendall(ask * 20)
            wait_until(lambda: not server.uvicorn.server_state.connections)
        assert server.http.get("/health").json()["status"] == "ready"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_a_slow_client_has_read_is_seen_before_the_system_asks_for_more():
    """So that one that does read is not dropped."""

    class Transport:
        def get_write_buffer_size(self) -> int:
            return 1000

        def get_extra_info(self, name: str) -> socket.socket:
            return ours

    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = unread(Transport())
        ours.sendall(b"x" * 5000)
        assert unread(Transport()) >= before + 5000
        theirs.recv(5000, socket.MSG_WAITALL)
        assert unread(Transport()) == before == 1000


def test_bodies_of_all_requests_together_are_limited(monkeypatch):
    """Each is within its bounds, and there may be thousands of connections."""
    monkeypatch.setattr(bodies, "MAX_HELD", 50_000)
    with live(max_body_bytes=40_000) as server:
        half = POST + b"Content-Length: 40000\r\n\r\n" + b" " * 30_000
        ask = {"prompt": "x" * 30_000}
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as slow:
            slow.sendall(half)
            wait_until(lambda: server.http.post("/tokenize", json=ask).status_code == 429)
            answer = server.http.post("/tokenize", json=ask)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        wait_until(lambda: server.http.post("/tokenize", json=ask).status_code != 429)


# Web pages that are allowed to use the API see its errors, and may send what their clients send.


def test_allowed_pages_see_errors_and_send_headers_of_their_own():
    origin = {"Origin": "https://good.example"}
    with live(allowed_origins=("https://good.example",), api_keys=("a-key-for-this",)) as server:
        url = "/v1/chat/completions"
        asked = server.http.options(url, headers={
            **origin, "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os,x-stainless-lang",
        })  # fmt: skip
        assert asked.status_code == 200
        assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
        key = {"Authorization": "Bearer a-key-for-this"}
        refused = [
            server.http.post(url, json=chat(), headers=origin),
            server.http.post(url, content=b"x", headers={**origin, **key}),
            server.http.post(url, json=chat(n=0), headers={**origin, **key}),
        ]
    assert [answer.status_code for answer in refused] == [401, 415, 400]
    for answer in refused:
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert answer.json()["error"]["message"]


# File descriptors.


def test_connections_leave_file_descriptors_for_the_engine():
    code = """if True:
        import resource
        from billfish.server.run import with_enough_files
        from billfish.server.settings import ServerSettings

        def most(soft, hard, asked):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            settings = with_enough_files(ServerSettings(max_connections=asked))
            return settings.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0]

        assert most(128, 1024, 500) == (500, 564)
        assert most(600, 1024, 500) == (500, 600)
        assert most(128, 1024, 4096) == (960, 1024)
        assert most(50, 50, 4096) == (1, 50)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
