"""From logits to token ids and logprobs: vectorised over rows, in float32.

Shapes: R rows (one per token to be drawn), V vocabulary, N flat entries over all rows.

The order of operations is vLLM's: logit bias, banned tokens (min_tokens) and those that a grammar
does not allow, penalties, greedy rows, temperature, min-p, top-k, top-p, draw. Steps that no row
asks for are skipped, a decision taken from the Python values in `SamplingBatch.build`; only top-p
may have to look at a result (to sort more), so nothing else here waits for a device.

A draw depends on (seed, index) and the row's logits only, never on the batch around it:

- `uniform` is a counter-based generator (two rounds of splitmix64), so there is no state to keep.
- The inverse CDF runs in vocabulary order over integer weights floor(2**40 * p / p_max). Integer
  sums are exact and associative: the CDF is the same for every blocking of the scan, never
  decreases, and a token of weight zero can never be drawn. A tiny change of the logits moves the
  CDF by a tiny amount; it cannot permute it, as an order by probability would.
- top-k and top-p keep whole groups of equal logits (a threshold on the value), so what is kept
  does not depend on how a sort breaks ties.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from yocolm.ops.logits import finite_argmax
from yocolm.ops.native.library import fits
from yocolm.ops.native.sampling import sample as native_sample

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WEIGHT_BITS = 40
_NUCLEUS_WIDTH = 256  # tokens sorted at first for top-p; more only if they do not cover it


@dataclass(frozen=True)
class SamplingRow:
    """What one row asks for, in Python values. The defaults draw from the plain distribution.

    `seed` and `index` (the number of tokens this sequence has drawn before) decide the draw; the
    samples of one request (n > 1) are rows with seeds of their own. `banned` tokens cannot be
    drawn, nor can those outside `allowed`, if it is given: int32 words, of which word t // 32 has
    bit t % 32 for token t. `prompt` and `output` are the tokens so far; they are read only if a
    penalty is set. `top_k` of 0 or -1 keeps all tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    index: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned: Sequence[int] = ()
    allowed: np.ndarray | None = None
    prompt: Sequence[int] | np.ndarray = ()
    output: Sequence[int] = ()

    @property
    def has_penalty(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True)
class SamplingBatch:
    """Per-row parameters as tensors. Build it with `SamplingBatch.build`.

    Per row [R]: temperature, top_p, min_p and penalties float32; top_k (0 = all), seeds, indices
    int64. Flat, or None where no row has any: `bias` (rows, tokens int64, values float32),
    `banned` (rows, tokens), `history` (rows, tokens, 1.0 for an output token and 0.0 for a prompt
    token), a token repeated as often as it occurs; `masked` (rows [G] int64, bool [G, at least V],
    True for tokens that cannot be drawn).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seeds: Tensor
    indices: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    banned: tuple[Tensor, Tensor] | None = None
    masked: tuple[Tensor, Tensor] | None = None
    history: tuple[Tensor, Tensor, Tensor] | None = None
    all_greedy: bool = False
    any_greedy: bool = False
    any_min_p: bool = False
    any_top_p: bool = False
    max_top_k: int = 0

    @property
    def adjusts(self) -> bool:
        """Whether any logit is changed before the draw."""
        parts = (self.bias, self.banned, self.masked, self.history)
        return any(part is not None for part in parts)

    @classmethod
    def build(
        cls, rows: Sequence[SamplingRow], device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """Turn Python values into tensors on `device`; values are taken as validated."""

        floats, ints = partial(_floats, device=device), partial(_ints, device=device)
        # A temperature that float32 rounds to zero is greedy too. Greedy rows need no truncation.
        greedy = [bool(np.float32(row.temperature) == 0) for row in rows]
        cuts = [
            (0, 1.0, 0.0) if is_greedy else (max(row.top_k, 0), row.top_p, row.min_p)
            for row, is_greedy in zip(rows, greedy, strict=True)
        ]
        return cls(
            temperature=floats(row.temperature for row in rows),
            top_k=ints(k for k, _, _ in cuts),
            top_p=floats(p for _, p, _ in cuts),
            min_p=floats(p for _, _, p in cuts),
            repetition_penalty=floats(row.repetition_penalty for row in rows),
            presence_penalty=floats(row.presence_penalty for row in rows),
            frequency_penalty=floats(row.frequency_penalty for row in rows),
            seeds=ints(_signed(row.seed) for row in rows),
            indices=ints(row.index for row in rows),
            bias=_bias(rows, device),
            banned=_banned(rows, device),
            masked=_masked(rows, device),
            history=_history(rows, device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            any_min_p=any(p > 0 for _, _, p in cuts),
            any_top_p=any(p < 1 for _, p, _ in cuts),
            max_top_k=max((k for k, _, _ in cuts), default=0),
        )


def _floats(values: Iterable[float], device: torch.device | str) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32, device=device)


def _ints(values: Iterable[int], device: torch.device | str) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=device)


def _bias(
    rows: Sequence[SamplingRow], device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor] | None:
    flat = [(i, t, b) for i, row in enumerate(rows) for t, b in row.logit_bias.items()]
    if not flat:
        return None
    row_ids, tokens, values = zip(*flat, strict=True)
    return _ints(row_ids, device), _ints(tokens, device), _floats(values, device)


def _banned(
    rows: Sequence[SamplingRow], device: torch.device | str
) -> tuple[Tensor, Tensor] | None:
    flat = [(i, t) for i, row in enumerate(rows) for t in row.banned]
    if not flat:
        return None
    row_ids, tokens = zip(*flat, strict=True)
    return _ints(row_ids, device), _ints(tokens, device)


def _history(
    rows: Sequence[SamplingRow], device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The flat `history` of `SamplingBatch`: one numpy pass per row that has a penalty."""
    penalised = [(i, row) for i, row in enumerate(rows) if row.has_penalty]
    if not penalised:
        return None
    lengths = np.array([(len(row.prompt), len(row.output)) for _, row in penalised])
    tokens = [np.asarray(ids, np.int64) for _, row in penalised for ids in (row.prompt, row.output)]
    row_ids = np.repeat(np.array([i for i, _ in penalised], np.int64), lengths.sum(axis=1))
    is_output = np.repeat(np.tile(np.array([0, 1], np.float32), len(penalised)), lengths.ravel())
    flat = (row_ids, np.concatenate(tokens), is_output)
    on_device = [torch.from_numpy(array).to(device) for array in flat]
    return on_device[0], on_device[1], on_device[2]


