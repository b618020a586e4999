"""A teacher beside a model that several ranks share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ranks as world
from training import values, write_texts
from yocolm.config import parse_config
from yocolm.models.registry import build_model
from yocolm.models.weights import save_weights
from yocolm.train.distributed import Ranks
from yocolm.train.tokenizer import train_tokenizer

STEPS = 3


def steps(ranks: Ranks, config: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    one = world.make(ranks, config)
    return [one.train_step()[:2] for _ in range(STEPS)]


def teacher(folder: Path, config: dict[str, Any]) -> str:
    """A Transformer at random with the vocabulary of the tokenizer, which it makes."""
    text = (folder / "a.txt").read_text()
    size = train_tokenizer([text], 300, folder / "tokenizer.json").get_vocab_size()
    fields = {**config, "vocab_size": size, "max_position_embeddings": 24}
    model: Any = build_model(parse_config(fields), "cpu", torch.float32)
    model.init_weights(5)
    save_weights(model, folder / "teacher")
    return str(folder / "teacher")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_learn_from_a_teacher_as_one_does(strategy: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    config = values(tmp_path, "yoco", accumulate=2)
    llama = values(tmp_path, "llama")["model"]
    config["distill"] = {"teacher": teacher(tmp_path, llama), "hidden_weight": 0.5, "weight": 0.5}
    config["train"]["gradient_checkpointing"] = strategy == "fsdp"
    alone = steps(Ranks(), {**config, "output_dir": str(tmp_path / "alone")})
    config["parallel"] = {"strategy": strategy}
    config["output_dir"] = str(tmp_path / "both")
    for found in world.run(2, steps, config):
        np.testing.assert_allclose(found, alone, rtol=2e-4)
