"""Records of a prompt and a completion: completions alone are learnt, by their rows alone."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tolerances import CROSS_PATH
from training import MODELS, trainer, values, write_texts
from yocolm.errors import ConfigError
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.train.data import Shape, Source, build_data, cache_folder
from yocolm.train.data_files import Exchange, parts_of, read_documents, text_of, training_documents
from yocolm.train.data_tokens import Tokens
from yocolm.train.objective import Objective, head_weight, next_token_loss
from yocolm.train.prepare import prepare_tokenizer
from yocolm.train.settings import TrainSettings, parse_settings
from yocolm.train.trainer import Trainer

TEXT = ("text",)
RECORDS = [
    {"prompt": "the sea", "completion": " was calm"},
    {"prompt": ["the", " boat"], "completion": [" old man", " went slowly"]},
    {"text": "the shore and the water", "prompt": "unread", "completion": "unread"},
]
TURNS = [
    [("the sea", False), (" was calm", True)],
    [("the", False), (" old man", True), (" boat", False), (" went slowly", True)],
    [("the shore and the water", True)],
]


def write_records(path: Path, records: list[Any] = RECORDS) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def with_records(folder: Path, **data: Any) -> TrainSettings:
    """A training on ``RECORDS`` alone, many times over."""
    write_texts(folder)
    write_records(folder / "a.jsonl", RECORDS * 12)
    given = values(folder)
    given["data"] |= {"sources": {"talk": {"files": [str(folder / "a.jsonl")]}}, **data}
    return parse_settings(given)


def test_what_is_said_and_what_is_learnt(tmp_path: Path) -> None:
    documents = list(read_documents(write_records(tmp_path / "a.jsonl"), TEXT))
    assert [parts_of(document) for document in documents] == TURNS
    assert [text_of(document) for document in documents] == [
        "".join(text for text, _ in parts) for parts in TURNS
    ]


BAD = [
    {"prompt": "a", "completion": ["b"]},
    {"prompt": ["a"], "completion": ["b", "c"]},
    {"prompt": [], "completion": []},
    {"prompt": ["a"], "completion": [3]},
    {"prompt": "a", "completion": "\ud800"},
    {"prompt": 1, "completion": "b"},
    {"prompt": "a"},
    {"prompt": "a", "completion": None},
]


@pytest.mark.parametrize("record", BAD, ids=str)
def test_bad_records_are_named(tmp_path: Path, record: dict[str, Any]) -> None:
    path = write_records(tmp_path / "a.jsonl", [RECORDS[0], record])
    with pytest.raises(ConfigError, match=r"a.jsonl:2 .*(completion|'text')"):
        list(read_documents(path, TEXT))


def test_rows_of_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"id": [1], "prompt": ["p"], "completion": ["c"]}), path)
    assert list(read_documents(path, TEXT)) == [Exchange((("p", "c"),))]
    lists = {"prompt": [["p", "q"]], "completion": [["c", "d"]], "text": [None]}
    parquet.write_table(arrow.table(lists), path)
    assert list(read_documents(path, TEXT)) == [Exchange((("p", "c"), ("q", "d")))]


def test_targets_of_prompts_are_negative(tmp_path: Path) -> None:
    """Parts are tokenised one by one; inputs are what they would be without the distinction."""
    s = with_records(tmp_path)
    tokenizer = prepare_tokenizer(s)
    sampler, _ = build_data(s, tokenizer, cache_folder(s))
    tokens = sampler.sources[0].tokens
    end, ids, targets = tokenizer.token_to_id("<|endoftext|>"), [], []
    for parts in TURNS:
        pieces = [([end], True)]
        pieces += [(tokenizer.encode(text).ids, learnt) for text, learnt in parts]
        ids += [i for piece, _ in pieces for i in piece]
        targets += [i if learnt else -1 for piece, learnt in pieces for i in piece]
    windows = Shape(len(ids) - 1).windows([(tokens, 0, len(ids) - 1)])
    assert windows.inputs.tolist() == ids[:-1] and windows.targets.tolist() == targets[1:]
    assert tokens.num_prompts == 12 * targets.count(-1) > 0
    learnt = "".join(text for parts in TURNS for text, counts in parts if counts)
    assert tokens.num_bytes == 12 * len(learnt.encode())


def test_the_tokenizer_reads_prompts_too(tmp_path: Path) -> None:
    texts = ["".join(text for text, _ in parts) for parts in TURNS]
    assert list(training_documents(with_records(tmp_path))) == texts * 12


def test_a_document_is_held_out_by_its_whole_text(tmp_path: Path) -> None:
    records = [{"prompt": "question", "completion": f" {i:03}"} for i in range(60)]
    s = with_records(tmp_path, validation=[], validation_split=0.3)
    write_records(tmp_path / "a.jsonl", records)
    sampler, validation = build_data(s, prepare_tokenizer(s), tmp_path / "cache")
    kept, out = sampler.sources[0].tokens, validation.tokens
    assert kept.num_bytes + out.num_bytes == 60 * len(" 001") and 0 < out.num_bytes < 200
    assert len(kept.starts(0, len(kept))) == kept.num_bytes / len(" 001")


def half_masked(count: int) -> np.ndarray:
    """Targets of which some are left out: runs, single ones, both ends."""
    targets = np.random.default_rng(0).integers(0, 200, count)
    targets[[0, 1, 2, 3, 9, 20, 21, count - 1]] = -1
    return targets


def gradients(objective: Objective, loss: Tensor) -> dict[str, Tensor]:
    objective.zero_grad()
    loss.backward()
    named = objective.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("family", MODELS)
def test_rows_that_are_learnt_give_the_gradient_of_all_rows(tmp_path: Path, family: str) -> None:
    """Against a forward pass of every row, whose loss leaves rows out."""
    one = trainer(tmp_path, family)
    lengths, count = [20, 1, 29], 50
    tokens = torch.tensor(half_masked(count).clip(0))
    targets = torch.tensor(half_masked(count))
    with torch.no_grad():  # scales that start at 0 would hide what is behind them
        for parameter in one.model.parameters():
            parameter.add_(0.05)
    config: Any = one.model.config
    batch = Batch.packed(tokens, lengths)
    hidden = one.model(batch, DenseState(chunk_size=16))
    weight = head_weight(one.model)
    whole = next_token_loss(hidden, weight, targets, config.final_softcap, batch)
    expected = gradients(one.objective, whole)
    loss = one.objective(tokens, targets, lengths)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
    found = gradients(one.objective, loss)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        scale = expected[name].abs().max().clamp(min=1e-3)
        assert ((grad - expected[name]) / scale).abs().max() <= 10 * CROSS_PATH["float32"], name


def count_rows(module: torch.nn.Module, seen: list[int]) -> None:
    def note(_: Any, arguments: tuple[Any, ...]) -> None:
        seen.append(len(arguments[0]))

    module.register_forward_pre_hook(note)


def test_prompts_never_enter_the_second_half(tmp_path: Path) -> None:
    one, lower, upper = trainer(tmp_path), [], []
    model: Any = one.model
    count_rows(model.self_layers[0], lower)
    count_rows(model.cross_layers[0], upper)
    targets = torch.tensor(half_masked(50))
    one.objective(targets.clamp(min=0), targets, [50])
    one.objective(targets.clamp(min=0), targets.clamp(min=0), [50])
    assert lower == [50, 50] and upper == [42, 50]


def test_prompts_alone_change_nothing(tmp_path: Path) -> None:
    """Every parameter gets a gradient, as ranks that share them need, and it is zero."""
    one = trainer(tmp_path, weight_decay=0.0)
    everywhere = torch.full((24,), -1)
    loss = one.objective(everywhere.clamp(min=0), everywhere, [24])
    found = gradients(one.objective, loss)
    assert loss.item() == 0 and len(found) == len(list(one.model.parameters()))
    assert all(not grad.any() for grad in found.values())
    before = [p.clone() for p in one.model.parameters()]
    one.sampler.sources[0].tokens = Tokens.of(np.full(100, ~5), [0])
    one.sampler.sources[1].tokens = Tokens.of(np.full(100, ~5), [0])
    figures = one.train_step()
    one.train_step()
    assert figures.loss == figures.norm == 0
    assert isinstance(one.progress.out, io.StringIO)
    said = one.progress.out.getvalue()
    assert said.count("the windows of step 1 hold prompts alone") == 1 and "step 2 hold" not in said
    assert all(map(torch.equal, before, one.model.parameters()))


def test_validation_is_of_completions(tmp_path: Path) -> None:
    """Per token and per byte of what is predicted, prompts and separators before them apart."""
    s = with_records(tmp_path)
    file = write_records(tmp_path / "v.jsonl", RECORDS * 3)
    one = Trainer(replace(s, data=replace(s.data, validation=[str(file)])))
    figures = one.validate(10**6)
    windows = list(one.validation.windows(10**6, 1))
    found = sum(int((w.targets >= 0).sum()) for w in windows)
    with torch.no_grad():
        total = sum(float(one.loss_sum(*w, validating=True)) for w in windows)
    assert figures["nll_per_token"] == pytest.approx(total / found, rel=1e-5)
    size = 3 * sum(len(text) for parts in TURNS for text, learnt in parts if learnt)
    assert figures["bits_per_byte"] == pytest.approx(total / np.log(2) / size, rel=1e-5)
    write_records(file, [{"prompt": "word " * 40, "completion": " end"}])
    other = Trainer(
        replace(s, output_dir=str(tmp_path / "b"), data=replace(s.data, validation=[str(file)]))
    )
    assert other.validate(8) == {} and other.validate(10**6)["nll_per_token"] > 0


def test_completions_are_learnt(tmp_path: Path) -> None:
    """What follows a prompt, and not the prompts, which differ every time."""
    rng = np.random.default_rng(0)
    words = "sea boat shore man water waves boy asking calm tired".split()
    records = [
        {"prompt": " ".join(rng.choice(words, 6)), "completion": " nothing at all."}
        for _ in range(200)
    ]
    s = with_records(tmp_path, validation=[], validation_split=0.1)
    write_records(tmp_path / "a.jsonl", records)
    s = replace(s, train=replace(s.train, steps=40, learning_rate=1e-2))
    one = Trainer(s)
    losses = [one.train_step().loss for _ in range(40)]
    assert losses[0] > 4 and sum(losses[-5:]) / 5 < 0.5


@pytest.fixture
def documents() -> Callable[..., Source]:
    def make(*lengths: int) -> Source:
        starts = np.cumsum([0, *lengths[:-1]])
        ids = np.arange(sum(lengths), dtype=np.int32)
        return Source("a", Tokens.of(ids, starts), 1.0, "", whole_documents=True)

    return make


@pytest.mark.parametrize(
    ("lengths", "begins"),
    [
        ((9, 9, 9, 9, 3), [0, 9, 18, 27]),  # as long as a window and its last target
        ((10, 10, 10, 10, 3), [0, 10, 20, 30]),  # longer: the end is left out
        ((4, 4, 4, 4, 20), [0, 8, 16]),  # the third is cut by the first window, so begins one
        ((4, 5, 9, 3), [0, 9]),
        ((30, 2), [0]),
        ((3, 3, 3, 3, 3, 3, 3), [0, 9]),  # the last fills none
    ],
    ids=str,
)
def test_windows_begin_with_documents(
    documents: Callable[..., Source], lengths: tuple[int, ...], begins: list[int]
) -> None:
    one = documents(*lengths)
    for epoch in range(3):
        places = [one.place(epoch * len(begins) + i, 8, 0) for i in range(len(begins))]
        assert sorted(places) == begins


def test_whole_documents_change_their_order(documents: Callable[..., Source]) -> None:
    one = documents(*[9] * 20)
    orders = {tuple(one.place(20 * epoch + i, 8, seed=1) for i in range(20)) for epoch in range(3)}
    assert len(orders) == 3 and all(len(set(order)) == 20 for order in orders)
    assert {one.place(i, 5, seed=1) for i in range(20)} == {9 * i for i in range(20)}


def test_whole_documents_are_a_setting_of_a_source(tmp_path: Path) -> None:
    s = with_records(tmp_path)
    s.data.sources["talk"] = replace(s.data.sources["talk"], whole_documents=True)
    one = Trainer(s)
    end = one.tokenizer.token_to_id("<|endoftext|>")
    assert all(one.sampler.batch(2).inputs[::24].tolist() == [end] * 2 for _ in range(20))
    one.save()
    s.data.sources["talk"] = replace(s.data.sources["talk"], whole_documents=False)
    with pytest.raises(ConfigError, match="data.sources.talk.whole_documents was True"):
        Trainer(s)