def _masked(
    rows: Sequence[SamplingRow], device: torch.device | str
) -> tuple[Tensor, Tensor] | None:
    masks = {i: row.allowed for i, row in enumerate(rows) if row.allowed is not None}
    if not masks:
        return None
    forbidden = ~np.stack(list(masks.values())).view(np.uint8)
    bits = np.unpackbits(forbidden, axis=1, bitorder="little").view(np.bool_)
    return torch.tensor(list(masks), device=device), torch.from_numpy(bits).to(device)


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token per row: logits [R, V] of any float dtype -> token ids [R] int64.

    Greedy rows (temperature 0) take the lowest index among the greatest logits. A row that is not
    finite in the sense of `finite_rows` gets -1.
    """
    if batch.all_greedy and not batch.adjusts:
        tokens, finite = finite_argmax(logits)
        return tokens.masked_fill_(~finite, -1)
    raw = logits.float()
    logits = _adjust(raw, batch)
    if fits(logits):
        parts = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        return native_sample(logits, raw, *parts, batch.seeds, batch.indices)
    return _sample(logits, batch).masked_fill_(~finite_rows(raw), -1)


def _sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    if batch.all_greedy:
        return logits.argmax(dim=-1)
    x, threshold = _truncate(logits, batch)
    drawn = _inverse_cdf(x, threshold, uniform(batch.seeds, batch.indices))
    if not batch.any_greedy:
        return drawn
    return torch.where(batch.temperature == 0, logits.argmax(dim=-1), drawn)


def _adjust(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Logit bias, masks and penalties on a copy (or the input itself if none is set)."""
    if not batch.adjusts:
        return logits
    logits = logits.clone()
    if batch.bias is not None:
        rows, tokens, values = batch.bias
        logits[rows, tokens] += values  # a row's bias is a mapping: no pair occurs twice
    if batch.banned is not None:
        logits[batch.banned] = -torch.inf
    if batch.masked is not None:
        rows, mask = batch.masked
        mask = mask[:, : logits.shape[1]]
        if len(rows) == len(logits):
            logits.masked_fill_(mask, -torch.inf)
        else:
            logits[rows] = logits[rows].masked_fill(mask, -torch.inf)
    if batch.history is not None:
        _penalise(logits, batch, *batch.history)
    return logits


def _penalise(
    logits: Tensor, batch: SamplingBatch, rows: Tensor, tokens: Tensor, out: Tensor
) -> None:
    """Apply the penalties in place, at the tokens of the history only (no [R, V] counts)."""
    vocab_size = logits.shape[1]
    pairs, place = torch.unique(rows * vocab_size + tokens, return_inverse=True)
    count = torch.zeros(len(pairs), device=logits.device).index_add_(0, place, out)
    row, token = pairs // vocab_size, pairs % vocab_size
    value = logits[row, token]
    repetition = batch.repetition_penalty[row]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value = value - batch.frequency_penalty[row] * count
    logits[row, token] = value - batch.presence_penalty[row] * (count > 0)


