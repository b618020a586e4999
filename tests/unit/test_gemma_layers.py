"""Rounding of Gemma's layers in bfloat16: as transformers rounds, or not at all."""

import torch

from packed import randn
from yocolm.models.gemma import LookupTable
from yocolm.models.layers import Embedding, RMSNorm
from yocolm.ops.logits import soft_cap

BF16 = torch.bfloat16
SCALE = 1536**0.5  # 39.19, which bfloat16 has as 39.25


@torch.no_grad()
def test_scales_of_embeddings_are_rounded_like_the_embeddings() -> None:
    tokens = torch.arange(5)
    weight = randn(5, 8, dtype=BF16)
    plain, embedding = Embedding(5, 8, SCALE), Embedding(5, 8, SCALE, round_scale=True)
    for module in (plain, embedding):
        module.to(BF16).weight.copy_(weight)
    expected = weight * torch.tensor(SCALE, dtype=BF16)
    assert torch.equal(embedding(tokens), expected)
    assert not torch.equal(plain(tokens), expected), "the inputs tell rounded scales from exact"


@torch.no_grad()
def test_what_is_looked_up_has_the_dtype_of_the_computation() -> None:
    weight, tokens = randn(5, 8, dtype=BF16), torch.tensor([4, 0, 5, 9])
    table = LookupTable(5, 8, SCALE).to(BF16)
    table.weight.copy_(weight)
    rows = weight[[4, 0, 0, 0]]  # tokens beyond the table use row 0
    assert torch.equal(table(tokens, 0, 8, BF16), rows)
    assert torch.equal(table(tokens, 2, 5, torch.float32), rows[:, 2:5].float())


@torch.no_grad()
def test_a_norm_rounds_once() -> None:
    """Multiplied by its weight in float32: no more than half a unit in the last place off."""
    x, norm = randn(64, 96, dtype=BF16, seed=1), RMSNorm(96, 1e-6).to(BF16)
    norm.weight.copy_(1 + 0.3 * randn(96, dtype=BF16, seed=2))
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = exact * norm.weight.double()
    for grad in (True, False):  # the reference form, and the one in place
        with torch.set_grad_enabled(grad):
            assert ((norm(x).double() - exact).abs() <= exact.abs() * 2**-8 * 1.001).all()


def test_a_cap_is_computed_in_float32() -> None:
    logits = randn(4, 50, dtype=BF16) * 20
    capped = soft_cap(logits, 30.0)
    assert capped.dtype == torch.float32
    exact = 30 * torch.tanh(logits.double() / 30)
    torch.testing.assert_close(capped.double(), exact, rtol=1e-6, atol=1e-6)
    assert soft_cap(logits, 0.0) is logits
