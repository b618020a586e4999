"""Tiny models of every family, engines on them, and the dense forward that all paths must equal."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from tolerances import CROSS_PATH
from yocolm.config import (
    AttentionConfig,
    CrossConfig,
    ExpertsConfig,
    Gemma3nConfig,
    Gemma4Config,
    GemmaConfig,
    LlamaConfig,
    ModelConfig,
    RetentionConfig,
    RopeConfig,
    WindowConfig,
    YocoConfig,
)
from yocolm.engine.drawing import EntryOutput
from yocolm.engine.engine import Engine
from yocolm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from yocolm.engine.plan import Plan
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import Compile, EngineSettings
from yocolm.models.base import Batch, CausalLM
from yocolm.models.dense import DenseState
from yocolm.models.layers import pack_weights
from yocolm.models.registry import build_model
from yocolm.models.spec import model_spec
from yocolm.tokenizer import Tokenizer

VOCAB = 61
LENGTH = 256  # max_position_embeddings
WINDOW = 5

_YOCO_ROPE = RopeConfig(10_000.0, interleaved=True, inclusive=True)
_FLA_ROPE = RopeConfig(500.0, interleaved=True, inclusive=False)
_HALF_ROPE = RopeConfig(10_000.0, interleaved=False, inclusive=False)
_FAST_ROPE = RopeConfig(500.0, interleaved=False, inclusive=False)


def _yoco(
    layers: tuple[int, int],
    mixer: RetentionConfig | WindowConfig,
    cross: CrossConfig,
    tied: bool,
) -> YocoConfig:
    """``layers``: those of the self-decoder and of the cross-decoder."""
    return YocoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=sum(layers),
        num_self_layers=layers[0],
        mixer=mixer,
        cross=cross,
        tie_word_embeddings=tied,
        max_position_embeddings=LENGTH,
    )


def _llama(layers: int, kv_heads: int, bias: bool, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=8,
        rope=_HALF_ROPE,
        attention_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=tied,
        max_position_embeddings=LENGTH,
    )


_WINDOW, _FULL = "sliding_attention", "full_attention"


def _gemma4(
    types: str, shared: int, kv_heads: tuple[int, int] = (1, 1), **more: Any
) -> Gemma4Config:
    """``types``: a letter for each layer, w(indow) or f(ull); KV heads of either."""
    partial = RopeConfig(1_000.0, interleaved=False, inclusive=False, fraction=0.25)
    fields = {"per_layer_size": 16, "mlp_size": 24, "final_softcap": 20.0, **more}
    k_is_v = fields.pop("k_is_v", False)
    return Gemma4Config(
        vocab_size=VOCAB,
        hidden_size=32,
        layer_types=tuple(_WINDOW if letter == "w" else _FULL for letter in types),
        num_kv_shared_layers=shared,
        full=AttentionConfig(4, kv_heads[1], 16, partial, k_is_v=k_is_v),
        sliding=AttentionConfig(4, kv_heads[0], 8, _HALF_ROPE, WINDOW),
        per_layer_vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        **fields,
    )


def _gemma3n(
    types: str, shared: int, kv_heads: int, sparsity: tuple[float, ...], **more: Any
) -> Gemma3nConfig:
    """``types`` as of Gemma 4; ``sparsity`` of the first layers."""
    fields = {"per_layer_size": 16, "final_softcap": 20.0, "laurel_rank": 5, **more}
    widths = tuple(24 if i % 2 else 40 for i in range(len(types)))
    return Gemma3nConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        layer_types=tuple(_WINDOW if letter == "w" else _FULL for letter in types),
        num_kv_shared_layers=shared,
        full=AttentionConfig(4, kv_heads, 8, _FAST_ROPE),
        sliding=AttentionConfig(4, kv_heads, 8, _HALF_ROPE, WINDOW),
        per_layer_vocab_size=VOCAB - 3,
        mlp_widths=widths,
        activation_sparsity=sparsity + (0.0,) * (len(types) - len(sparsity)),
        max_position_embeddings=LENGTH,
        **fields,
    )


FAMILIES: dict[str, ModelConfig] = {
    "retention": _yoco(
        (2, 1),
        RetentionConfig(2, 16, _YOCO_ROPE, 16.0),
        CrossConfig(4, 4, 8, _YOCO_ROPE),
        tied=True,
    ),
    "retention-grouped": _yoco(
        (1, 3),
        RetentionConfig(4, 8, _FLA_ROPE, 2.0),
        CrossConfig(4, 1, 8, _FLA_ROPE),
        tied=False,
    ),
    "window": _yoco(
        (2, 2),
        WindowConfig(4, 4, 8, WINDOW, _HALF_ROPE),
        CrossConfig(2, 2, 16, _FLA_ROPE),
        tied=True,
    ),
    "window-grouped": _yoco(
        (3, 1),
        WindowConfig(4, 2, 8, WINDOW + 2, _YOCO_ROPE, qkv_bias=True),
        CrossConfig(4, 2, 8, _YOCO_ROPE, qkv_bias=True, qk_norm=True),
        tied=False,
    ),
    "llama": _llama(3, kv_heads=2, bias=True, tied=False),
    "llama-one-layer": _llama(1, kv_heads=4, bias=False, tied=True),
    "gemma4": _gemma4("wwfwwfwwf", 4, wide_mlp=True),  # last writer: window
    "gemma4-full-last": _gemma4(
        "wfwfwf", 2, (2, 4), attention_bias=True, tie_word_embeddings=False
    ),
    "gemma4-far-read": _gemma4("fwwwf", 2, (4, 2), per_layer_size=0),
    "gemma4-experts": _gemma4(
        "wwf", 0, (2, 1), per_layer_size=0, k_is_v=True, experts=ExpertsConfig(5, 2, 8)
    ),
    "gemma3n": _gemma3n("wfwwf", 2, 1, (0.9, 0.5)),  # last writer: window
    "gemma3n-full-last": _gemma3n(
        "wfwfwf", 2, 2, (0.8,), attention_bias=True, tie_word_embeddings=False, altup_active=1
    ),
    "gemma3n-windows": _gemma3n("www", 1, 2, ()),  # nothing grows
    "gemma3n-unshared": _gemma3n(
        "wf", 0, 4, (), altup_num_inputs=3, altup_active=2, altup_correct_scale=False
    ),
}
YOCO_FAMILIES = [name for name, config in FAMILIES.items() if isinstance(config, YocoConfig)]
GEMMA_FAMILIES = [name for name, config in FAMILIES.items() if isinstance(config, GemmaConfig)]
# Those whose pages can run out: in the others nothing grows with the context.
GROWING = [name for name, config in FAMILIES.items() if model_spec(config).global_stores]
ONE_OF_EACH = ["retention", "window-grouped", "llama", "gemma4-full-last", "gemma3n"]

BRANCH_NORMS = ("post_attn_norm.weight", "post_mlp_norm.weight")
BRANCH_NORMS += ("per_layer_norm.weight", "laurel.norm.weight")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Masking bugs show best in float64; the dtypes that are served need no more than one of each kind.
CASES = [(name, "float64") for name in FAMILIES]
CASES += [(name, dtype) for name in ONE_OF_EACH for dtype in ("float32", "bfloat16")]


@lru_cache
def tiny_model(name: str, dtype: str = "float32") -> nn.Module:
    """The shared model of a family: change nothing in it. The same weights for every dtype."""
    return fresh_model(name, dtype)


@lru_cache
def served_model(name: str, dtype: str = "float32") -> nn.Module:
    """The same as it is served: its weights packed, where there are native kernels."""
    model = fresh_model(name, dtype)
    pack_weights(model)
    return model


@torch.no_grad()
def fresh_model(name: str, dtype: str = "float32") -> nn.Module:
    """Weights that leave nothing idle: norms away from 1, biases from 0, gates widely spread."""
    model = build_model(FAMILIES[name], "cpu", torch.float64)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    for part, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if part.endswith(("norm.weight", "scale")):
            parameter.copy_(1 + 0.2 * noise)
            if isinstance(FAMILIES[name], GemmaConfig) and part.endswith("q_norm.weight"):
                parameter.mul_(len(parameter) ** -0.5)  # in place of attention's scale
            elif part.endswith(BRANCH_NORMS):
                parameter.mul_(0.3)  # as deep models have them: bfloat16's rounding grows less
        elif part.endswith(".bias"):
            parameter.copy_(0.3 * noise)
        else:
            gain = 4.0 if part.endswith("gk.weight") else 1.0  # decays from strong to none
            parameter.copy_(noise * gain / parameter.shape[1] ** 0.5)
    return model.to(DTYPES[dtype]).eval()


def make_engine(
    name: str,
    dtype: str = "float32",
    *,
    model: object | None = None,
    pages: int = 200,
    page_size: int = 4,
    seqs: int = 8,
    budget: int = 64,
    length: int | None = None,
    eos: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    fast_prefill: bool = True,
    compile: Compile = "auto",
    caching: bool = False,
    checkpoints: int = 0,
    swap: int | str = 0,
    **more: Any,
) -> Engine:
    """An engine with so many pages and slots to hand out, and a budget of tokens a step.

    Without a prefix cache and swap space, unless asked for: chunks end where the budget does.
    """
    spec, width = model_spec(FAMILIES[name]), DTYPES[dtype].itemsize
    memory = (seqs + checkpoints * caching + 1) * spec.slot_bytes(width)
    memory += (pages + 1) * spec.page_bytes(page_size, width)
    settings = EngineSettings(
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        max_model_len=length,
        kv_memory=memory,
        page_size=page_size,
        fast_prefill=fast_prefill,
        compile=compile,
        prefix_caching=caching,
        num_checkpoints=checkpoints,
        swap_space=swap,
        **more,
    )
    module = cast(CausalLM, served_model(name, dtype) if model is None else model)
    return Engine(module, FAMILIES[name], tokenizer, settings, eos)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    return random.Random(seed).choices(range(VOCAB), k=length)


def greedy(max_tokens: int = 4, **more: Any) -> SamplingParams:
    """Greedy, with all the logprobs that there are to compare."""
    fields = {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2, **more}
    return SamplingParams(max_tokens=max_tokens, **fields)


def samples(n: int, max_tokens: int = 6, **more: Any) -> SamplingParams:
    """Several samples of the plain distribution, with logprobs."""
    fields = {"logprobs": 1, "prompt_logprobs": 1, "seed": 11, **more}
    return SamplingParams(n=n, max_tokens=max_tokens, **fields)


def run(
    engine: Engine, requests: Mapping[str, tuple[list[int], SamplingParams]]
) -> dict[str, RequestOutput]:
    """Add all requests at once and answer them."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    return finish(engine)


