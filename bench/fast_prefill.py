"""Time to first token with fast prefill on and off, beside what the skipped FLOPs predict.

A random model in the shape of Gemma 4 E2B (35 layers in the 4:1 pattern, the last 20 without keys
and values of their own), bfloat16 on the CPU. Both sides run in turn; medians are printed, and with
--transformers also the time of that library's full pass over the same shape.

    python bench/fast_prefill.py --lengths 512,2048,8192 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from yocolm.config import AttentionConfig, Gemma4Config, RopeConfig
from yocolm.configs.gemma import FULL, SLIDING
from yocolm.engine.engine import Engine
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.models.base import CausalLM
from yocolm.models.registry import build_model
from yocolm.models.spec import model_spec

VOCAB = 8192
CONFIG = Gemma4Config(
    vocab_size=VOCAB,
    hidden_size=768,
    layer_types=(SLIDING, SLIDING, SLIDING, SLIDING, FULL) * 7,
    num_kv_shared_layers=20,
    full=AttentionConfig(4, 1, 512, RopeConfig(1e6, False, False, fraction=0.25)),
    sliding=AttentionConfig(4, 1, 256, RopeConfig(1e4, False, False), window=512),
    per_layer_size=128,
    per_layer_vocab_size=VOCAB,
    mlp_size=3072,
    wide_mlp=True,
    final_softcap=30.0,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens a step")
    parser.add_argument("--transformers", action="store_true", help="time its full pass as well")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = build_model(CONFIG, "cpu", torch.bfloat16).eval()
    cast(Any, model).init_weights(0)
    sides = {"on": _ours(model, True, arguments.chunk), "off": _ours(model, False, arguments.chunk)}
    if arguments.transformers:
        sides["transformers"] = _transformers()
    print("tokens  " + "".join(f"{side + ' s':>16}" for side in sides), end="")
    print(f"{'1 - on/off':>12}{'predicted':>12}{'ratio':>8}{'GFLOP/s off':>13}")
    for length in map(int, arguments.lengths.split(",")):
        _measure(sides, length, arguments.repeats)


def _measure(sides: dict[str, Callable[[list[int]], None]], length: int, repeats: int) -> None:
    spec = model_spec(CONFIG)
    ids = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, run in sides.items():
            start = time.perf_counter()
            run(ids)
            seconds[side].append(time.perf_counter() - start)
    median = {side: statistics.median(values) for side, values in seconds.items()}
    saved, predicted = 1 - median["on"] / median["off"], spec.skipped_share(length)
    rate = spec.prefill_flops(length) / (1 - predicted) / median["off"] / 1e9
    print(f"{length:<8}" + "".join(f"{value:>16.3f}" for value in median.values()), end="")
    print(f"{saved:>12.3f}{predicted:>12.3f}{saved / predicted:>8.3f}{rate:>13.0f}", flush=True)


def _ours(model: nn.Module, fast: bool, chunk: int) -> Callable[[list[int]], None]:
    settings = EngineSettings(
        fast_prefill=fast, max_num_batched_tokens=chunk, max_num_seqs=1, kv_memory="500MB"
    )
    engine = Engine(cast(CausalLM, model), CONFIG, settings=settings)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def run(ids: list[int]) -> None:
        engine.add_request("one", ids, params)
        while engine.has_unfinished_requests():
            engine.step()

    return run


def _transformers() -> Callable[[list[int]], None]:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    fields = {k: v for k, v in CONFIG.to_hf().items() if k not in ("model_type", "architectures")}
    theirs = Gemma4ForCausalLM(Gemma4TextConfig(**fields)).bfloat16().eval()

    @torch.inference_mode()
    def run(ids: list[int]) -> None:
        output = cast(Any, theirs).model(input_ids=torch.tensor([ids]), use_cache=True)
        theirs.lm_head(output.last_hidden_state[:, -1:])

    return run


if __name__ == "__main__":
    main()
