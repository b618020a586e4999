"""Memory of a step of training grows with the length of its sequence, not with its square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from training import MODELS
from yocolm.config import parse_config
from yocolm.models.registry import build_model
from yocolm.train.objective import Objective

VOCAB = 300


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors and scratch that exist at once, beside those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    assert record.profiler is not None and record.profiler.kineto_results is not None
    events: Any = record.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def step(length: int, family: str = "yoco", checkpointing: bool = True, **fields: Any) -> int:
    """Peak of the forward and backward pass on one sequence, in bfloat16 as in training."""
    given = {**MODELS[family], "vocab_size": VOCAB, "max_position_embeddings": length, **fields}
    model = build_model(parse_config(given), "cpu", torch.float32)
    model.init_weights(0)  # type: ignore[operator]
    model.gradient_checkpointing = checkpointing  # type: ignore[assignment]
    objective = Objective(model, torch.bfloat16, chunk_size=128)
    ids = torch.randint(VOCAB, (length + 1,), generator=torch.Generator().manual_seed(0))
    return peak_bytes(lambda: objective(ids[:-1], ids[1:], [length]).backward())


def test_the_record_sees_what_lives_at_once() -> None:
    def work() -> None:
        a = torch.zeros(1000)
        del a
        b = torch.zeros(500)
        c = torch.zeros(700)
        del b, c

    assert peak_bytes(work) == pytest.approx(4800, abs=200)
    assert peak_bytes(lambda: torch.zeros(300, 300).softmax(-1)) >= 2 * 4 * 300**2


@pytest.mark.parametrize("family", MODELS)
def test_twice_the_length_takes_twice_the_memory(family: str) -> None:
    short, long = (step(length, family) for length in (3072, 6144))
    assert long <= 2.2 * short


def test_a_layer_keeps_its_input_alone() -> None:
    length, width = 4096, 32
    few, many = (
        step(length, num_hidden_layers=layers, num_self_decoder_layers=layers // 2)
        for layers in (4, 12)
    )
    assert (many - few) / 8 <= 1.2 * 4 * length * width
    kept = [
        step(length, checkpointing=False, num_hidden_layers=n, num_self_decoder_layers=n // 2)
        for n in (4, 12)
    ]
    assert (kept[1] - kept[0]) / 8 > 5 * 4 * length * width


def test_logits_never_exist_whole() -> None:
    """A vocabulary that would make them most of what there is."""
    length, vocab = 8192, 20_000
    assert step(length, vocab_size=vocab) < 4 * length * vocab / 2
