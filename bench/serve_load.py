"""Load on a server, and on the offline engine with the same trace: run by hand.

    python bench/serve_load.py --seconds 120 --concurrency 64
    python bench/serve_load.py --offline --requests 512

The server runs in a process of its own; this one is the clients. Of the server it reports errors,
memory at the end and at its half, the longest wait for a first token, and processor time for each
streamed token outside the engine's steps; with ``--offline`` also the throughput of the same
requests through the engine alone, driven from the same kind of process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from urllib.request import urlopen

VOCAB = 4096
# The server would else take the model's own defaults, and sampling is a good part of a small step.
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Request:
    """One request of the trace; ``abort_after`` chunks its client hangs up."""

    prompt: list[int]
    max_tokens: int
    abort_after: int | None


@dataclass
class Result:
    """What the clients have seen."""

    done: int = 0
    aborted: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def draw(source: random.Random, aborts: float) -> Request:
    """A request: mostly short prompts, some long ones."""
    long = source.random() < 0.2
    length = source.randint(400, 1400) if long else source.randint(4, 200)
    max_tokens = source.randint(16, 160)
    prompt = [source.randrange(1, VOCAB) for _ in range(length)]
    abort = source.randint(1, max_tokens) if source.random() < aborts else None
    return Request(prompt, max_tokens, abort)


def body_of(request: Request, model: str) -> bytes:
    fields = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "stream": True,
        **SAMPLING,
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def send(port: int, model: str, request: Request, result: Result) -> None:
    """One exchange over a connection of its own."""
    begin = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(body_of(request, model))
        status = await reader.readline()
        if b" 200 " not in status:
            result.errors.append((status + await reader.read(2000)).decode())
            return
        chunks, tail = -1, b""
        while True:
            data = await reader.read(65536)
            if not data:
                result.errors.append("the connection ended before [DONE]")
                return
            if chunks < 0:
                result.first.append(time.monotonic() - begin)
                chunks = 0
            new = data.count(b'"finish_reason"')  # one in each chunk
            chunks += new
            result.tokens += new
            tail = (tail + data)[-40:]
            if b'"error"' in data:
                result.errors.append(data.decode(errors="replace")[:300])
                return
            if b"[DONE]" in tail:
                result.done += 1
                return
            if request.abort_after is not None and chunks >= request.abort_after:
                result.aborted += 1
                return
    finally:
        writer.close()


async def drive(port: int, arguments: argparse.Namespace, pid: int) -> Result:
    source, result = random.Random(arguments.seed), Result()
    begin = time.monotonic()
    left = arguments.requests or 10**9
    half: list[int] = []

    async def client() -> None:
        nonlocal left
        while left > 0 and time.monotonic() - begin < arguments.seconds:
            left -= 1
            await send(port, arguments.model, draw(source, arguments.aborts), result)

    async def watch() -> None:
        while True:
            await asyncio.sleep(arguments.seconds / 10)
            half.append(memory_of(pid))

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(client() for _ in range(arguments.concurrency)))
    watcher.cancel()
    wall = time.monotonic() - begin
    report("wall_s", wall)
    report("tokens_per_s", result.tokens / wall)
    report("anonymous_MiB", [round(value / 2**20, 1) for value in half])
    return result


def memory_of(pid: int) -> int:
    """Anonymous memory of a process in bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        found = re.search(r"RssAnon:\s+(\d+) kB", file.read())
    return int(found.group(1)) * 1024 if found else 0


def cpu_of(pid: int) -> float:
    """Processor seconds of a process and those it has started."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        started = sum(cpu_of(int(child)) for child in file.read().split())
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return started + (int(fields[11]) + int(fields[12])) / TICKS


def metrics(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"
    }


def value(found: dict[str, float], name: str) -> float:
    return sum(number for key, number in found.items() if key.startswith(f"yocolm:{name}{{"))


def report(name: str, number: object) -> None:
    print(f"{name}: {number:.4g}" if isinstance(number, float) else f"{name}: {number}", flush=True)


def over_http(arguments: argparse.Namespace) -> int:
    port = arguments.port
    command = (
        arguments.command.split()
        if arguments.command
        else [*(sys.executable, "-m", "yocolm.cli", "serve", arguments.model, "--port", str(port))]
    )
    server = subprocess.Popen(command)
    try:
        wait_for(port)
        warm = Result()
        asyncio.run(send(port, arguments.model, draw(random.Random(0), 0.0), warm))
        cpu, before = cpu_of(server.pid), metrics(port)
        own = resource.getrusage(resource.RUSAGE_SELF)
        result = asyncio.run(drive(port, arguments, server.pid))
        spent, after = cpu_of(server.pid) - cpu, metrics(port)
        mine = resource.getrusage(resource.RUSAGE_SELF)
        step = value(after, "step_cpu_seconds_total") - value(before, "step_cpu_seconds_total")
        drawn = value(after, "generation_tokens_total") - value(before, "generation_tokens_total")
        steps = value(after, "engine_steps_total") - value(before, "engine_steps_total")
        report("requests", (result.done, result.aborted, len(result.errors)))
        report("errors", result.errors[:3])
        report("tokens", (result.tokens, int(drawn)))
        report("steps", int(steps))
        report("server_cpu_s", spent)
        report("step_cpu_s", step)
        report("cpu_ms_per_token_outside_step", 1000 * (spent - step) / max(1.0, drawn))
        report("client_cpu_s", mine.ru_utime + mine.ru_stime - own.ru_utime - own.ru_stime)
        result.first.sort()
        report("first_token_s_median", result.first[len(result.first) // 2])
        report("first_token_s_worst", result.first[-1])
        time.sleep(1)
        left = metrics(port)
        report("left_in_pools", {k: v for k, v in left.items() if "pool_bytes" in k})
        return 1 if result.errors else 0
    finally:
        server.send_signal(signal.SIGTERM)
        report("exit", server.wait(60))


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            with urlopen(f"http://127.0.0.1:{port}/ready"):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def offline(arguments: argparse.Namespace) -> int:
    """The same requests through the engine, as many at a time, text made and taken in deltas."""
    from yocolm.engine.llm import LLM
    from yocolm.engine.sampling_params import RequestOutputKind, SamplingParams

    engine = LLM(arguments.model).engine
    source = random.Random(arguments.seed)
    left, tokens, running, number = arguments.requests, 0, 0, 0
    begin, cpu = time.monotonic(), time.process_time()
    while left or running:
        while left and running < arguments.concurrency:
            request = draw(source, 0.0)
            params = SamplingParams(
                max_tokens=request.max_tokens,
                ignore_eos=True,
                **SAMPLING,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(number), request.prompt, params)
            left, running, number = left - 1, running + 1, number + 1
        for output in engine.step():
            tokens += sum(len(sample.token_ids) for sample in output.outputs)
            running -= output.finished
    wall = time.monotonic() - begin
    report("offline_tokens", tokens)
    report("offline_steps", engine.scheduler.num_steps)
    report("offline_wall_s", wall)
    report("offline_cpu_s", time.process_time() - cpu)
    report("offline_tokens_per_s", tokens / wall)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--command", help="start the server so, instead of `yocolm serve`")
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--requests", type=int, default=0, help="end after so many")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--aborts", type=float, default=0.0, help="share of clients that hang up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--offline", action="store_true", help="the engine alone")
    arguments = parser.parse_args()
    return offline(arguments) if arguments.offline else over_http(arguments)


if __name__ == "__main__":
    sys.exit(main())
