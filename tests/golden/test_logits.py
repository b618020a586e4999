"""Whole sequences give the logits that other implementations gave."""

import pytest
import torch

from references import ALL, DATA, expected, logits_of, worst
from tolerances import GOLDEN_FLOAT32
from yocolm.models.registry import load_model


@pytest.mark.parametrize("name", ALL)
def test_logits_equal_the_reference(name: str) -> None:
    model, _ = load_model(DATA / name)
    reference = expected(name)
    assert worst(logits_of(model, reference.token_ids), reference.logits) < GOLDEN_FLOAT32


@pytest.mark.parametrize("name", ALL)
def test_logits_behind_generated_tokens_equal_the_reference(name: str) -> None:
    model, _ = load_model(DATA / name)
    reference = expected(name)
    tokens = torch.tensor(reference.prompt + reference.generated[:-1])
    logits = logits_of(model, tokens)[reference.prompt_len - 1 :]
    assert worst(logits, reference.generated_logits) < GOLDEN_FLOAT32
    assert logits.argmax(-1).tolist() == reference.generated


@pytest.mark.parametrize("name", ALL)
def test_float64_agrees_as_well(name: str) -> None:
    model, _ = load_model(DATA / name, dtype="float64")
    reference = expected(name)
    assert worst(logits_of(model, reference.token_ids), reference.logits) < GOLDEN_FLOAT32
