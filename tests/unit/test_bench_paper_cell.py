"""The processes that `yocolm bench paper` measures in: parts of memory against the formulas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from yocolm.bench.paper_run import AT_ONCE
from yocolm.config import CrossConfig, LlamaConfig, RetentionConfig, WindowConfig, YocoConfig
from yocolm.models.activations import activation_bytes
from yocolm.models.presets import llama_twin, preset
from yocolm.models.spec import model_spec
from yocolm.ops.native.library import native
from yocolm.ops.native.memory import HUGE_PAGE, SLAB

YOCO = preset("160M")
assert isinstance(YOCO, YocoConfig) and isinstance(YOCO.mixer, RetentionConfig)
ROPE = YOCO.cross.rope
RETENTION = replace(
    YOCO,
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=4,
    num_self_layers=2,
    mixer=RetentionConfig(8, 64, ROPE),
    cross=CrossConfig(8, 2, 64, ROPE),
)
MODELS = {
    "retention": RETENTION,
    "window": replace(RETENTION, mixer=WindowConfig(8, 2, 64, 256, ROPE)),
    "narrow window": replace(
        RETENTION, mixer=WindowConfig(8, 2, 64, 256, ROPE), intermediate_size=64
    ),
    "transformer": llama_twin(RETENTION),
    "narrow": llama_twin(replace(RETENTION, intermediate_size=64)),
    "wide": llama_twin(replace(RETENTION, intermediate_size=4096)),
}
PROMPT, CHUNK = 1536, 1024


def answer(do: str, config: YocoConfig | LlamaConfig, **changes: Any) -> dict[str, Any]:
    request = {
        "do": do,
        "config": config.to_hf(),
        "device": "cpu",
        "dtype": "bfloat16",
        "prompt": PROMPT,
        "generate": 4,
        "chunk": CHUNK,
        "batch": 1,
        "threads": 1,
        **changes,
    }
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-m", "yocolm.bench.paper_cell"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": AT_ONCE, "PYTHONPATH": str(source)},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK) or native().handle is None,
    reason="needs Linux's peak of memory, and native kernels",
)
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_memory_are_what_the_formulas_say(name: str) -> None:
    config = MODELS[name]
    spec, found = model_spec(config), answer("memory", config)
    pages = -(-PROMPT // 64) + 2  # of the tokens, of the one behind them, and the scratch page
    assert found["kv"] == pages * spec.page_bytes(64, 2)
    assert found["state"] == 2 * spec.slot_bytes(2)
    expected = activation_bytes(config, CHUNK, threads=1)
    # A huge page is resident as a whole, whoever touched it first.
    assert abs(found["activations"] - expected) <= 0.1 * expected + HUGE_PAGE
    assert spec.weight_bytes(2) <= found["weights"] + HUGE_PAGE
    assert found["weights"] <= spec.weight_bytes(2) + SLAB // 4  # nothing of what was packed


def test_times_are_of_all_sequences_and_errors_are_said() -> None:
    found = answer("time", RETENTION, prompt=128, batch=2)
    assert 0 < found["prefill"] < found["whole"]
    assert found["process_peak"] > model_spec(RETENTION).weight_bytes(2)
    # Nothing has so much memory.
    assert "error" in answer("time", RETENTION, prompt=1 << 44)
