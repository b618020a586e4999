"""uvicorn's HTTP protocol with a limit on what comes before a body."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 1024  # bytes of a request's line and headers; more than any proxy lets through


class HttpProtocol(HttpToolsProtocol):
    """Ends a connection whose headers do not end: they are kept before any key is checked."""

    _in_head, _begun, _head = True, False, 0

    def on_message_begin(self) -> None:
        self._in_head, self._begun, self._head = True, True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._begun = False
        super().data_received(data)
        if not self._in_head or self._begun:  # of a head that begins here it is not known where
            return
        self._head += len(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            self._refuse()

    def _refuse(self) -> None:
        message = f"the request's headers exceed {MAX_HEAD} bytes: send fewer"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
