"""Negative log-likelihood of long texts by position, in one pass over chunks.

What the model remembers is carried from chunk to chunk in the engine's state, so memory beside it
is that of one chunk, and every token is predicted from all the tokens before it. A share of the
rows can be scored alone: for the others only the first half of the model runs, which writes all
that is remembered.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log, sqrt
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from yocolm.config import ModelConfig
from yocolm.engine.engine import require_device
from yocolm.engine.settings import available_memory
from yocolm.engine.state import PagedState
from yocolm.errors import ConfigError, NumericsError, RequestError
from yocolm.eval.asking import beyond_context, check_different
from yocolm.eval.corpus import HEADER, Document, load_document
from yocolm.eval.perplexity import Text
from yocolm.eval.report import Curves, Report
from yocolm.models.base import Batch, CausalLM
from yocolm.models.registry import load_model, load_tokenizer
from yocolm.models.spec import DEFAULT_PAGE_SIZE, model_spec
from yocolm.tokenizer import Tokenizer

FIRST_BUCKET = 64  # positions; each bucket but the second is as wide as all before it
_LOGITS = 1 << 24  # logits that exist at once
_POINTS = 4  # of the cumulative curve, for each doubling


class LongScorer:
    """A model with room for one sequence, run over it chunk by chunk.

    Args:
        model, config: as ``load_model`` returns them.
        length: tokens of the longest sequence.
        chunk: tokens at a time.
    """

    def __init__(
        self, model: torch.nn.Module, config: ModelConfig, length: int, chunk: int = 2048
    ) -> None:
        weight = next(model.parameters())
        self.model, self.device, self.chunk = cast(CausalLM, model), weight.device, chunk
        self._page = DEFAULT_PAGE_SIZE
        spec, width, pages = model_spec(config), weight.element_size(), ceil(length / self._page)
        needed = (pages + 1) * spec.page_bytes(self._page, width) + 2 * spec.slot_bytes(width)
        if weight.is_cpu and needed > available_memory():
            raise ConfigError(
                f"the state of {length} tokens takes {needed} bytes, and {available_memory()} are "
                "free: give a smaller length, or bfloat16"
            )
        self._state = PagedState(spec, pages + 1, self._page, 2, weight.dtype, self.device)
        self._table = torch.arange(1, pages + 1, device=self.device)[None]
        self._block = max(1, _LOGITS // config.vocab_size)

    @torch.inference_mode()
    def score(
        self,
        stream: Tensor,
        share: float = 1.0,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Positions [R] int64 of the inputs that were scored, ascending, and the loss [R] float64
        of the tokens behind them, on the CPU.

        Args:
            stream: [N + 1] int64; all but the last are inputs.
            share: of each chunk that is scored, one piece at a place that ``seed`` draws.
            progress: called with the tokens done.

        Raises NumericsError at the first loss that is NaN or infinite, RequestError for a share
        of less than a token.
        """
        rng, length = random.Random(seed), len(stream) - 1
        if share * min(self.chunk, length) < 1:
            raise RequestError(
                f"a share of {share} of {min(self.chunk, length)} tokens is less than one; give a "
                "greater share, or a greater chunk"
            )
        positions, losses, owed = [], [], 0.0
        self._state.clear_slots([1])
        for start in range(0, length, self.chunk):
            stop = min(start + self.chunk, length)
            owed += share * (stop - start)
            count = min(max(1, round(owed)), stop - start)
            owed -= count
            first = rng.randrange(stop - start - count + 1)
            rows = torch.arange(first, first + count)
            hidden = self._run(stream[start:stop], start, rows)
            losses.append(self._losses(hidden, stream[start + 1 + rows], start + first))
            positions.append(start + rows)
            if progress is not None:
                progress(stop)
        return torch.cat(positions), torch.cat(losses)

    def _run(self, tokens: Tensor, start: int, rows: Tensor) -> Tensor:
        """Hidden states [R, D] of the chunk's ``rows``; the state goes on behind the chunk."""
        count, device = len(tokens), self.device
        stop = start + count
        batch = Batch(
            tokens=tokens.to(device),
            positions=torch.arange(start, stop, device=device),
            seq_ids=torch.zeros(count, dtype=torch.int64, device=device),
            cu_seqlens=torch.tensor([0, count], device=device),
            rows=rows.to(device),
            slots=torch.tensor([1], device=device),
            kv_lens=torch.tensor([stop], device=device),
            block_table=self._table[:, : ceil(stop / self._page)],
        )
        x, kv = self.model.write(self.model.embed(batch), batch, self._state)
        x, selected = batch.select_rows(x)
        hidden = self.model.read(x, kv, selected)
        self._state.commit()
        return hidden

    def _losses(self, hidden: Tensor, targets: Tensor, first: int) -> Tensor:
        targets = targets.to(self.device)
        parts = [
            F.cross_entropy(self.model.logits(rows).float(), wanted, reduction="none")
            for rows, wanted in zip(
                hidden.split(self._block), targets.split(self._block), strict=True
            )
        ]
        losses = torch.cat(parts).double().cpu()
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            raise NumericsError(
                f"the loss is {float(losses[bad[0, 0]])} at token {first + int(bad[0, 0]) + 1}: "
                "the model's logits are not finite there; check its weights, or compute in float32"
            )
        return losses


