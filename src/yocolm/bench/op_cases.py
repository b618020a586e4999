"""The operations of `yocolm bench ops`: a case for each form and size.

A new form is one more entry in the ``forms`` of its case, a new operation one more function here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from yocolm.bench.ops import Case, Form, Inputs
from yocolm.ops.attention import attention_reference, causal_attention, window_attention
from yocolm.ops.blocks import cut_blocks
from yocolm.ops.linear import linear, pack, packed_linear
from yocolm.ops.native import attention as native_attention
from yocolm.ops.native.library import native
from yocolm.ops.native.memory import empty_huge
from yocolm.ops.norm import rms_norm, rms_norm_form
from yocolm.ops.retention import (
    CHUNK_SIZE,
    retention_chunkwise,
    retention_parallel,
    retention_step,
)
from yocolm.ops.slot_retention import prefill_slots, step_slots

BF16, FP32 = torch.bfloat16, torch.float32
PAGE = 64
# Query heads, key heads, head size.
HEADS = ((4, 1, 256), (4, 1, 512), (8, 2, 128), (8, 2, 256), (16, 4, 64), (12, 4, 64), (8, 8, 64))
LINEARS = ((3072, 768), (768, 3072), (2048, 512), (1024, 1024), (8192, 768))  # [N, K]
ROWS = (1, 2, 4, 8, 16, 512)


def all_cases() -> list[Case]:
    """Every case; nothing is allocated before it is measured."""
    cases = [norm_case(rows, size, dtype) for dtype in (BF16, FP32) for rows, size in _NORMS]
    cases += [linear_case(rows, n, k) for n, k in LINEARS for rows in ROWS]
    cases += [decode_case(heads, tokens) for heads in HEADS for tokens in (32_768, 131_072)]
    cases += [prefill_case(heads, 2048, window) for heads in HEADS[:3] for window in (0, 512)]
    cases += [step_case(batch, *heads) for batch in (1, 8) for heads in ((12, 64), (16, 128))]
    return [*cases, chunk_case(2048, 12, 64), chunk_case(2048, 16, 128)]


_NORMS = ((1, 768), (1, 3072), (512, 768), (2048, 3072))


def _forms(torch_form: Form, native_form: Form) -> dict[str, Form]:
    """Both forms, or PyTorch's alone where there is no library."""
    forms = {"torch": torch_form}
    return forms if native().handle is None else {**forms, "native": native_form}


def _random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def norm_case(rows: int, size: int, dtype: torch.dtype) -> Case:
    def make(seed: int) -> Inputs:
        return _random(seed, rows, size, dtype=dtype), _random(seed + 1, size, dtype=dtype)

    return Case(
        "rms-norm",
        f"{rows}x{size}",
        dtype,
        make,
        lambda x, w: rms_norm_form(x.double(), w.double(), 1e-6),
        _forms(lambda x, w: rms_norm_form(x, w, 1e-6), lambda x, w: rms_norm(x, w, 1e-6)),
        bytes=2 * rows * size * dtype.itemsize,
        flops=4 * rows * size,
    )


def linear_case(rows: int, n: int, k: int) -> Case:
    """A weight as PyTorch keeps it, and packed."""

    def make(seed: int) -> Inputs:
        weight = _random(seed, n, k, dtype=BF16)
        return _random(seed + 1, rows, k, dtype=BF16), weight, pack(weight)

    forms: dict[str, Form] = _forms(lambda x, w, _: F.linear(x, w), lambda x, w, _: linear(x, w))
    if native().handle is not None:
        forms["packed"] = lambda x, _, packed: packed_linear(x, packed)
    return Case(
        "linear",
        f"{rows}x{k}->{n}",
        BF16,
        make,
        lambda x, w, _: F.linear(x.double(), w.double()),
        forms,
        bytes=2 * (n * k + rows * (n + k)),
        flops=2 * rows * n * k,
    )


def decode_case(heads: tuple[int, int, int], tokens: int) -> Case:
    """One row over all pages of one sequence."""
    count, groups, dim = heads

    def make(seed: int) -> Inputs:
        shape = (tokens // PAGE, groups, PAGE, dim)
        # In huge pages, as the engine keeps them; in bfloat16 at once, as float32 may not fit.
        draw = torch.Generator().manual_seed(seed)
        k, v = (empty_huge(shape, BF16).normal_(generator=draw) for _ in range(2))
        return _random(seed, 1, count, dim, dtype=BF16), k, v, _one_sequence(k, v, tokens)

    return Case(
        "decode-attention",
        f"{count}/{groups}x{dim} @{tokens // 1024}K",
        BF16,
        make,
        _decode_reference,
        _forms(_decode_torch, _decode_native),
        bytes=2 * 2 * tokens * groups * dim,
        flops=4 * tokens * count * dim,
    )


def _one_sequence(k: Tensor, v: Tensor, tokens: int) -> Inputs:
    """Pool and sequence as the native form takes them, or nothing."""
    if native().handle is None:
        return ()
    table = torch.arange(len(k))[None]
    pool = native_attention.describe_pool(k, v)
    zero, last = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens - 1])
    batch = native_attention.describe_sequences(
        torch.tensor([0, 1]), last, torch.tensor([tokens]), table, zero
    )
    return pool, batch


