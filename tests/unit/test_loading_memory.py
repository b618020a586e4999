"""Peak memory of loading, files' pages included: the weights once, and little else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from yocolm.config import Gemma4Config, LlamaConfig, ModelConfig, parse_config
from yocolm.models.layouts import weight_layout
from yocolm.models.tensor_files import SINGLE_FILE
from yocolm.ops.native.library import native
from yocolm.ops.native.memory import SLAB

MB = 1_000_000
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory"
)

# Loads a model and reports bytes: the peak above what was there before, and what is left.
SCRIPT = """
import json, sys, torch
from yocolm.models.registry import load_model

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

folder, warm, dtype, tables, packed = sys.argv[1:]
load_model(warm, dtype, per_layer_tables=tables, packed=packed == "packed")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = resident("VmRSS")
model, _ = load_model(folder, dtype, per_layer_tables=tables, packed=packed == "packed")
report = {"peak": resident("VmHWM") - before, "left": resident("VmRSS") - before}
report["weights"] = sum(weight.nbytes for weight in model.state_dict().values())
if hasattr(model, "per_layer"):
    rows = model.per_layer.table.weight.shape[0]
    for first in range(7):  # in all, every seventh row: every page of the file
        model.per_layer.table(torch.arange(first * rows // 7, (first + 1) * rows // 7, 7), 0, 64,
                              torch.float32)
    report["looked_up"] = resident("VmRSS") - before
print(json.dumps(report))
"""


def measure(
    folder: Path, warm: Path, dtype: str, tables: str = "mapped", form: str = "plain"
) -> dict[str, int]:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(warm), dtype, tables, form]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(output.stdout)


def write(config: ModelConfig, folder: Path, dtype: torch.dtype) -> Path:
    """A checkpoint of ones, written without the code under test."""
    folder.mkdir()
    parts = [part for parts in weight_layout(config).values() for part in parts]
    tensors = {part.name: torch.ones(part.shape, dtype=dtype) for part in parts}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder


def llama(vocab_size: int, layers: int) -> LlamaConfig:
    """Half of it is one tensor, the tied embeddings."""
    config = parse_config(
        {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "tie_word_embeddings": True,
        }
    )
    assert isinstance(config, LlamaConfig)
    return config


def gemma(table_rows: int) -> Gemma4Config:
    config = parse_config(
        {
            "model_type": "gemma4_text",
            "vocab_size": 1000,
            "vocab_size_per_layer_input": table_rows,
            "hidden_size": 64,
            "hidden_size_per_layer_input": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "global_head_dim": 32,
        }
    )
    assert isinstance(config, Gemma4Config)
    return config


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [(torch.bfloat16, "bfloat16"), (torch.float32, "bfloat16"), (torch.bfloat16, "float32")],
)
def test_peak_is_under_1_15_times_the_weights(
    tmp_path: Path, stored: torch.dtype, loaded: str
) -> None:
    folder = write(llama(100_000, 12), tmp_path / "model", stored)
    warm = write(llama(100, 1), tmp_path / "warm", stored)
    report = measure(folder, warm, loaded)
    assert report["weights"] > 200 * MB
    assert 0.95 * report["weights"] < report["peak"] < 1.15 * report["weights"]
    assert report["left"] < 1.05 * report["weights"]


@pytest.mark.skipif(native().handle is None, reason=native().reason)
def test_packed_for_serving_the_weights_are_held_once(tmp_path: Path) -> None:
    """All of them fit into one slab, embeddings too."""
    folder = write(llama(6000, 1), tmp_path / "model", torch.float32)
    warm = write(llama(100, 1), tmp_path / "warm", torch.float32)
    report = measure(folder, warm, "float32", form="packed")
    assert 25 * MB < report["weights"] < SLAB
    assert 0.9 * report["weights"] < report["left"] < 1.25 * report["weights"]


def test_a_mapped_table_is_never_resident(tmp_path: Path) -> None:
    folder = write(gemma(200_000), tmp_path / "model", torch.bfloat16)
    warm = write(gemma(100), tmp_path / "warm", torch.bfloat16)
    table = 200_000 * 6 * 64 * 2
    mapped, resident = (measure(folder, warm, "float32", kind) for kind in ("mapped", "resident"))
    assert mapped["peak"] < 0.1 * table and mapped["looked_up"] < 0.1 * table
    assert 2 * table < resident["peak"] < 1.15 * resident["weights"]
