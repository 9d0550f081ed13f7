"""HTTP by hand, for what no well-behaved client sends."""

import socket

from tests.server.live import PATIENCE, LiveServer


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def send(server: LiveServer, data: bytes) -> bytes:
    """Everything the server answers until it closes the connection."""
    with connect(server) as connection:
        connection.sendall(data)
        return receive(connection)


def receive(connection: socket.socket) -> bytes:
    answer = b""
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return answer
        if not part:
            return answer
        answer += part


def request(
    server: LiveServer,
    target: bytes = b"/version",
    *headers: bytes,
    method: bytes = b"GET",
    host: bytes | None = b"localhost",
    body: bytes = b"",
) -> tuple[int, bytes]:
    """Status and body of the answer to one request."""
    lines = [method + b" " + target + b" HTTP/1.1", *headers, b"Connection: close"]
    if host is not None:
        lines.insert(1, b"Host: " + host)
    if body:
        lines.append(b"Content-Length: %d" % len(body))
    answer = send(server, b"\r\n".join(lines) + b"\r\n\r\n" + body)
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), rest
