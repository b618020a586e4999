"""ops/sampling.py against a plain-Python reference, and the distributions it draws from."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from yocolm.ops.sampling import SamplingBatch, SamplingRow, finite_rows, gather_logprobs, sample
from yocolm.ops.sampling import uniform as uniform_numbers

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_uniform(seed: int, index: int) -> float:
    key = splitmix64(seed & MASK)
    return (splitmix64((key + index * 0x9E3779B97F4A7C15) & MASK) >> 12) * 2.0**-52


def reference_probabilities(logits: list[float], row: SamplingRow) -> list[float]:
    """The distribution a row is drawn from, one scalar at a time."""
    logits = [value + row.logit_bias.get(t, 0.0) for t, value in enumerate(logits)]
    logits = [-math.inf if t in row.banned else value for t, value in enumerate(logits)]
    for token in set(row.prompt) | set(row.output):
        value = logits[token]
        value = value / row.repetition_penalty if value > 0 else value * row.repetition_penalty
        count = row.output.count(token)
        value -= row.frequency_penalty * count + row.presence_penalty * (count > 0)
        logits[token] = value
    if row.temperature == 0:
        return [float(t == logits.index(max(logits))) for t in range(len(logits))]
    weights = [math.exp((value - max(logits)) / row.temperature) for value in logits]
    weights = [w if w >= row.min_p else 0.0 for w in weights]
    if row.top_k > 0:
        least = sorted(weights, reverse=True)[min(row.top_k, len(weights)) - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    if row.top_p < 1:
        mass, least = 0.0, 0.0
        for least in sorted(weights, reverse=True):
            mass += least / sum(weights)
            if mass >= row.top_p:
                break
        weights = [w if w >= least else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def reference_sample(logits: list[float], row: SamplingRow) -> int:
    u, mass = reference_uniform(row.seed, row.index), 0.0
    probabilities = reference_probabilities(logits, row)
    for token, p in enumerate(probabilities):
        mass += p
        if mass > u:
            return token
    return max(t for t, p in enumerate(probabilities) if p > 0)


def random_row(rng: random.Random, vocab_size: int) -> SamplingRow:
    def tokens() -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randrange(12))]

    return SamplingRow(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, -1, 1, 3, vocab_size, vocab_size + 9]),
        top_p=rng.choice([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.5, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 0.7, 1.8]),
        presence_penalty=rng.choice([0.0, 0.0, -0.5, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.3, 0.8]),
        seed=rng.getrandbits(64),
        index=rng.randrange(1000),
        logit_bias={t: rng.uniform(-5, 5) for t in tokens()[:3]},
        banned=tokens()[:2],
        prompt=tokens(),
        output=tokens(),
    )


@pytest.mark.parametrize("vocab_size", [7, 61, 700])
def test_sample_agrees_with_the_scalar_reference(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    rows = [random_row(rng, vocab_size) for _ in range(150)]
    logits = torch.randn(
        len(rows), vocab_size, generator=torch.Generator().manual_seed(1)
    ) * torch.linspace(0.5, 5, len(rows)).unsqueeze(1)
    drawn = sample(logits, SamplingBatch.build(rows))
    expected = [
        reference_sample(line, row) for line, row in zip(logits.tolist(), rows, strict=True)
    ]
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == expected


def test_draws_do_not_depend_on_the_batch() -> None:
    rng = random.Random(3)
    rows = [random_row(rng, 301) for _ in range(40)]
    logits = torch.randn(40, 301, generator=torch.Generator().manual_seed(2))
    together = sample(logits, SamplingBatch.build(rows)).tolist()
    alone = [
        sample(logits[i : i + 1], SamplingBatch.build([row])).item() for i, row in enumerate(rows)
    ]
    assert together == alone


def test_sample_leaves_its_input_alone() -> None:
    logits = torch.randn(1, 9)
    before = logits.clone()
    row = SamplingRow(logit_bias={2: 1.0}, banned=[1], repetition_penalty=2.0, prompt=[3])
    sample(logits, SamplingBatch.build([row]))
    assert torch.equal(logits, before)


def draws(logits: list[float], count: int, **options: float) -> list[int]:
    rows = [SamplingRow(seed=5, index=i, **options) for i in range(count)]  # type: ignore[arg-type]
    return sample(torch.tensor([logits]).expand(count, -1), SamplingBatch.build(rows)).tolist()


def chi_square(observed: list[int], expected: list[float]) -> float:
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.8},
    ],
)
def test_frequencies_follow_the_distribution(options: dict[str, float]) -> None:
    logits, count = [0.5, -1.0, 2.0, 1.5, 0.0, 1.0, -3.0, 0.7], 20_000
    drawn = draws(logits, count, **options)
    expected = reference_probabilities(logits, SamplingRow(**options))  # type: ignore[arg-type]
    observed = [drawn.count(token) for token in range(len(logits))]
    assert all(o == 0 for o, p in zip(observed, expected, strict=True) if p == 0)
    # 99.9th percentile of chi-square with 7 degrees of freedom; the seed is fixed.
    assert chi_square(observed, [p * count for p in expected]) < 24.3


def test_uniform_numbers_match_the_reference_for_any_seed() -> None:
    pairs = [(0, 0), (1, 0), (2**63, 1), (2**64 - 1, 7), (-1, 7), (123456789, 2**31)]
    batch = SamplingBatch.build([SamplingRow(seed=s, index=i) for s, i in pairs])
    assert uniform_numbers(batch.seeds, batch.indices).tolist() == [
        reference_uniform(s, i) for s, i in pairs
    ]


@pytest.mark.parametrize("by", ["index", "seed"])
def test_uniform_numbers_are_uniform_and_independent(by: str) -> None:
    count, counter = 40_000, torch.arange(40_000)
    zero = torch.zeros_like(counter)
    u = uniform_numbers(zero, counter) if by == "index" else uniform_numbers(counter, zero)
    assert 0 <= u.min() and u.max() < 1
    cells = (u * 20).long()
    single = torch.bincount(cells, minlength=20).tolist()
    assert chi_square(single, [count / 20] * 20) < 43.8  # 19 degrees of freedom, 99.9 %
    pairs = torch.bincount(cells[:-1] * 20 + cells[1:], minlength=400).tolist()
    assert chi_square(pairs, [(count - 1) / 400] * 400) < 491  # 399 degrees of freedom
    # The same index under neighbouring seeds is unrelated too.
    other = (
        uniform_numbers(zero + 1, counter) if by == "index" else uniform_numbers(counter, zero + 1)
    )
    assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1]) < 0.02


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(draws(logits, 2000, top_p=0.5)) == {0}
    assert set(draws(logits, 2000, top_p=0.51)) == {0, 1}
    assert set(draws(logits, 4000, top_p=0.81)) == {0, 1, 2}
    assert set(draws(logits, 2000, top_p=1e-12)) == {0}


def test_top_p_reaches_past_the_part_that_is_sorted_first() -> None:
    count = 3000  # flat: half of the mass lies far beyond the first sorted 256
    logits = (-torch.arange(5000) / 1e5).tolist()
    kept = set(draws(logits, count, top_p=0.5))
    assert max(kept) <= 2600 and len([t for t in kept if t > 2000]) > 100


def test_top_k_and_top_p_keep_whole_groups_of_equal_logits() -> None:
    logits = [1.0, 2.0, 2.0, 0.0, 2.0]
    assert set(draws(logits, 500, top_k=1)) == {1, 2, 4}
    assert set(draws(logits, 500, top_p=0.05)) == {1, 2, 4}


def test_tiny_temperature_is_greedy() -> None:
    logits = [1.0, 1.0 + 1e-6, -50.0]
    for temperature in (1e-9, 1e-38, 1e-44, 1e-60):
        assert set(draws(logits, 20, temperature=temperature)) == {1}


def test_greedy_takes_the_lowest_index_on_ties() -> None:
    logits = torch.zeros(3, 4096)
    logits[0, [5, 9, 4000]] = 3.0
    logits[1, [4095, 4094]] = 1.0
    mixed = [SamplingRow(temperature=0), SamplingRow(temperature=0), SamplingRow(temperature=1)]
    assert sample(logits[:2], SamplingBatch.build(mixed[:2])).tolist() == [5, 4094]
    assert sample(logits, SamplingBatch.build(mixed)).tolist()[:2] == [5, 4094]
    assert sample(logits.bfloat16(), SamplingBatch.build(mixed)).tolist()[:2] == [5, 4094]


def test_masked_tokens_are_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    for options in ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 9.0}):
        assert set(draws(logits, 500, **options)) == {1, 3}


def test_tiny_changes_of_the_logits_rarely_change_the_draw() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 500, generator=generator).expand(2000, -1)
    batch = SamplingBatch.build([SamplingRow(seed=1, index=i, top_p=0.9) for i in range(2000)])
    noise = 1e-5 * torch.randn(2000, 500, generator=generator)
    assert (sample(logits, batch) != sample(logits + noise, batch)).sum() <= 4


def test_rows_that_are_not_finite_are_found_and_do_no_harm() -> None:
    logits = torch.zeros(5, 8)
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    logits[4, :7] = -math.inf
    assert finite_rows(logits).tolist() == [True, False, False, False, True]
    for asked in (SamplingRow(top_k=3, top_p=0.9, min_p=0.1), SamplingRow(temperature=0)):
        drawn = sample(logits, SamplingBatch.build([asked] * 5))
        assert 0 <= drawn[0] < 8 and drawn[1:].tolist() == [-1, -1, -1, 7]


def test_gather_logprobs_is_the_log_softmax_with_ranks() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(4)) * 3
    tokens = torch.tensor([0, 5, 39, 7, 7, 20])
    logprob, rank, top_ids, top_logprobs = gather_logprobs(logits, tokens, 3)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        logprob.double(), expected[torch.arange(6), tokens], atol=1e-5, rtol=0
    )
    for i in range(6):
        order = sorted(range(40), key=lambda t, line=logits[i]: -float(line[t]))
        assert top_ids[i].tolist() == order[:3]
        assert int(rank[i]) == order.index(int(tokens[i])) + 1
    torch.testing.assert_close(
        top_logprobs.double(), expected.gather(1, top_ids), atol=1e-5, rtol=0
    )


def test_gather_logprobs_at_the_edges() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.bfloat16)
    logprob, rank, top_ids, top_logprobs = gather_logprobs(logits, torch.tensor([1]), 0)
    assert rank.tolist() == [1] and top_ids.shape == top_logprobs.shape == (1, 0)
    assert logprob.dtype == torch.float32
    assert gather_logprobs(logits, torch.tensor([2]), 9)[2].shape == (1, 3)
    assert gather_logprobs(logits, torch.tensor([2]), 1)[1].tolist() == [3]


def test_masked_rows_draw_what_their_mask_allows() -> None:
    """And the others, bit for bit, what they draw beside rows that are not masked."""
    vocab, allowed = 70, [3, 31, 32, 63, 69]
    mask = np.zeros(3, np.int32)
    for token in allowed:
        mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(0))
    plain = [SamplingRow(seed=i, temperature=i % 3, top_k=i % 5) for i in range(40)]
    masked = [replace(row, allowed=mask) if i % 2 else row for i, row in enumerate(plain)]
    without = sample(logits, SamplingBatch.build(plain))
    drawn = sample(logits, SamplingBatch.build(masked))
    assert torch.equal(drawn[::2], without[::2])
    assert set(drawn[1::2].tolist()) <= set(allowed)
    greedy = logits[3, allowed].argmax()
    assert drawn[3] == allowed[int(greedy)]
    pushed = SamplingRow(allowed=mask, logit_bias={0: 100.0}, banned=(3, 31, 32, 63))
    assert sample(logits[:1], SamplingBatch.build([pushed])).tolist() == [69]
