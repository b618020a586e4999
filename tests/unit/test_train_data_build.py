"""From settings to windows: layouts, what is held out, and models that see no other document."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from layouts import write_layout
from tolerances import CROSS_PATH
from training import MODELS, PARAGRAPH, settings, write_texts
from yocolm.config import parse_config
from yocolm.errors import ConfigError
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.registry import build_model
from yocolm.train.data import Sampler, Shape, Validation, build_data, cache_folder
from yocolm.train.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer([PARAGRAPH], 300, path)


def build(around: Path, tokenizer: Tokenizer, **data: Any) -> tuple[Sampler, Validation]:
    s = settings(around)
    s = replace(s, data=replace(s.data, **data))
    return build_data(s, tokenizer, cache_folder(s))


def texts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The documents of a stream."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return text.split("<|endoftext|>")[1:]


def test_where_tokens_are_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    build(tmp_path, tokenizer)
    assert (tmp_path / "run/cache").is_dir()
    build(tmp_path, tokenizer, cache_dir=str(tmp_path / "elsewhere"))
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3


def test_sources_and_validation_of_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sampler, validation = build(tmp_path, tokenizer, weights={"shore": 5.0})
    assert [(s.name, s.weight) for s in sampler.sources] == [("sea", 3.0), ("shore", 5.0)]
    assert sampler.shape == validation.shape == Shape(24)
    texts = [(tmp_path / name).read_text() for name in ("a.txt", "b.txt", "held_out.txt")]
    for tokens, text in zip(
        [*(s.tokens for s in sampler.sources), validation.tokens], texts, strict=True
    ):
        assert texts_of(tokenizer, tokens.read(0, len(tokens)).tolist()) == [text]
    assert validation.num_bytes == len(texts[2]) and not validation.spread


def test_the_authors_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_layout(tmp_path)
    for path in (tmp_path / "shard").glob("*/*.jsonl"):
        path.write_text(path.read_text() * 20)
    write_layout(tmp_path / "other", valid=[{"name": "CC", "weight": 1}])
    data = {"sources": {}, "folder": str(tmp_path), "validation": []}
    with pytest.raises(ConfigError, match="json/valid.json"):
        build(tmp_path, tokenizer, **data)
    (tmp_path / "json/valid.json").write_text('[{"name": "CC", "weight": 1}]')
    sampler, validation = build(tmp_path, tokenizer, **data, document_boundaries=True)
    assert [(s.name, s.weight) for s in sampler.sources] == [("CC", 0.5), ("StarCoder", 0.2)]
    tokens = sampler.sources[1].tokens
    texts = texts_of(tokenizer, tokens.read(0, len(tokens)).tolist())
    assert texts == ["a = 1"] * 20 + ["b = 2"] * 20
    assert len(tokens.starts(0, len(tokens))) == 40
    assert validation.num_bytes == 20 * 6 and validation.spread and validation.shape.boundaries


def test_a_share_of_all_documents_is_held_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_texts(tmp_path)
    names = {"a": [f"sea {i}" for i in range(70)], "b": [f"shore {i}" for i in range(50)]}
    s = settings(tmp_path)
    for (name, texts), source in zip(names.items(), s.data.sources.values(), strict=True):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        source.files[:] = [str(path)]

    def split(share: float, seed: int = 0) -> tuple[list[str], list[str]]:
        data = replace(s.data, validation=[], validation_split=share)
        sampler, validation = build_data(
            replace(s, data=data, seed=seed), tokenizer, tmp_path / "cache"
        )
        streams = [*(source.tokens for source in sampler.sources), validation.tokens]
        *kept, out = (texts_of(tokenizer, t.read(0, len(t)).tolist()) for t in streams)
        assert validation.spread and validation.num_bytes == sum(map(len, out))
        return [text for texts in kept for text in texts], out

    kept, out = split(0.3)
    assert sorted(kept + out) == sorted(names["a"] + names["b"])
    assert 15 < len(out) < 60 and any("sea" in t for t in out) and any("shore" in t for t in out)
    assert split(0.3, seed=7) == (kept, out), "stages have seeds of their own"
    with pytest.raises(ConfigError, match="data.validation_split 1e-09 holds out no document"):
        split(1e-9)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_validation_is_named(tmp_path: Path, tokenizer: Tokenizer, text: str) -> None:
    (tmp_path / "empty.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="data.validation is empty: .*empty.jsonl"):
        build(tmp_path, tokenizer, validation=[str(tmp_path / "empty.jsonl")])


@pytest.mark.parametrize("family", [name for name in MODELS if name != "gemma3n"])
def test_documents_of_a_window_do_not_see_each_other(family: str) -> None:
    """State, windows, attention and positions restart: all but one document may change."""
    config = parse_config(
        {**MODELS[family], "vocab_size": 50, "max_position_embeddings": 64, "bos_token_id": 1}
    )
    model = build_model(config, device="cpu", dtype=torch.float64)
    model.init_weights(0)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 40, (40,), generator=generator)
    lengths = [3, 1, 17, 9, 10]

    def hidden(ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(Batch.packed(ids, lengths), DenseState(chunk_size=8))

    together = hidden(ids, lengths)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = hidden(ids[rows], [length])
        assert (together[rows] - alone).abs().max() < CROSS_PATH["float64"]
        start += length
    whole = hidden(ids, [40])
    assert (whole[:3] - together[:3]).abs().max() < CROSS_PATH["float64"]
    assert (whole[3:] - together[3:]).abs().max() > 1e-3, "without boundaries they do"
