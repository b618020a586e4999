"""llama.cpp as a peer, through its own `llama-batched-bench`: a process for each measurement.

Standalone. It draws its own random prompts. Options are `binaries` (a folder) and `gguf`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

TOOL = "llama-batched-bench"


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._tool = Path(options["binaries"]).absolute() / TOOL
        for path in (self._tool, Path(options["gguf"])):
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist")

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float | None]:
        length, batch = len(prompts[0]), len(prompts)
        # It pads each sequence's part of the context to 256 tokens.
        context = -(-(length + new_tokens) // 256) * 256 * batch
        numbers = {
            "-t": self._options["threads"],
            "-c": context,
            "-npp": length,
            "-ntg": max(1, new_tokens - 1),
            "-npl": batch,
        }
        command = [str(self._tool), "-m", self._options["gguf"], "--output-format", "jsonl"]
        command += [str(part) for pair in numbers.items() for part in pair]
        libraries = f"{self._tool.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"{TOOL} ended with {done.returncode}: {last}")
        result = json.loads(lines[-1])
        each = result["t_tg"] / (new_tokens - 1) if new_tokens > 1 else None
        return {"first": result["t_pp"], "each": each}