def _truncate(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor | None]:
    """Temperature, then the value below which min-p, top-k and top-p drop tokens.

    Returns x [R, V], logits over temperature with a maximum of 0 (so that neither a tiny
    temperature nor exp overflows), and the threshold [R, 1], None if nothing is dropped.
    """
    peak = logits.amax(dim=-1, keepdim=True)
    # The clamp keeps 0 / 0 out of greedy rows, whose draw is thrown away, and changes no other.
    x = (logits - peak) / batch.temperature.clamp(min=1e-30)[:, None]
    threshold = batch.min_p.log()[:, None] if batch.any_min_p else None
    if batch.max_top_k > 0 or batch.any_top_p:
        masked = x if threshold is None else x.masked_fill(x < threshold, -torch.inf)
        rank = _rank_threshold(masked, batch)
        threshold = rank if threshold is None else torch.maximum(rank, threshold)
    return x, threshold


def _rank_threshold(x: Tensor, batch: SamplingBatch) -> Tensor:
    """The least value that top-k and then top-p keep, [R, 1]; x [R, V] has a maximum of 0.

    Only the greatest `width` values are sorted. That is enough for top-k by construction, and for
    top-p as soon as they cover its mass; the total mass is summed over the whole row.
    """
    vocab_size = x.shape[1]
    top_k = torch.where(batch.top_k == 0, vocab_size, batch.top_k.clamp(max=vocab_size))[:, None]
    width = min(vocab_size, max(batch.max_top_k, _NUCLEUS_WIDTH if batch.any_top_p else 1))
    top = x.topk(width).values  # [R, width], descending
    by_k = top.gather(1, top_k.clamp(max=width) - 1)
    # Where top_k is beyond the sorted part it can only be "all": width >= every other top_k.
    by_k = torch.where(top_k > width, -torch.inf, by_k)
    if not batch.any_top_p:
        return by_k
    top_p = batch.top_p.double()[:, None]
    total = x.exp().masked_fill(x < by_k, 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    while True:
        kept = top >= by_k
        mass = (top.exp() * kept).cumsum(dim=-1, dtype=torch.float64) / total
        uncovered = (mass[:, -1:] < top_p) & kept[:, -1:] & (top_p < 1)
        if width == vocab_size or not bool(uncovered.any()):
            break
        width = min(vocab_size, width * 8)
        top = x.topk(width).values
    # Tokens before the crossing one have mass < p; the crossing one is kept as well.
    crossing = (mass < top_p).sum(dim=-1, keepdim=True).clamp(max=width - 1)
    by_p = torch.where(top_p < 1, top.gather(1, crossing), -torch.inf)
    return torch.maximum(by_k, by_p)


def _inverse_cdf(x: Tensor, threshold: Tensor | None, u: Tensor) -> Tensor:
    """The first token, in vocabulary order, whose cumulated weight exceeds u * total.

    x [R, V] has a maximum of 0, so the weights are integers of at most 2**40 and their sum stays
    below 2**63 for any vocabulary under 2**23 tokens. Tokens less likely than the likeliest by
    more than 2**40 get weight zero.
    """
    weights = (x.exp() * float(1 << _WEIGHT_BITS)).nan_to_num(nan=0.0).to(torch.int64)
    if threshold is not None:
        weights = weights.masked_fill(x < threshold, 0)
    cdf = weights.cumsum(dim=-1)
    total = cdf[:, -1]
    target = torch.minimum((total.double() * u).to(torch.int64), total - 1)
    drawn = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
    return drawn.clamp(max=x.shape[1] - 1)


def uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """Uniform numbers in [0, 1): seeds, indices [R] int64 -> [R] float64 with 52 random bits.

    splitmix64 (Steele, Lea, Flood 2014) twice: once to turn the seed into a key, so that
    neighbouring seeds have unrelated streams, once for the index-th value of the key's stream.
    Integers are int64 with wrap-around, the same on every device.
    """
    key = _splitmix64(seeds)
    bits = _splitmix64(key + indices * _signed(_GOLDEN))
    return _shift_right(bits, 12).double() * 2.0**-52


def _splitmix64(state: Tensor) -> Tensor:
    z = state + _signed(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    return z ^ _shift_right(z, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> on int64 copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Any Python integer, modulo 2**64, as the int64 with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def finite_rows(logits: Tensor) -> Tensor:
    """Rows one can sample from: logits [R, V] -> bool [R].

    False for a row with any NaN or +Inf and for one that is -Inf everywhere; single -Inf entries
    (masked tokens) are fine.
    """
    # The maximum alone tells: NaN propagates through amax, +Inf is it, and so is all -Inf.
    return torch.isfinite(logits.amax(dim=-1))


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, top_n: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs of the raw distribution (before temperature, penalties and truncation).

    logits [R, V], token_ids [R], n = min(top_n, V) ->
    logprob of the token [R] float32, its rank [R] int64 (1 = no token is more likely),
    ids of the n likeliest tokens [R, n] int64, their logprobs [R, n] float32 (float64 for float64).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    norm = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    rank = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(min(top_n, logits.shape[1]), dim=-1)
    return (chosen - norm)[:, 0], rank, top.indices, top.values - norm
