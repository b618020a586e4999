"""Bits per byte of a text under a model, by sliding windows, and by position in the window.

The text is tokenised once, as a whole. Windows of `context` input tokens advance by `stride`; a
window adds to the total only tokens that no earlier window has scored, so every token counts once
and (after the first window) is predicted from at least `context - stride + 1` tokens. The table by
position uses every position of every window.

Where the tokenizer puts a BOS token before every text, every window begins with one, in place of
its first input: models that have always seen it are much worse without. It is context, never
scored. With other tokenizers only the text as a whole is given a token to start from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from yocolm.engine.engine import require_device
from yocolm.errors import NumericsError, RequestError
from yocolm.models.base import Batch, CausalLM
from yocolm.models.dense import DenseState
from yocolm.models.registry import load_model, load_tokenizer
from yocolm.tokenizer import StreamDecoder, Tokenizer

DEFAULT_CONTEXT_LIMIT = 2048
_FIRST_BUCKET = 64
_LOGITS_ROWS = 2048
_FIRST_LOGITS_ROWS = 256  # until the vocabulary size is seen
_LOGITS_ELEMENTS = 1 << 26  # fewer rows at a time for large vocabularies: at most 256 MB of float32


@dataclass(frozen=True)
class Text:
    """A tokenised text. `token_bytes[i]` is the length of token i in UTF-8.

    A token that ends inside a character has length 0 and the one that completes the character has
    all its bytes, so that the lengths add up to `num_bytes`. `prefix` is the special token put
    before the text, on which its first token is conditioned; None leaves the first token out.
    `bos` begins all other windows; None leaves them as they are.
    """

    token_ids: Sequence[int]
    token_bytes: Sequence[int]
    num_bytes: int
    prefix: int | None
    bos: int | None = None


@dataclass(frozen=True)
class Bucket:
    """Loss at input positions `start <= position < stop` of the windows, over `tokens` tokens."""

    start: int
    stop: int
    tokens: int
    nll_per_token: float
    bits_per_byte: float | None

    def to_json(self) -> dict[str, float | int | None]:
        return {
            "from": self.start,
            "to": self.stop,
            "tokens": self.tokens,
            "nll_per_token": self.nll_per_token,
            "bits_per_byte": self.bits_per_byte,
        }


@dataclass(frozen=True)
class Perplexity:
    """Result of `score`. `tokens` counts scored tokens, `bytes` the whole text."""

    bits_per_byte: float
    nll_per_token: float
    tokens: int
    bytes: int
    context: int
    stride: int
    first_token_scored: bool
    by_position: tuple[Bucket, ...] = field(default=())

    @property
    def perplexity_per_token(self) -> float | None:
        """None above what a float holds."""
        try:
            return math.exp(self.nll_per_token)
        except OverflowError:
            return None

    def to_json(self) -> dict[str, object]:
        return {
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "nll_per_token": self.nll_per_token,
            "perplexity_per_token": self.perplexity_per_token,
            "context": self.context,
            "stride": self.stride,
            "first_token_scored": self.first_token_scored,
            "by_position": [bucket.to_json() for bucket in self.by_position],
        }


def perplexity(
    model: str,
    file: str | Path,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    dtype: str = "float32",
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Score a UTF-8 file under a model named as everywhere (folder, `bundled`, id).

    `context` defaults to what the model was built for, at most 2048; `stride` to half of it.
    `progress` is called with (windows done, windows in all). Raises RequestError for a model
    without a tokenizer, a file that is not UTF-8 or too short, and for windows out of range;
    NumericsError at the first loss that is NaN or infinite.
    """
    content = read_text(Path(file))
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise RequestError(f"{model} has no tokenizer; perplexity of a text needs one")
    text = tokenise(tokenizer, content)
    module, config = load_model(
        model, dtype, require_device(device), packed=True, show_progress=True
    )
    if context is None:
        context = min(config.max_position_embeddings, DEFAULT_CONTEXT_LIMIT)
    return score(
        module,
        text,
        context=context,
        stride=max(context // 2, 1) if stride is None else stride,
        batch_size=batch_size,
        progress=progress,
    )


def read_text(path: Path) -> str:
    """The file, byte for byte (no newline translation)."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; "
            "convert it first, for example with iconv"
        ) from error


def tokenise(tokenizer: Tokenizer, text: str) -> Text:
    """Tokenise without special tokens; raises RequestError if decoding does not give the text back.

    Bits per byte compare models with different tokenizers, so the tokens have to stand for exactly
    these bytes.
    """
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
    pieces = [decoder.push(token) for token in token_ids]
    if pieces:
        pieces[-1] += decoder.finish()
    decoded = "".join(pieces)
    if decoded != text:
        pairs = enumerate(zip(text, decoded, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(decoded)))
        raise RequestError(
            f"the tokenizer does not reproduce the text: at character {at} it has "
            f"{text[at : at + 10]!r} and decoding gives {decoded[at : at + 10]!r}"
        )
    opening = tokenizer.opening()
    bos = opening[0] if opening else None
    prefix = tokenizer.bos_token_id if bos is None else bos
    return Text(
        token_ids=token_ids,
        token_bytes=[len(piece.encode()) for piece in pieces],
        num_bytes=len(text.encode()),
        prefix=tokenizer.eos_token_id if prefix is None else prefix,
        bos=bos,
    )


def windows(num_inputs: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, new) of each window over `num_inputs` inputs; input i predicts token i + 1.

    `new` is the first input whose prediction no earlier window has scored.
    """
    start, scored = 0, 0
    while scored < num_inputs:
        stop = min(start + context, num_inputs)
        yield start, stop, scored
        start, scored = start + stride, stop


@torch.inference_mode()
def score(
    model: torch.nn.Module,
    text: Text,
    *,
    context: int,
    stride: int,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Score a tokenised text; `model` is a CausalLM module. See the module docstring."""
    if not 1 <= stride <= context:
        raise RequestError(f"stride is {stride}; it must be between 1 and the context, {context}")
    if batch_size < 1:
        raise RequestError(f"batch size is {batch_size}; it must be at least 1")
    skipped = 1 if text.prefix is None else 0
    stream = torch.tensor([*([] if text.prefix is None else [text.prefix]), *text.token_ids])
    sizes = torch.tensor(text.token_bytes[skipped:], dtype=torch.float64)
    if len(stream) < 2:
        raise RequestError("the text is too short: no token is left to predict")
    plan = list(windows(len(stream) - 1, context, stride))
    totals = _Totals(min(context, len(stream) - 1))
    for first in range(0, len(plan), batch_size):
        group = plan[first : first + batch_size]
        losses = _losses(model, stream, group, text.bos)
        for (start, stop, new), loss in zip(group, losses, strict=True):
            totals.add(loss, sizes[start:stop], new - start)
        if progress is not None:
            progress(first + len(group), len(plan))
    return Perplexity(
        bits_per_byte=totals.nll / math.log(2) / text.num_bytes,
        nll_per_token=totals.nll / totals.tokens,
        tokens=totals.tokens,
        bytes=text.num_bytes,
        context=context,
        stride=stride,
        first_token_scored=text.prefix is not None,
        by_position=totals.buckets(),
    )


class _Totals:
    """Sums in float64: over newly scored tokens, and by position over all of them."""

    def __init__(self, positions: int) -> None:
        self.nll, self.tokens = 0.0, 0
        self.nll_at = torch.zeros(positions, dtype=torch.float64)
        self.bytes_at = torch.zeros(positions, dtype=torch.float64)
        self.count_at = torch.zeros(positions, dtype=torch.int64)

    def add(self, loss: Tensor, sizes: Tensor, new: int) -> None:
        length = len(loss)
        self.nll += float(loss[new:].sum())
        self.tokens += length - new
        self.nll_at[:length] += loss
        self.bytes_at[:length] += sizes
        self.count_at[:length] += 1

    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets that double in width, from 64 positions on."""
        edges = [0, _FIRST_BUCKET]
        while edges[-1] < len(self.nll_at):
            edges.append(edges[-1] * 2)
        edges[-1] = len(self.nll_at)
        buckets = []
        for start, stop in zip(edges, edges[1:], strict=False):
            nll = float(self.nll_at[start:stop].sum())
            tokens, size = (
                int(self.count_at[start:stop].sum()),
                float(self.bytes_at[start:stop].sum()),
            )
            bits = nll / math.log(2) / size if size else None
            buckets.append(Bucket(start, stop, tokens, nll / tokens, bits))
        return tuple(buckets)


def _losses(
    model: torch.nn.Module,
    stream: Tensor,
    group: Sequence[tuple[int, int, int]],
    bos: int | None,
) -> list[Tensor]:
    """Negative log-likelihood [window length] float64 of each window's targets, on the CPU.

    Raises NumericsError naming the window if one is not finite.
    """
    causal: CausalLM = model  # type: ignore[assignment]
    device = next(model.parameters()).device
    lengths = [stop - start for start, stop, _ in group]
    inputs = torch.cat([stream[start:stop] for start, stop, _ in group])
    if bos is not None:
        inputs[[sum(lengths[:index]) for index in range(len(lengths))]] = bos
    inputs = inputs.to(device)
    targets = torch.cat([stream[start + 1 : stop + 1] for start, stop, _ in group]).to(device)
    hidden = model(Batch.packed(inputs, lengths), DenseState())
    losses, row = [], 0
    block = _FIRST_LOGITS_ROWS
    while row < len(hidden):
        logits = causal.logits(hidden[row : row + block]).float()
        losses.append(F.cross_entropy(logits, targets[row : row + block], reduction="none"))
        _check_finite(losses[-1], group, row)
        row += len(logits)
        block = max(1, min(_LOGITS_ROWS, _LOGITS_ELEMENTS // logits.shape[1]))
    return list(torch.cat(losses).double().cpu().split(lengths))


def _check_finite(loss: Tensor, group: Sequence[tuple[int, int, int]], row: int) -> None:
    """`loss` belongs to the packed rows of the windows in `group` from `row` on."""
    bad = (~loss.isfinite()).nonzero()
    if len(bad) == 0:
        return
    first = int(bad[0])
    rows = [(start, stop) for start, stop, _ in group for _ in range(start, stop)]
    start, stop = rows[row + first]  # attention may have spread it over the whole window
    raise NumericsError(
        f"the loss is {float(loss[first])} in the window of tokens {start} to {stop - 1}: the "
        "model's logits are not finite there; check its weights, or compute in float32"
    )
