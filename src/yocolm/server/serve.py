"""Running the application under uvicorn: signals, draining, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from math import ceil
from typing import Any

import uvicorn

from yocolm.errors import ConfigError
from yocolm.server.app import make_app
from yocolm.server.errors import unavailable
from yocolm.server.http import HttpProtocol
from yocolm.server.service import Service

log = logging.getLogger("yocolm.server")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LINGER = 2.0  # seconds in which a dead engine's server still tells its clients
_LAST_WORDS = 5  # least seconds for connections to close at the end
WRITE_TIMEOUT = 300.0  # seconds in which a client has to read something, unless requests have less
_LOOK = 10  # uvicorn's ticks between looks at what clients have read, of a tenth of a second each


class DrainingServer(uvicorn.Server):
    """Ends at the first signal when running requests are done, at the second one at once.

    New requests are answered with 503 meanwhile, so that a load balancer turns to others.
    ``status`` is that of the process: 0, or 1 if the engine has stopped.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()
        self._unread: dict[Any, tuple[int, float]] = {}  # of connections: bytes, and since when
        self.status = 0
        service.loop.on_death = self._on_death

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self._service.loop.draining or self.should_exit:
            log.warning("second signal: stopping at once")
            os._exit(128 + number)  # threads and clients are not waited for
        log.info("signal %d: no new requests, running ones finish", number)
        self._start(self._drain())

    async def _drain(self) -> None:
        """Wait until what runs is done and written; all within the drain timeout."""
        limit = self._service.settings.drain_timeout
        begin = time.monotonic()
        if await self._service.loop.drained(limit):
            responses = set(self.server_state.tasks)
            if responses:
                await asyncio.wait(responses, timeout=limit - (time.monotonic() - begin))
        else:
            log.warning("requests were still running after %g s; they end here", limit)
            self._service.loop.give_up(unavailable("the server is shutting down"))
        left = limit - (time.monotonic() - begin)  # for what clients have still to read
        self.config.timeout_graceful_shutdown = max(_LAST_WORDS, ceil(left))
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % _LOOK == 0:
            self._cut_off_unread(time.monotonic())
        return await super().on_tick(counter)

    def _cut_off_unread(self, now: float) -> None:
        """End the connections of clients that have stopped reading: they would stay for ever."""
        limit = self._service.settings.request_timeout or WRITE_TIMEOUT
        seen, self._unread = self._unread, {}
        connections: set[Any] = set(self.server_state.connections)
        for connection in connections:
            waiting = connection.transport.get_write_buffer_size()
            if not waiting:
                continue
            before, since = seen.get(connection, (None, now))
            if waiting != before:
                since = now
            elif now - since >= limit:
                log.warning("a client has read nothing for %g s: its connection is ended", limit)
                connection.transport.abort()
                continue
            self._unread[connection] = waiting, since

    def _on_death(self) -> None:
        self.status = 1
        self._start(self._linger())

    async def _linger(self) -> None:
        await asyncio.sleep(LINGER)
        self.should_exit = True

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def bind(host: str, port: int) -> socket.socket:
    """A socket on which nobody is heard yet. Raises ConfigError if that cannot be."""
    bound = None
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, number)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise ConfigError(
            f"cannot listen on host {host!r}, port {port}: {error.strerror}; give another"
        ) from error
    return bound


def serve(service: Service, listening: socket.socket) -> int:
    """Serve until a signal or the death of the engine; returns the exit status."""
    settings = service.settings
    server = DrainingServer(configure(service), service)
    host, port = listening.getsockname()[:2]
    scheme = "http" if settings.ssl_keyfile is None else "https"
    log.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
    server.run([listening])
    return server.status


def configure(service: Service) -> uvicorn.Config:
    """What uvicorn is told."""
    settings = service.settings
    return uvicorn.Config(
        make_app(service),
        root_path=settings.root_path,
        log_config=None,
        http=HttpProtocol,
        access_log=settings.access_log,
        server_header=False,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_LAST_WORDS,
        ws="none",
    )
