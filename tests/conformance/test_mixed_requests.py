"""Drawn, guided, streamed and embedded requests side by side in tight pools, some of them aborted.

Every one that ends is answered as it is when alone.
"""

import random
import re
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from scripted import tokenizer
from tiny import FAMILIES, assert_empty, assert_same, joined
from tolerances import CROSS_PATH
from yocolm.engine.engine import Engine
from yocolm.engine.guided import GuidedParams
from yocolm.engine.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.models.base import CausalLM
from yocolm.models.registry import build_model
from yocolm.models.spec import model_spec

END, PAGE = 0, 4
FORM = r"[he]{2,9}(lo|ld)? ?o*"
Params = SamplingParams | PoolingParams


def engine(name: str, seqs: int, pages: int, budget: int) -> Engine:
    config = replace(FAMILIES[name], vocab_size=tokenizer().vocab_size)
    model = build_model(config, "cpu", torch.float32)
    init = model.init_weights
    assert callable(init)
    init(1)
    spec = model_spec(config)
    memory = (seqs + 1) * spec.slot_bytes(4) + (pages + 1) * spec.page_bytes(PAGE, 4)
    settings = EngineSettings(
        max_num_batched_tokens=budget, max_num_seqs=seqs, kv_memory=memory, page_size=PAGE
    )
    return Engine(cast(CausalLM, model), config, tokenizer(), settings, (END,))


def random_params(rng: random.Random) -> Params:
    if rng.random() < 0.25:
        return PoolingParams(rng.choice(["LAST", "MEAN"]))
    fields: dict[str, Any] = {
        "n": rng.choice([1, 1, 3]),
        "temperature": rng.choice([0.0, 1.0, 3.0]),
        "seed": rng.randrange(2**40),
        "max_tokens": rng.randint(1, 14),
        "min_tokens": rng.choice([0, 1]),
        "ignore_eos": rng.random() < 0.3,
        "logprobs": rng.choice([None, 1]),
        "output_kind": rng.choice(list(RequestOutputKind)),
    }
    if rng.random() < 0.5:
        fields["structured_outputs"] = GuidedParams(regex=FORM)
    return SamplingParams(**fields)


@pytest.mark.parametrize("name", ["retention", "window-grouped", "llama"])
@pytest.mark.parametrize("seed", range(4))
def test_each_is_answered_as_alone(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    target = engine(name, rng.choice([2, 3, 5]), rng.randint(8, 14), rng.choice([3, 7, 40]))
    requests = {
        str(i): (rng.choices(range(1, 200), k=rng.randint(1, 12)), random_params(rng))
        for i in range(10)
    }
    waiting, outputs = list(requests), {request_id: [] for request_id in requests}
    while waiting or target.has_unfinished_requests():
        if waiting and rng.random() < 0.5:
            request_id = waiting.pop(0)
            target.add_request(request_id, *requests[request_id])
        for output in target.step():
            outputs[output.request_id].append(output)
        target.check()
        if rng.random() < 0.04:
            target.abort(rng.choice(list(requests)))
    assert_empty(target)
    alone, ended = engine(name, 5, 60, 64), 0
    for request_id, (prompt, params) in requests.items():
        if not outputs[request_id] or not outputs[request_id][-1].finished:
            continue  # aborted
        ended += 1
        deltas = False
        if isinstance(params, SamplingParams):
            deltas = params.output_kind is RequestOutputKind.DELTA
            params = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        alone.add_request(request_id, prompt, params)
        wanted = [output for _ in range(99) for output in alone.step()][-1]
        got = outputs[request_id]
        if isinstance(params, PoolingParams):
            assert got[-1].embedding == pytest.approx(
                wanted.embedding, abs=CROSS_PATH["float32"], rel=0
            )
            continue
        answer = joined(got) if deltas else got[-1]
        assert_same(answer, wanted)
        if params.structured_outputs is not None:
            for sample in answer.outputs:
                if sample.finish_reason == "stop":
                    assert re.fullmatch(FORM, sample.text)
    assert ended > 4
