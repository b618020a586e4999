"""AltUp (Baykal et al., arXiv 2301.13310) as Gemma 3n has it: parallel streams around each layer.

A layer computes one of S streams; what it makes of the others is predicted, and corrected by how
far the prediction was off for the one. Both are linear in the streams: one pass over them behind
the layer, in ``correct``, does both. Before the layer, only the active stream is needed. The
streams are the residual path, so all of this is computed in their dtype, under autocast too.

On the CPU, in float32 and bfloat16, and without gradients, each of these is one native call. Shape
letters: T tokens (or rows), D hidden size, S streams, which lie side by side: [T, D, S].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from yocolm.ops.dtypes import own_dtype
from yocolm.ops.native import altup as native
from yocolm.ops.native.library import fits
from yocolm.ops.norm import add_norm, rms_norm

MIN_MAGNITUDE = 1e-5**0.5


class Router(NamedTuple):
    """What leads from a stream to coefficients: weights of a norm [D] and of a linear [S, D]."""

    norm: Tensor
    eps: float
    weight: Tensor


class Prediction(NamedTuple):
    """What is expected of a layer.

    active: the active stream [T, D]. mixing: by which streams move, from and to, [T, S, S].
    normed: the layer's norm of the active stream.
    """

    active: Tensor
    mixing: Tensor
    normed: Tensor


class Correction(NamedTuple):
    """How far a prediction was off.

    error: of the active stream [T, D]. gains: the share of it that is added to each stream [T, S].
    corrected: the active stream, as the per-layer input's gate sees it.
    """

    error: Tensor
    gains: Tensor
    corrected: Tensor


def predict(
    x: Tensor, router: Router, prediction: Tensor, active: int, next_weight: Tensor, next_eps: float
) -> Prediction:
    """Expect of streams [T, D, S], before a layer, what it will make of stream ``active``.

    ``prediction`` [S * S, S] leads from the router's outputs to the mixing; ``next_weight`` is of
    the layer's norm.
    """
    if _fit(x, router.norm, router.weight, prediction, next_weight):
        return Prediction(*native.predict(x, router, prediction, active, next_weight, next_eps))
    streams = x.shape[-1]
    stream = x[..., active].contiguous()
    mixing = _coefficients(router, prediction, stream)
    mixing = mixing.unflatten(-1, (streams, streams)).transpose(1, 2)  # from, to
    with own_dtype(x):
        moved = torch.bmm(x, mixing[..., active, None]).squeeze(-1)
    stream = stream + moved
    return Prediction(stream, mixing, rms_norm(stream, next_weight, next_eps))


def join(
    active: Tensor,
    attended: Tensor,
    attended_weight: Tensor,
    normed: Tensor,
    low: Tensor,
    low_weight: Tensor,
    eps: float,
    next_weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """The residual stream behind attention, and its norm before the MLP; all [T, D].

    It is joined from the ``active`` stream, the norm of what attention gave, and LAuReL's low-rank
    path, ``normed`` and the norm of ``low``. All norms have one ``eps``.
    """
    if _fit(active, attended, attended_weight, normed, low, low_weight, next_weight):
        return native.join(
            active, attended, attended_weight, normed, low, low_weight, eps, next_weight
        )
    h = add_norm(active, attended, attended_weight, eps)
    h = (h + add_norm(normed, low, low_weight, eps)) / 2**0.5
    return h, rms_norm(h, next_weight, eps)


def correction(
    h: Tensor,
    y: Tensor,
    y_weight: Tensor,
    eps: float,
    active: Tensor,
    router: Router,
    weight: Tensor,
    index: int,
    scale: Tensor | None,
) -> Correction:
    """Compare ``h + rms_norm(y)``, which a layer made, with the ``active`` stream expected of it.

    ``weight`` [S, S] leads from the router's outputs to the gains; ``index`` is the active stream's
    number, ``scale`` [D] multiplies it once corrected, or is None.
    """
    few = weight.shape[0] <= native.MAX_STREAMS
    if few and _fit(h, y, y_weight, active, router.norm, router.weight, weight, scale):
        return Correction(
            *native.correction(h, y, y_weight, eps, active, router, weight, index, scale)
        )
    made = add_norm(h, y, y_weight, eps)
    error, gains = made - active, _coefficients(router, weight, made) + 1
    corrected = active + error * gains[:, index, None]
    return Correction(error, gains, corrected if scale is None else corrected * scale)


def correct(
    x: Tensor,
    mixing: Tensor,
    error: Tensor,
    gains: Tensor,
    own: Tensor,
    own_weight: Tensor,
    eps: float,
) -> Tensor:
    """All streams behind a layer, from those before it, x [T, D, S].

    The norm of ``own`` [T, D] is added to all but the first.
    """
    if _fit(x, mixing, error, gains, own, own_weight):
        return native.correct(x, mixing, error, gains, own, own_weight, eps)
    own = rms_norm(own, own_weight, eps)
    others = F.pad(gains.new_ones(len(gains), x.shape[-1] - 1), (1, 0))
    added = torch.stack((error, own), -1)
    with own_dtype(x):
        x = torch.baddbmm(x, x, mixing)
        return x.baddbmm_(added, torch.stack((gains, others), 1))


def spread(x: Tensor, others: Tensor) -> Tensor:
    """Streams [T, D, S]: ``x`` [T, D], and ``others`` [T, (S - 1) * D] made as large as it."""
    if _fit(x, others):
        return native.spread(x, others)
    scaled = _as_large(others.unflatten(-1, (-1, x.shape[-1])), x.unsqueeze(1))
    return torch.stack((x, *scaled.unbind(1)), dim=-1)


def merge(x: Tensor, others: Tensor) -> Tensor:
    """Mean [T, D] of the first of streams [T, D, S], and of ``others`` [S - 1, T, D] as large."""
    if _fit(x, others):
        return native.merge(x, others)
    first = x[..., 0]
    return torch.stack((first, *_as_large(others, first))).mean(0)


def _coefficients(router: Router, weight: Tensor, x: Tensor) -> Tensor:
    """Outputs of ``weight`` for each token, by way of a router that sees ``x`` [T, D]."""
    with own_dtype(x):
        routed = F.linear(rms_norm(x, router.norm, router.eps), router.weight) / x.shape[-1]
        wide = routed if routed.dtype == torch.float64 else routed.float()
        return F.linear(wide.tanh().to(x.dtype), weight)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """``x`` scaled, token by token, to the root mean square of ``like``."""
    scale = _magnitude(like) / _magnitude(x).clamp(min=MIN_MAGNITUDE)
    return x * scale.to(like.dtype)


def _magnitude(x: Tensor) -> Tensor:
    """Root mean square over the last dimension, which is kept, in float32 or wider."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide) * x.shape[-1] ** -0.5


def _fit(x: Tensor, *others: Tensor | None) -> bool:
    """Whether native forms take all of these."""
    if not fits(x) or (x.dim() == 3 and x.shape[2] > native.MAX_STREAMS):
        return False
    for other in others:
        if other is not None and (other.dtype != x.dtype or not other.is_contiguous()):
            return False
    return True
