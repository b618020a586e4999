"""The cost formulas against what the model computes, counted operation by operation."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tiny import FAMILIES, greedy, make_engine, packed_logits, prompt_of, run, tiny_model
from yocolm.models.spec import model_spec

PROJECTIONS = (torch.ops.aten.mm, torch.ops.aten.addmm)  # every other product mixes tokens


def projection_flops(counter: FlopCounterMode) -> int:
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in counts.items() if operation in PROJECTIONS)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", [None, [3], [0, 8, 9, 20]])
def test_projections_of_the_dense_forward(name: str, rows: list[int] | None) -> None:
    lengths = (9, 13)
    with FlopCounterMode(display=False) as counter:
        packed_logits(tiny_model(name, "float64"), [prompt_of(length) for length in lengths], rows)
    spec, num_rows = model_spec(FAMILIES[name]), sum(lengths) if rows is None else len(rows)
    per_row = spec.read_flops_per_row + spec.logits_flops_per_row
    expected = sum(lengths) * spec.write_flops_per_token + num_rows * per_row
    assert projection_flops(counter) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_projections_of_the_engine(name: str) -> None:
    """Chunks, decodes and scores cost what their tokens and rows cost, and no more."""
    engine = make_engine(name, "float64", budget=7)  # in torch, whose operations are counted
    plain = greedy(3, prompt_logprobs=None)
    requests = {"plain": (prompt_of(20), plain), "scored": (prompt_of(9), greedy(2))}
    with FlopCounterMode(display=False) as counter:
        run(engine, requests)
    tokens, rows = 20 + 2 + 9 + 1, 3 + 9 + 1
    assert (engine.runner.stats.write_tokens, engine.runner.stats.read_rows) == (tokens, rows)
    spec = engine.spec
    per_row = spec.read_flops_per_row + spec.logits_flops_per_row
    assert projection_flops(counter) == tokens * spec.write_flops_per_token + rows * per_row