@dataclass(frozen=True)
class Scored:
    """A document's scored tokens: position of the input that predicts each, loss and bytes."""

    name: str
    tokens: int
    positions: Tensor
    losses: Tensor
    sizes: Tensor


def score_text(
    scorer: LongScorer,
    document: Document,
    share: float = 1.0,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Scored:
    """Score a document, from its first token on where there is a token to predict it from."""
    stream, sizes = _stream(document.text)
    if len(stream) < 2:
        raise RequestError(f"{document.name} is too short: no token is left to predict")
    positions, losses = scorer.score(stream, share, seed, progress)
    return Scored(document.name, len(stream) - 1, positions, losses, sizes[positions])


def _stream(text: Text) -> tuple[Tensor, Tensor]:
    """[N + 1] tokens, with what the first is predicted from, and the bytes of the last N."""
    before = [] if text.prefix is None else [text.prefix]
    sizes = text.token_bytes[1 - len(before) :]
    return torch.tensor([*before, *text.token_ids]), torch.tensor(sizes, dtype=torch.float64)


def nll(
    model: str | Path,
    paths: Sequence[Path],
    *,
    length: int = 1024**2,
    chunk: int = 2048,
    share: float = 1.0,
    globs: Sequence[str] | None = None,
    shuffle: int | None = None,
    header: str = HEADER,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Score documents (see ``load_document``), each in one pass of up to ``length`` tokens.

    Args:
        chunk: tokens at a time.
        share: of the tokens that are scored, see ``LongScorer.score``; ``seed`` draws them.
        progress: called with (tokens done, tokens in all).

    Raises RequestError for a model without a tokenizer and for documents that cannot be scored;
    ConfigError where the state does not fit the memory; NumericsError for losses that are not
    finite.
    """
    if not 0 < share <= 1:
        raise RequestError(f"share is {share}; it must be above 0 and at most 1")
    check_different({"paths": list(map(str, paths))})
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise RequestError(f"{model} has no tokenizer; a text needs one")
    documents = [load_document(path, tokenizer, length, globs, shuffle, header) for path in paths]
    longest = max(map(_predicted, documents))
    place = require_device(device)
    module, config = load_model(model, dtype, place, packed=True, show_progress=True)
    scorer = LongScorer(module, config, longest, chunk)
    begin = time.perf_counter()
    scored = _score_all(scorer, documents, share, seed, progress)
    seconds = time.perf_counter() - begin
    settings = {"length": length, "chunk": chunk, "share": share, "glob": list(globs or [])}
    settings |= {"shuffle": shuffle, "seed": seed, "dtype": dtype}
    settings["first_token"] = _first_token(documents[0].text, tokenizer)
    totals = {"seconds": seconds, "peak_memory_bytes": _peak_memory(scorer.device)}
    return nll_report(str(model), scored, settings, totals, beyond_context(model, [longest]))


def _predicted(document: Document) -> int:
    """How many of a document's tokens there is something to predict from."""
    return len(document.text.token_ids) - (document.text.prefix is None)


def _score_all(
    scorer: LongScorer,
    documents: Sequence[Document],
    share: float,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> list[Scored]:
    """One after another; ``progress`` counts the tokens of all."""
    total = sum(map(_predicted, documents))
    before, scored = 0, []
    for document in documents:

        def told(tokens: int, before: int = before) -> None:
            if progress is not None:
                progress(before + tokens, total)

        scored.append(score_text(scorer, document, share, seed, told))
        before += scored[-1].tokens
    return scored


def _first_token(text: Text, tokenizer: Tokenizer) -> str:
    """What the first token of a document is predicted from."""
    if text.prefix is None:
        return "not scored"
    return "predicted from " + ("BOS" if text.prefix == tokenizer.bos_token_id else "EOS")


def nll_report(
    model: str,
    scored: Sequence[Scored],
    settings: dict[str, Any],
    totals: dict[str, Any],
    notes: Sequence[str] = (),
) -> Report:
    """Loss by position over all documents, with curves of each."""
    tokens = sum(len(one.losses) for one in scored)
    total = float(sum(one.losses.sum() for one in scored))
    bits = _bits_per_byte(total, float(sum(one.sizes.sum() for one in scored)))
    shown = "" if bits is None else f", {bits:.4f} bits a byte"
    return Report(
        kind="nll",
        model=model,
        settings=settings,
        headline=f"{total / tokens:.4f} nats a token{shown} over {tokens:,} tokens",
        summary={
            "nll_per_token": total / tokens,
            "bits_per_byte": bits,
            "tokens_scored": tokens,
            "documents": {one.name: one.tokens for one in scored},
            **totals,
        },
        cells=position_table(scored),
        curves=_curves(scored),
        notes=[*notes, *_different_ends(scored)],
    )


def _bits_per_byte(nats: float, size: float) -> float | None:
    return nats / log(2) / size if size else None


def _curves(scored: Sequence[Scored]) -> list[Curves]:
    """Of each document: loss by position, and over all so far."""
    by_position = {
        one.name: [
            (sqrt(max(1, row["from"]) * row["to"]), row["nll_per_token"])
            for row in position_table([one])
        ]
        for one in scored
    }
    title = "Loss by position (each point stands for a doubling of the context)"
    so_far = {one.name: cumulative(one) for one in scored}
    return [
        Curves(title, "position", "nats a token", by_position),
        Curves("Cumulative loss", "tokens so far", "nats a token, over all so far", so_far),
    ]


def _different_ends(scored: Sequence[Scored]) -> list[str]:
    """A note where documents end at different lengths."""
    lengths = sorted({one.tokens for one in scored})
    if len(lengths) == 1:
        return []
    return [
        f"Documents end at different lengths, {lengths[0]:,} to {lengths[-1]:,} tokens: rows "
        "beyond the shortest are of fewer documents, and not to be compared with those before."
    ]


def position_table(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """A row for each bucket of positions, which double in width, with the mean so far."""
    longest = max(one.tokens for one in scored)
    edges = [0, FIRST_BUCKET]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    edges[-1] = longest
    rows, nll_so_far, tokens_so_far = [], 0.0, 0
    for start, stop in zip(edges, edges[1:], strict=False):
        inside = [(one.positions >= start) & (one.positions < stop) for one in scored]
        losses = torch.cat([one.losses[mask] for one, mask in zip(scored, inside, strict=True)])
        sizes = torch.cat([one.sizes[mask] for one, mask in zip(scored, inside, strict=True)])
        if not len(losses):
            continue
        nll_so_far += float(losses.sum())
        tokens_so_far += len(losses)
        rows.append(
            {
                "from": start,
                "to": stop,
                "documents": sum(bool(mask.any()) for mask in inside),
                "tokens": len(losses),
                "nll_per_token": float(losses.mean()),
                "standard_error": float(losses.std()) / sqrt(len(losses))
                if len(losses) > 1
                else None,
                "bits_per_byte": _bits_per_byte(float(losses.sum()), float(sizes.sum())),
                "cumulative_nll": nll_so_far / tokens_so_far,
            }
        )
    return rows


def cumulative(scored: Scored) -> list[tuple[float, float]]:
    """(tokens so far, mean loss of those scored so far) at places that are evenly spread over a
    logarithmic scale."""
    sums, points, place = scored.losses.cumsum(0), [], float(FIRST_BUCKET)
    while place < scored.tokens * 2 ** (1 / _POINTS):
        upto = min(round(place), scored.tokens)
        count = int(torch.searchsorted(scored.positions, upto))
        if count:
            points.append((float(upto), float(sums[count - 1]) / count))
        place *= 2 ** (1 / _POINTS)
    return points


def _peak_memory(device: torch.device) -> int:
    """The most bytes that the process (on a GPU: PyTorch there) has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
