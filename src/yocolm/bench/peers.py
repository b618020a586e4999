"""`yocolm bench peers`: one checkpoint through several engines, in turn.

Each peer is a process in its own interpreter (`peer_main.py`). Rounds go over all peers, so that
what else the machine does meets them alike; while one measures, the others are stopped.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yocolm.bench.memory import PeakMemory
from yocolm.bench.report import gigabytes, milliseconds, ratio, table

HERE = Path(__file__).parent
OURS = "yocolm"
FIRST = 16  # tokens of the prompt whose first token ends the start
Progress = Callable[[str], None]


class PeerError(Exception):
    """What a peer says of its failure; it goes into the table."""


@dataclass(frozen=True)
class PeerSpec:
    """How a peer is started, and what its `Peer` class is given."""

    name: str
    command: Sequence[str]
    options: dict[str, Any] = field(default_factory=dict)


def peer_spec(name: str, python: str, kind: str, **options: Any) -> PeerSpec:
    """One of the peers of this package, in the interpreter `python`."""
    command = (python, str(HERE / "peer_main.py"), str(HERE / f"peer_{kind}.py"))
    return PeerSpec(name, command, options)


@dataclass(frozen=True)
class Workload:
    """Every prompt length with every batch, `repeats` times; `decode` new tokens each."""

    prompt_lengths: tuple[int, ...]
    batches: tuple[int, ...]
    decode: int
    repeats: int
    threads: int
    dtype: str = "bfloat16"
    timeout: float = 900.0

    @property
    def options(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "dtype": self.dtype,
            "batch": max(self.batches),
            "max_len": max(FIRST, *self.prompt_lengths) + self.decode,
        }


class Worker:
    """The process of a peer, stopped except inside `awake`."""

    def __init__(self, spec: PeerSpec, threads: int, timeout: float) -> None:
        self.name, self._timeout = spec.name, timeout
        try:
            self._process = subprocess.Popen(
                spec.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                preexec_fn=os.setpgrp,  # a group of its own, with all that it starts
            )
        except OSError as error:
            raise PeerError(f"{spec.command[0]} cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request. PeerError if it failed, ended, or took too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(self._ended()) from error
        if not select.select([self._process.stdout], [], [], self._timeout)[0]:
            self.close()
            raise PeerError(f"no answer within {self._timeout:g} s (--timeout)")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._ended())
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _ended(self) -> str:
        return f"the process ended with status {self._process.wait()}"

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass


def measure_peers(
    specs: Sequence[PeerSpec], checkpoint: str, vocab: int, work: Workload, say: Progress
) -> dict[str, Any]:
    """Start, memory and times of every peer; a peer that fails keeps its error, others go on."""
    run = _Run(work, vocab, say)
    try:
        for spec in specs:
            run.start(spec, checkpoint)
        cells = [run.cell(n, batch) for batch in work.batches for n in work.prompt_lengths]
        # Untimed and last, as looking at the memory of a process takes time from it.
        for name in list(run.workers):
            run.remember(name)
    finally:
        for worker in run.workers.values():
            worker.close()
    return {"checkpoint": checkpoint, "peers": run.peers, "cells": cells}


class _Run:
    """The workers that still work, and what is known of all."""

    def __init__(self, work: Workload, vocab: int, say: Progress) -> None:
        self.work, self.say = work, say
        self.workers: dict[str, Worker] = {}
        self.peers: dict[str, dict[str, Any]] = {}
        self._vocab = vocab

    def start(self, spec: PeerSpec, checkpoint: str) -> None:
        self.say(f"starting {spec.name}")
        self.peers[spec.name] = {}
        begin = time.perf_counter()
        try:
            worker = Worker(spec, self.work.threads, self.work.timeout)
        except PeerError as error:
            self.peers[spec.name]["error"] = str(error)
            return
        self.workers[spec.name] = worker
        options = {"checkpoint": checkpoint, **self.work.options, **spec.options}
        if self._ask(worker, do="load", **options) is None:
            return
        if self._ask(worker, do="run", prompts=self._prompts(FIRST, 1), new_tokens=1) is not None:
            self.peers[spec.name]["start_s"] = time.perf_counter() - begin

    def cell(self, length: int, batch: int) -> dict[str, Any]:
        """Times of all workers in turn, after a pass that is not counted."""
        prompts = self._prompts(length, batch)
        times: dict[str, dict[str, list[float]]] = {}
        for turn in range(self.work.repeats + 1):
            self.say(f"{length} tokens, batch {batch}: round {turn} of {self.work.repeats}")
            for name, worker in list(self.workers.items()):
                decode = self.work.decode if turn else min(self.work.decode, 2)
                got = self._ask(worker, do="run", prompts=prompts, new_tokens=decode)
                if turn and got is not None:
                    of = times.setdefault(name, {"ttft": [], "tpot": []})
                    of["ttft"].append(got["first"])
                    if got["each"] is not None:
                        of["tpot"].append(got["each"])
        return {"prompt": length, "batch": batch, "times": times}

    def remember(self, name: str) -> None:
        """Peak memory of one pass over the longest prompt."""
        worker = self.workers[name]
        prompts = self._prompts(max(self.work.prompt_lengths), 1)
        with PeakMemory(worker.pid) as peak:
            self._ask(worker, do="run", prompts=prompts, new_tokens=min(self.work.decode, 8))
        self.peers[name]["memory"] = peak.bytes

    def _ask(self, worker: Worker, **request: Any) -> dict[str, Any] | None:
        """None once it has failed; it is then closed and left out."""
        try:
            with worker.awake():
                return worker.ask(**request)
        except PeerError as error:
            self.peers[worker.name]["error"] = str(error)
            self.workers.pop(worker.name).close()
            return None

    def _prompts(self, length: int, batch: int) -> list[list[int]]:
        """The same for every peer; the lowest ids are special in many vocabularies."""
        draw = random.Random(length * 1009 + batch)
        low = min(8, self._vocab - 1)
        return [[draw.randrange(low, self._vocab) for _ in range(length)] for _ in range(batch)]


def peers_table(result: dict[str, Any]) -> str:
    """A block for each cell, then start and memory; ratios are ours to theirs."""
    head = ["tokens x batch", "peer", "TTFT ms (range)", "ours/", "TPOT ms (range)", "ours/"]
    rows: list[list[str]] = []
    for cell in result["cells"]:
        ours = cell["times"].get(OURS, {})
        for name, times in cell["times"].items():
            row = [f"{cell['prompt']} x {cell['batch']}", name]
            for key in ("ttft", "tpot"):
                both = ours.get(key) and times[key]
                row += [
                    milliseconds(times[key]),
                    f"{ratio(ours[key], times[key]):.2f}" if both else "-",
                ]
            rows.append(row)
    parts = [table(head, rows)] if rows else []
    rows = [_peer_row(name, about) for name, about in result["peers"].items()]
    parts.append(table(["peer", "start s", "anonymous GB", "file-backed GB"], rows))
    failed = [
        f"{name}: failed: {about['error']}"
        for name, about in result["peers"].items()
        if "error" in about
    ]
    return "\n\n".join([*parts, *failed])


def _peer_row(name: str, about: dict[str, Any]) -> list[str]:
    memory = about.get("memory", {})
    start = f"{about['start_s']:.1f}" if "start_s" in about else "-"
    return [name, start, gigabytes(memory.get("anonymous")), gigabytes(memory.get("file"))]