def run_one(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    return run(engine, {"one": (prompt, params)})["one"]


def finish(engine: Engine, max_steps: int = 5000) -> dict[str, RequestOutput]:
    """Step until nothing is left, checking queues and pools, which end up empty."""
    done: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            break
        done.update((out.request_id, out) for out in engine.step() if out.finished)
        engine.check()
    assert not engine.has_unfinished_requests(), f"not done after {max_steps} steps"
    assert_empty(engine)
    return done


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    """One output of all deltas of a request, which are checked to be that."""
    merged: dict[int, CompletionOutput] = {}
    for output in outputs:
        assert output.finished is (output is outputs[-1])
        assert output.prompt_logprobs is None or output is outputs[0]
        for sample in output.outputs:
            whole = merged.get(sample.index)
            if whole is None:
                merged[sample.index] = sample
                continue
            assert whole.finish_reason is None, "something came after the end"
            whole.text += sample.text
            whole.token_ids = whole.token_ids + sample.token_ids
            if sample.logprobs is not None:
                whole.logprobs = [*(whole.logprobs or []), *sample.logprobs]
            whole.cumulative_logprob = sample.cumulative_logprob
            whole.finish_reason, whole.stop_reason = sample.finish_reason, sample.stop_reason
    last = outputs[-1]
    last.outputs = [merged[index] for index in sorted(merged)]
    last.prompt_logprobs = outputs[0].prompt_logprobs
    return last


def watch_plans(engine: Engine) -> list[Plan]:
    """The plans that the engine will run, as they come."""
    plans: list[Plan] = []
    run_plan = engine.runner.run

    def watched(plan: Plan) -> list[EntryOutput]:
        plans.append(plan)
        return run_plan(plan)

    engine.runner.run = watched
    return plans


def poison(engine: Engine) -> None:
    """Fill with NaN whatever nobody owns: scratch, and all free pages and slots."""
    state, scheduler = engine.runner.state, engine.scheduler
    slot_pools = [*(pool for pair in state.rings for pool in pair), *state.recurrent]
    page_pools = [pool for pair in state.pages for pool in pair]
    if engine.runner.compiled is not None:
        engine.runner.compiled.poison()
    for owners, pools in ((scheduler.slot_pool, slot_pools), (scheduler.page_pool, page_pools)):
        free = [number for number in range(owners.size) if owners.references(number) == 0]
        for pool in pools:
            pool[free] = float("nan")


def assert_empty(engine: Engine) -> None:
    """All pages and slots are free again, or kept for prompts that begin alike."""
    memory = engine.scheduler.memory
    usage, copied = memory.usage(), memory.copies.references()  # what the next step will copy
    assert usage.pages_used <= sum(kind == "page" for kind, _ in copied)
    assert usage.slots_used <= sum(kind == "slot" for kind, _ in copied)


@torch.no_grad()
def packed_logits(
    model: nn.Module, sequences: Sequence[Sequence[int]], rows: Sequence[int] | None = None
) -> Tensor:
    """Logits [R, V] of one dense forward pass over whole sequences; all rows if None."""
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    wanted = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    batch = Batch.packed(tokens, [len(sequence) for sequence in sequences], wanted)
    logits = model.logits
    assert callable(logits)
    return logits(model(batch, DenseState()))


@lru_cache(maxsize=512)
def dense_logprobs(name: str, dtype: str, tokens: tuple[int, ...]) -> Tensor:
    """Log-probabilities [T, V] behind each token of one sequence."""
    logits = packed_logits(tiny_model(name, dtype), [tokens])
    return logits.to(torch.float64 if dtype == "float64" else torch.float32).log_softmax(-1)


def deviation(output: RequestOutput, name: str, dtype: str = "float32") -> float:
    """The largest difference between a request's logprobs and those of the dense forward pass.

    Greedy tokens must be as likely as the likeliest one, within the tolerance.
    """
    assert output.error is None
    prompt, worst = output.prompt_token_ids, 0.0
    for sample in output.outputs:
        tokens = (*prompt, *sample.token_ids)
        wanted = dense_logprobs(name, dtype, tokens)
        rows = list(enumerate(output.prompt_logprobs or [], -1))
        rows += enumerate(sample.logprobs or [], len(prompt) - 1)
        for row, entries in rows:
            if entries is not None:
                assert tokens[row + 1] in entries
                worst = max(worst, _entry_deviation(entries, wanted[row]))
        assert sample.logprobs is None or len(sample.logprobs) == len(sample.token_ids)
    return worst


def _entry_deviation(entries: Mapping[int, Logprob], wanted: Tensor) -> float:
    return max(abs(entry.logprob - float(wanted[token])) for token, entry in entries.items())


def assert_dense(
    output: RequestOutput, name: str, dtype: str = "float32", is_greedy: bool = True
) -> float:
    """Assert that a request's logprobs, and greedy tokens, are those of the dense forward pass."""
    tolerance = CROSS_PATH[dtype]
    worst = deviation(output, name, dtype)
    assert worst <= tolerance, f"{name} {dtype}: off by {worst:.3g}"
    for sample in output.outputs if is_greedy else ():
        rows = dense_logprobs(name, dtype, (*output.prompt_token_ids, *sample.token_ids))
        for row, token in enumerate(sample.token_ids, len(output.prompt_token_ids) - 1):
            assert rows[row].max() - rows[row][token] <= 2 * tolerance, "not the likeliest token"
    return worst


def assert_same(got: RequestOutput, wanted: RequestOutput, dtype: str = "float32") -> None:
    """Assert that two runs of one request agree: tokens equal, logprobs within the tolerance."""
    tolerance = CROSS_PATH[dtype]
    assert got.prompt_token_ids == wanted.prompt_token_ids and got.error == wanted.error
    assert len(got.outputs) == len(wanted.outputs)
    pairs = [(got.prompt_logprobs, wanted.prompt_logprobs)]
    for ours, theirs in zip(got.outputs, wanted.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason and ours.text == theirs.text
        assert ours.stop_reason == theirs.stop_reason
        pairs.append((cast(list, ours.logprobs), cast(list, theirs.logprobs)))
    for ours, theirs in pairs:
        assert (ours is None) == (theirs is None)
        for a, b in zip(ours or [], theirs or [], strict=True):
            assert (a is None) == (b is None)
            # The last of the likeliest may differ where two are equally likely.
            for token in set(a or {}) & set(b or {}):
                assert abs((a or {})[token].logprob - (b or {})[token].logprob) <= tolerance
            assert list(a or {})[:1] == list(b or {})[:1]
