"""This engine as a peer."""

from __future__ import annotations

import time
from typing import Any

import torch

from yocolm import LLM, SamplingParams


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        llm = LLM(
            options["checkpoint"],
            dtype=options["dtype"],
            device="cpu",
            skip_tokenizer_init=True,
            max_num_seqs=options["batch"],
            max_model_len=options["max_len"],
            fast_prefill=options.get("fast_prefill", True),
        )
        self._engine = llm.engine

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float | None]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        begin = time.perf_counter()
        for i, ids in enumerate(prompts):
            self._engine.add_request(str(i), ids, params)
        waiting, first = {str(i) for i in range(len(prompts))}, 0.0
        while self._engine.has_unfinished_requests():
            started = {o.request_id for o in self._engine.step() if o.outputs[0].token_ids}
            if waiting and not (waiting := waiting - started):
                first = time.perf_counter()
        each = (time.perf_counter() - first) / (new_tokens - 1) if new_tokens > 1 else None
        return {"first": first - begin, "each": each}