def _decode_reference(q: Tensor, k: Tensor, v: Tensor, _: Inputs) -> Tensor:
    outputs = []
    for group, rows in enumerate(q[0].double().chunk(k.shape[1])):
        keys, values = (x[:, group].flatten(0, 1).double() for x in (k, v))
        outputs.append((rows @ keys.T * q.shape[-1] ** -0.5).softmax(-1) @ values)
    return torch.cat(outputs)[None]


def _decode_torch(q: Tensor, k: Tensor, v: Tensor, _: Inputs) -> Tensor:
    """PyTorch's attention with grouped queries; the keys are only looked at differently where there
    is one key head, and copied together where there are more."""
    keys, values = (x.transpose(0, 1).flatten(1, 2)[None] for x in (k, v))
    rows = q.transpose(0, 1)[None]
    return F.scaled_dot_product_attention(rows, keys, values, enable_gqa=True)[0].transpose(0, 1)


def _decode_native(q: Tensor, _k: Tensor, _v: Tensor, where: Inputs) -> Tensor:
    return native_attention.attend(where[0], where[1], None, q)


def prefill_case(heads: tuple[int, int, int], tokens: int, window: int) -> Case:
    """All rows of one prompt, causal, with a window or without."""
    count, groups, dim = heads

    def make(seed: int) -> Inputs:
        q = _random(seed, tokens, count, dim, dtype=BF16)
        k, v = (_random(seed + i, tokens, groups, dim, dtype=BF16) for i in (1, 2))
        return q, k, v

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
        return attention_reference(q.double(), k, v, where, where, window=window)

    def torch_form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if window:
            return window_attention(q, k, v, [tokens], window)
        return causal_attention(q, k, v, [tokens])

    seen = sum(min(i + 1, window or tokens) for i in range(tokens))
    return Case(
        "prefill-attention",
        f"{count}/{groups}x{dim} {tokens} tokens" + f" window {window}" * bool(window),
        BF16,
        make,
        reference,
        {"torch": torch_form},
        bytes=2 * tokens * (2 * count + 2 * groups) * dim,
        flops=4 * seen * count * dim,
    )


def _retention_inputs(seed: int, tokens: int, heads: int, dim: int) -> Inputs:
    q, k, v = (_random(seed + i, tokens, heads, dim, dtype=BF16) for i in range(3))
    return q, k, v, -torch.rand(tokens, heads, generator=torch.Generator().manual_seed(seed)) / 16


def step_case(batch: int, heads: int, dim: int) -> Case:
    """A token a sequence; states lie in the slots of a pool."""

    def make(seed: int) -> Inputs:
        state = _random(seed + 9, batch, heads, dim, dim, dtype=FP32)
        return *_retention_inputs(seed, batch, heads, dim), state, torch.arange(batch)

    def reference(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, _: Tensor
    ) -> Tensor:
        return retention_step(q.double(), k.double(), v.double(), decay.double(), state.double())

    return Case(
        "retention-step",
        f"{batch}x{heads}x{dim}",
        BF16,
        make,
        reference,
        _forms(lambda q, k, v, d, state, _: retention_step(q, k, v, d, state), step_slots),
        bytes=2 * 4 * batch * heads * dim * dim,
        flops=6 * batch * heads * dim * dim,
    )


def chunk_case(tokens: int, heads: int, dim: int) -> Case:
    """A prompt from an empty state on."""

    def make(seed: int) -> Inputs:
        return _retention_inputs(seed, tokens, heads, dim)

    def reference(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        return retention_parallel(q.double(), k.double(), v.double(), decay.double())

    blocks = cut_blocks([tokens], CHUNK_SIZE, torch.device("cpu"))
    pool, slots = torch.zeros(1, heads, dim, dim), torch.zeros(1, dtype=torch.int64)
    edges = torch.tensor([0, tokens])
    return Case(
        "retention-prefill",
        f"{tokens}x{heads}x{dim}",
        BF16,
        make,
        reference,
        _forms(
            lambda q, k, v, decay: retention_chunkwise(q, k, v, decay, blocks)[0],
            lambda q, k, v, decay: prefill_slots(
                q, k, v, decay, pool, slots, edges, lambda: blocks
            )[0],
        ),
        bytes=2 * 4 * tokens * heads * dim,
        # Within chunks of C: scores and their product with v; between them: state in and out.
        flops=tokens * heads * (2 * CHUNK_SIZE * dim + 4 * dim * dim),
    )
