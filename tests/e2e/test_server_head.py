"""Headers without end, sent to the real server."""

import socket

from live import live
from yocolm.server.http import MAX_HEAD


def exchange(port: int, pieces: list[bytes]) -> bytes:
    """What comes back, to the end of the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            while data := connection.recv(65536):
                answer += data
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server had enough
    return answer


def test_headers_have_a_limit_and_bodies_another() -> None:
    with live() as server:
        port = server.port
        begin = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        endless = exchange(port, [begin, *[b"a: " + b"b" * 8000 + b"\r\n"] * 1000])
        assert not endless or endless.startswith(b"HTTP/1.1 431 ")  # lost to a reset, or read
        body = b'{"model": "bundled", "prompt": "' + b"x" * 3 * MAX_HEAD + b'"}'
        head = begin + b"Content-Type: application/json\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        pieces = [head, *(body[i : i + 10_000] for i in range(0, len(body), 10_000))]
        assert exchange(port, pieces).startswith(b"HTTP/1.1 200 ")
        just = begin + b"a: " + b"b" * (MAX_HEAD // 2) + b"\r\nContent-Length: 2\r\n\r\n{}"
        assert exchange(port, [just]).startswith(b"HTTP/1.1 400 ")  # read, and wrong
        assert server.get("/health")[0] == 200
