"""Several ranks of one training as real processes, which may be killed."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from yocolm.train.distributed import Ranks, join_ranks
from yocolm.train.settings import parse_settings
from yocolm.train.trainer import Trainer

PATIENCE = 600.0  # seconds; no test waits that long unless it fails

# Forked from a server that has imported what is slow to import.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.checkpoint.state_dict_loader",
        "torch.distributed.checkpoint.state_dict_saver",
        "torch.distributed.fsdp",
        "torch.nn.parallel",
        "pytest",
        "tokenizers",
        "yocolm.train.stages",
    ]
)


class World:
    """``size`` processes that run ``work(ranks, *given)`` as ``torchrun`` would start them."""

    def __init__(self, size: int, work: Callable[..., Any], *given: Any) -> None:
        self.ends: list[Connection] = []
        self.processes: list[BaseProcess] = []
        port = _free_port()
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_rank, args=(rank, size, port, theirs, work, given))
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def results(self) -> list[Any]:
        """What the ranks return; a rank that failed makes the test fail with its traceback."""
        found = []
        for rank, end in enumerate(self.ends):
            assert end.poll(PATIENCE), f"rank {rank} hangs"
            value, error = end.recv()
            assert error is None, f"rank {rank}:\n{error}"
            found.append(value)
        self.join()
        return found

    def join(self) -> list[int | None]:
        """Wait for the end of all; return their exit codes."""
        for process in self.processes:
            process.join(PATIENCE)
            assert process.exitcode is not None, f"{process.name} hangs"
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """Kill -9 all that are left."""
        for process in self.processes:
            process.kill()
        self.join()


def run(size: int, work: Callable[..., Any], *given: Any) -> list[Any]:
    """What ``work(ranks, *given)`` returns on each of ``size`` ranks."""
    return World(size, work, *given).results()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    rank: int, size: int, port: int, end: Connection, work: Callable[..., Any], given: Any
) -> None:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        with join_ranks("cpu") as ranks:
            value = work(ranks, *given)
        end.send((value, None))
    except BaseException:
        end.send((None, traceback.format_exc()))
        raise


def make(ranks: Ranks, values: Mapping[str, Any]) -> Trainer:
    """A trainer of the configuration ``values`` that prints into ``progress.out``."""
    return Trainer(parse_settings(values), io.StringIO(), ranks)


def changed(values: Mapping[str, Any], output: str, **parallel: Any) -> dict[str, Any]:
    """The same training in another folder beside the first, shared by ranks in another way."""
    folder = Path(values["output_dir"]).parent / output
    return {**values, "output_dir": str(folder), "parallel": parallel}
