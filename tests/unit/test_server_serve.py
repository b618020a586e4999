"""The end of a server, and clients that do not read."""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

import pytest

from scripted import scripted_engine
from serving import service_of
from yocolm.server import serve
from yocolm.server.serve import DrainingServer, configure


@dataclass(eq=False)
class Connection:
    """As uvicorn keeps them."""

    transport: asyncio.Transport


def server_of(**settings: Any) -> DrainingServer:
    service = service_of(scripted_engine([]), **settings)
    return DrainingServer(configure(service), service)


@pytest.mark.parametrize("written", [True, False])
def test_a_drain_waits_for_responses(written: bool) -> None:
    """Until they are written, or else until its time is over; the rest of it is for closing."""

    async def main() -> None:
        server = server_of(drain_timeout=1000 if written else 0.1)
        release = asyncio.Event()
        response: Any = asyncio.create_task(release.wait())
        server.server_state.tasks.add(response)
        drain = asyncio.create_task(server._drain())
        if written:
            await asyncio.sleep(0.05)
            assert not server.should_exit and not drain.done()
            release.set()
        await asyncio.wait_for(drain, 60)
        assert server.should_exit and response.done() == written
        left = server.config.timeout_graceful_shutdown
        assert left is not None and (left > 900 if written else left == 5)
        release.set()
        await response

    asyncio.run(main())


@pytest.mark.parametrize("limit", [20.0, 0.0])
def test_a_client_that_stops_reading_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    """One that reads on, however slowly, is not, nor one that has nothing to read."""
    monkeypatch.setattr(serve, "WRITE_TIMEOUT", 20.0)

    async def main() -> None:
        server = server_of(request_timeout=limit)
        ends = []

        async def connect(size: int) -> tuple[asyncio.Transport, socket.socket]:
            here, there = socket.socketpair()
            ends.extend((here, there))
            there.setblocking(False)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=here)
            transport.write(bytes(size))
            connection: Any = Connection(transport)
            server.server_state.connections.add(connection)
            return transport, there

        stuck, _ = await connect(2**24)
        slow, reader = await connect(2**24)
        idle, _ = await connect(0)
        for now in (0.0, 10.0, 19.0):
            server._cut_off_unread(now)
            assert not stuck.is_closing()
            before = slow.get_write_buffer_size()
            while slow.get_write_buffer_size() == before:
                reader.recv(2**16)
                await asyncio.sleep(0)
        server._cut_off_unread(20.0)
        assert stuck.is_closing() and not slow.is_closing() and not idle.is_closing()
        server._cut_off_unread(41.0)
        assert slow.is_closing() and not idle.is_closing()
        idle.close()
        await asyncio.sleep(0)
        for end in ends:
            end.close()

    asyncio.run(main())
