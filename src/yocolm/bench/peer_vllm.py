"""vLLM on the CPU as a peer, with its engine in this process.

Standalone: it runs in an interpreter that need not have yocolm. Options are `fast_prefill` (its
--kv-sharing-fast-prefill) and `eager` (its --enforce-eager).
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            # Left to the system, as the others are: pinned threads lose to whoever else runs.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "2",
        }
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        vllm: Any = import_module("vllm")
        llm = vllm.LLM(
            options["checkpoint"],
            dtype=options["dtype"],
            skip_tokenizer_init=True,
            enforce_eager=options["eager"],
            kv_sharing_fast_prefill=options["fast_prefill"],
            enable_prefix_caching=False,
            max_model_len=options["max_len"],
            max_num_seqs=options["batch"],
            max_num_batched_tokens=max(2048, options["batch"]),
        )
        self._llm, self._params = llm, vllm.SamplingParams
        self._count = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float | None]:
        engine = self._llm.llm_engine
        params = self._params(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        waiting = set()
        for ids in prompts:
            self._count += 1
            engine.add_request(str(self._count), {"prompt_token_ids": ids}, params)
            waiting.add(str(self._count))
        first = 0.0
        while engine.has_unfinished_requests():
            started = {o.request_id for o in engine.step() if o.outputs[0].token_ids}
            if waiting and not (waiting := waiting - started):
                first = time.perf_counter()
        each = (time.perf_counter() - first) / (new_tokens - 1) if new_tokens > 1 else None
        return {"first": first - begin, "each": each}
