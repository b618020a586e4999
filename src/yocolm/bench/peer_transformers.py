"""Hugging Face transformers as a peer: its model and cache in the shortest greedy loop.

Standalone: it runs in an interpreter that need not have yocolm.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import torch


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        loader: Any = import_module("transformers").AutoModelForCausalLM
        dtype = getattr(torch, options["dtype"])
        self._model = loader.from_pretrained(options["checkpoint"], dtype=dtype).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float | None]:
        begin = time.perf_counter()
        output = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            output = self._model(
                token, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1
            )
            token = output.logits[:, -1:].argmax(-1)
        each = (time.perf_counter() - first) / (new_tokens - 1) if new_tokens > 1 else None
        return {"first": first - begin, "each": each}
