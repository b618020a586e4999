"""Gemma 3n and Gemma 4 equal transformers: sharing, windows, heads, streams, experts."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gemma_reference import (
    VOCAB,
    build,
    build_multimodal,
    gemma3n_config,
    gemma4_config,
    greedy,
    logits,
    logits_in_float64,
    train_logits,
)
from references import logits_of, worst
from tolerances import GOLDEN_FLOAT32, GOLDEN_FLOAT64
from yocolm import LLM, SamplingParams
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.layouts import weight_layout
from yocolm.models.registry import load_config, load_model

LENGTH = 40
NEW_TOKENS = 5
DENSE = {"activation_sparsity_pattern": None}
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
NO_INPUTS = {"hidden_size_per_layer_input": 0}

SLOW_ROPE = {"rope_theta": 300.0, "factor": 4.0}
FAST_ROPE = {"rope_theta": 50.0, "rope_type": "default"}

GEMMA3N = {
    "E2B-like": gemma3n_config("wwwwf" * 3, 5, num_key_value_heads=2),
    "E4B-like": gemma3n_config("wwwwf" * 3, 10, num_key_value_heads=2),
    "last-writer-slides": gemma3n_config("wwfwwfwwf", 4),
    "one-full": gemma3n_config("wwfww", 2, num_key_value_heads=4),
    "full-first": gemma3n_config("fwwwf", 1, sliding_window=2),
    "one-writer-each": gemma3n_config("wffwfww", 5, num_key_value_heads=2, **DENSE),
    "nothing-shared": gemma3n_config("wfw", 0, num_key_value_heads=2, attention_bias=True),
    "window-longer-than-prompt": gemma3n_config("wwfwf", 2, sliding_window=64, **DENSE),
    "window-of-one": gemma3n_config("wwfwf", 2, sliding_window=1),
    "biased-untied": gemma3n_config("wfwfwf", 2, attention_bias=True, tie_word_embeddings=False),
    "three-streams": gemma3n_config("wfwf", 2, altup_num_inputs=3, altup_active_idx=2),
    "active-is-second": gemma3n_config("wfwwf", 3, altup_active_idx=1, altup_correct_scale=False),
    "all-sparse": gemma3n_config("wfwf", 1, activation_sparsity_pattern=[0.95, 0.7, 0.3, 0.05]),
    "slowed-rope": gemma3n_config(
        "wfwf",
        2,
        rope_parameters={
            "full_attention": {**SLOW_ROPE, "rope_type": "linear"},
            "sliding_attention": FAST_ROPE,
        },
    ),
}
GEMMA4 = {
    "E2B-like": gemma4_config("wwwwf" * 3, 10, use_double_wide_mlp=True),
    "E4B-like": gemma4_config("wwwwwf" * 2, 6, num_key_value_heads=2),
    "26B-A4B-like": gemma4_config(
        "wwwf",
        0,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        moe_intermediate_size=10,
        **EXPERTS,
        **NO_INPUTS,
    ),
    "31B-like": gemma4_config(
        "wwwwwf",
        0,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        **NO_INPUTS,
    ),
    "last-writer-slides": gemma4_config("wwfwwfwwf", 4, use_double_wide_mlp=True),
    "one-full": gemma4_config("wwwf", 0, num_key_value_heads=2),
    "full-first": gemma4_config("fwwwf", 1, sliding_window=2, num_key_value_heads=4),
    "one-writer-each": gemma4_config("wffwfwf", 5, use_double_wide_mlp=True),
    "k-is-v-and-shared": gemma4_config(
        "wwfwwf", 2, attention_k_eq_v=True, num_global_key_value_heads=4
    ),
    "window-longer-than-prompt": gemma4_config("wwfwf", 2, sliding_window=64),
    "window-of-one": gemma4_config("wwfwf", 2, sliding_window=1),
    "biased-untied": gemma4_config(
        "wfwfwf", 2, attention_bias=True, tie_word_embeddings=False, final_logit_softcapping=None
    ),
    "experts-and-inputs": gemma4_config(
        "wwfwf", 2, moe_intermediate_size=8, use_double_wide_mlp=True, **EXPERTS
    ),
    "no-inputs": gemma4_config("wfwwf", 3, num_key_value_heads=2, **NO_INPUTS),
    "slowed-rope": gemma4_config(
        "wfwf",
        2,
        rope_parameters={
            "full_attention": {
                **SLOW_ROPE,
                "rope_type": "proportional",
                "partial_rotary_factor": 0.7,
            },
            "sliding_attention": FAST_ROPE,
        },
    ),
}
CONFIGS = {f"gemma3n-{name}": config for name, config in GEMMA3N.items()}
CONFIGS |= {f"gemma4-{name}": config for name, config in GEMMA4.items()}
TABLES = ("embed_tokens.weight", "per_layer.table.weight")
SHARING = ("E2B-like", "last-writer-slides")
SOME = [f"{family}-{name}" for family in ("gemma3n", "gemma4") for name in SHARING]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Reference:
    """A model of transformers, its folder, and what it says of ``tokens``."""

    model: Any
    folder: Path
    tokens: list[int]

    @cached_property
    def logits(self) -> Tensor:
        return logits(self.model, self.tokens)


References = Callable[[str], Reference]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The reference of a configuration, built once."""

    @cache
    def of(name: str) -> Reference:
        seed = zlib.crc32(name.encode())
        model = build(CONFIGS[name], seed)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return Reference(model, folder, random.Random(seed).choices(range(VOCAB), k=LENGTH))

    return of


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str, reference: References) -> None:
    golden = reference(name)
    model, _ = load_model(golden.folder)
    assert 0.3 < float(golden.logits.std()) < 2  # the tolerance is meant for such logits
    assert worst(logits_of(model, torch.tensor(golden.tokens)), golden.logits) < GOLDEN_FLOAT32


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_float64(name: str, reference: References) -> None:
    golden = reference(name)
    model, _ = load_model(golden.folder, dtype="float64")
    wanted = logits_in_float64(golden.model, golden.tokens)
    assert worst(logits_of(model, torch.tensor(golden.tokens)), wanted) < GOLDEN_FLOAT64


@pytest.mark.parametrize("name", CONFIGS)
def test_selected_rows_of_packed_sequences(name: str, reference: References) -> None:
    golden = reference(name)
    model, _ = load_model(golden.folder)
    tokens, rows = golden.tokens, [2, LENGTH - 9, LENGTH - 1, LENGTH + 6]
    batch = Batch.packed(torch.tensor(tokens + tokens[:9]), [LENGTH, 9], torch.tensor(rows))
    with torch.no_grad():
        ours = cast(Any, model).logits(model(batch, DenseState()))
    assert worst(ours, golden.logits[[row % LENGTH for row in rows]]) < GOLDEN_FLOAT32


def _engine(folder: Path, chunk: int) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        max_num_batched_tokens=chunk,
        kv_memory="4MiB",
        page_size=4,
        skip_tokenizer_init=True,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_engine(name: str, reference: References) -> None:
    """Greedy tokens and scores of several prompts, whatever the size of the chunks."""
    golden = reference(name)
    prompts = [golden.tokens, golden.tokens[3:20], golden.tokens[9:10]]
    wanted = [greedy(golden.model, prompt, NEW_TOKENS) for prompt in prompts]
    scores = golden.logits.log_softmax(-1)[:-1].gather(1, torch.tensor(golden.tokens[1:])[:, None])
    for chunk in (1, 5, 16, 100):
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        scored = replace(GREEDY, prompt_logprobs=0)
        outputs = _engine(golden.folder, chunk).generate(requests, [scored, GREEDY, GREEDY])
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        entries = cast(list, outputs[0].prompt_logprobs)[1:]
        ours = [
            entry[token].logprob for entry, token in zip(entries, golden.tokens[1:], strict=True)
        ]
        assert worst(torch.tensor(ours), scores[:, 0]) < GOLDEN_FLOAT32


@pytest.mark.parametrize("name", SOME)
def test_text_of_multimodal_checkpoints(name: str, tmp_path: Path) -> None:
    golden = build_multimodal(CONFIGS[name], seed=1)
    golden.save_pretrained(tmp_path)
    tokens = random.Random(1).choices(range(55), k=LENGTH)
    model, _ = load_model(tmp_path)
    assert worst(logits_of(model, torch.tensor(tokens)), logits(golden, tokens)) < GOLDEN_FLOAT32
    llm = _engine(tmp_path, 16)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], GREEDY)
    assert list(output.outputs[0].token_ids) == greedy(golden, tokens, NEW_TOKENS)


@pytest.mark.parametrize("name", [*SOME, "gemma3n-biased-untied", "gemma4-26B-A4B-like"])
def test_gradients(name: str, reference: References) -> None:
    """Those of transformers for every parameter, whether activations are kept or computed again."""
    golden = reference(name)
    tokens, targets = golden.tokens[:-1], torch.tensor(golden.tokens[1:])
    golden.model.zero_grad()
    F.cross_entropy(train_logits(golden.model, tokens), targets).backward()
    wanted = {f: p.grad for f, p in golden.model.named_parameters()}
    gradients = []
    for recompute in (False, True):
        model: Any = load_model(golden.folder, per_layer_tables="resident")[0].train()
        model.gradient_checkpointing = recompute
        hidden = model(Batch.packed(torch.tensor(tokens), [len(tokens)]), DenseState())
        F.cross_entropy(model.logits(hidden), targets).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    layout = weight_layout(load_config(golden.folder))
    fixed = layout.keys() - gradients[0].keys()  # buffers there: scales of layers
    assert all(part.name not in wanted for name in fixed for part in layout[name])
    for ours, grad in gradients[0].items():
        assert torch.equal(grad, gradients[1][ours])
        pieces = grad.split([part.shape[0] for part in layout[ours]])
        for part, piece in zip(layout[ours], pieces, strict=True):
            theirs = wanted[part.name]
            if ours in TABLES:  # theirs leaves padding, 0, out
                piece, theirs = piece[1:], theirs[1:]
            scale = max(1.0, float(theirs.abs().max()))
            assert float(theirs.abs().max()) > 0, part.name
            assert worst(piece, theirs) < GOLDEN_FLOAT32 * scale, part.name


def test_streams_are_clipped_in_training(tmp_path: Path) -> None:
    """As in transformers: the coefficients of AltUp, in training and only there."""
    golden = build(gemma3n_config("wfwf", 2, altup_coef_clip=0.2), seed=1)
    golden.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path)
    tokens = list(range(30))
    free = logits(golden, tokens)
    assert worst(logits_of(model, torch.tensor(tokens)), free) < GOLDEN_FLOAT32
    clipped = train_logits(golden, tokens).detach()
    assert worst(clipped, free) > 0.01
    assert worst(logits_of(model.train(), torch.tensor(tokens)), clipped) < GOLDEN_FLOAT32
