"""The order in which windows are drawn, their pieces, and the text to validate on."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors

from training import settings, write_texts
from yocolm.errors import ConfigError
from yocolm.train.data import Sampler, Shape, Source, Validation, Windows, build_data
from yocolm.train.data_tokens import OPEN_SHARDS, Shard, Tokens, joined
from yocolm.train.tokenizer import END_OF_TEXT, train_tokenizer

LENGTH = 8
SHAPE = Shape(LENGTH)


def source(
    name: str = "a",
    tokens: int = 100,
    weight: float = 1.0,
    start: int = 0,
    documents: tuple[int, ...] = (),
) -> Source:
    """Tokens that count upwards, so that a window tells where it comes from."""
    ids = np.arange(start, start + tokens, dtype=np.int32)
    return Source(name, Tokens.of(ids, documents), weight, "")


def draws(sampler: Sampler, count: int) -> np.ndarray:
    return np.concatenate([sampler.batch(1).inputs for _ in range(count)])


def test_targets_follow_inputs() -> None:
    windows = Sampler([source()], SHAPE, 0).batch(5)
    assert windows.inputs.shape == windows.targets.shape == (5 * LENGTH,)
    assert windows.inputs.dtype == windows.targets.dtype == np.int64
    assert (windows.targets == windows.inputs + 1).all() and windows.lengths == [LENGTH] * 5


@pytest.mark.parametrize(
    ("bos", "digest"), [(None, "bd905f5d7bd7077f"), (7, "517c10f83622993a")], ids=["plain", "bos"]
)
def test_the_order_stays_what_it_was(bos: int | None, digest: str) -> None:
    """The windows of the bundled model's recipe: this order must never change."""
    sources = [source("a", 1000, 3), source("b", 377, 1, 10000)]
    sampler, drawn = Sampler(sources, Shape(16, bos), 5), hashlib.sha256()
    for _ in range(40):
        windows = sampler.batch(7)
        drawn.update(windows.inputs.tobytes())
        drawn.update(windows.targets.tobytes())
    assert sampler.draws == [204, 76] and drawn.hexdigest()[:16] == digest


def test_the_order_follows_from_the_seed() -> None:
    sources = [source("a"), source("b", start=1000)]
    first = draws(Sampler(sources, SHAPE, seed=3), 40)
    assert np.array_equal(first, draws(Sampler(sources, SHAPE, seed=3), 40))
    assert not np.array_equal(first, draws(Sampler(sources, SHAPE, seed=4), 40))


def test_one_source_serves_several_samplers() -> None:
    """What a source remembers of an epoch is that of its last seed and length."""
    shared = source()
    samplers = [Sampler([shared], Shape(n), seed) for n in (LENGTH, 5) for seed in (3, 4)]
    apart = [Sampler([source()], Shape(n), seed) for n in (LENGTH, 5) for seed in (3, 4)]
    for _ in range(30):
        for one, other in zip(samplers, apart, strict=True):
            assert np.array_equal(one.batch(1).inputs, other.batch(1).inputs)


def test_the_batch_size_does_not_change_the_order() -> None:
    sources = [source("a"), source("b", start=1000)]
    one = draws(Sampler(sources, SHAPE, seed=3), 12)
    sampler = Sampler(sources, SHAPE, seed=3)
    assert np.array_equal(one, np.concatenate([sampler.batch(4).inputs for _ in range(3)]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_share_the_windows_of_one(ranks: int) -> None:
    """In the same order, uneven pieces included; and each counts all windows."""
    sources = [source("a", documents=(0, 13, 14, 90)), source("b", start=1000, documents=(50,))]
    shape = Shape(LENGTH, 7, boundaries=True)
    whole = Sampler(sources, shape, 3)
    shared = [Sampler(sources, shape, 3) for _ in range(ranks)]
    for _ in range(5):
        expected = whole.batch(6)
        parts = [sampler.batch(6, rank, ranks) for rank, sampler in enumerate(shared)]
        assert all(len(part.inputs) == 6 // ranks * LENGTH for part in parts)
        for index in range(2):
            assert np.array_equal(np.concatenate([p[index] for p in parts]), expected[index])
        assert [n for part in parts for n in part.lengths] == expected.lengths
    assert all(sampler.state_dict() == whole.state_dict() for sampler in shared)
    with pytest.raises(ValueError, match="5 windows cannot be shared by 2 ranks"):
        whole.batch(5, 0, 2)


@pytest.mark.parametrize("tokens", [LENGTH + 2, 2 * LENGTH + 1, 2 * LENGTH + 2, 100, 107])
def test_an_epoch_draws_each_window_once(tokens: int) -> None:
    one = source(tokens=tokens)
    per_epoch = max(1, (tokens - 1) // LENGTH - 1)
    orders, shifts = set(), set()
    for epoch in range(6):
        starts = [one.place(epoch * per_epoch + i, LENGTH, seed=0) for i in range(per_epoch)]
        first = min(starts)
        assert first >= 0 and max(starts) + LENGTH + 1 <= tokens
        assert sorted(starts) == [first + i * LENGTH for i in range(per_epoch)]
        orders.add(tuple(start - first for start in starts))
        shifts.add(first)
    assert len(shifts) > 1, "windows shift from epoch to epoch"
    assert len(orders) > 1 or per_epoch == 1, "windows are reordered every epoch"


def test_every_token_is_drawn_sooner_or_later() -> None:
    sampler = Sampler([source(tokens=40)], SHAPE, 0)
    windows = sampler.batch(200)
    assert {*windows.inputs.tolist(), *windows.targets.tolist()} == set(range(40))


def test_sources_are_drawn_by_weight() -> None:
    sources = [source("a", weight=3), source("b", start=1000), source("c", start=2000, weight=6)]
    inputs = Sampler(sources, SHAPE, seed=0).batch(3000).inputs
    counts = Counter((inputs[::LENGTH] // 1000).tolist())
    for index, share in enumerate((0.3, 0.1, 0.6)):
        assert counts[index] / 3000 == pytest.approx(share, abs=0.03)


def test_weights_whose_sum_is_no_number() -> None:
    """The largest of floats are shares as all others are."""
    sources = [source("a", weight=1e308), source("b", weight=1e308), source("c", weight=5e307)]
    sampler = Sampler(sources, SHAPE, 0)
    assert sampler.shares == pytest.approx([0.4, 0.4, 0.2])
    assert sampler.batch(4).lengths == [LENGTH] * 4


def test_a_source_of_weight_0_is_never_drawn() -> None:
    sampler = Sampler([source("a"), source("b", tokens=3, weight=0, start=1000)], SHAPE, 0)
    assert sampler.batch(200).inputs.max() < 1000
    with pytest.raises(ConfigError, match="weights of all sources are 0"):
        Sampler([source(weight=0)], SHAPE, 0)


def test_a_state_resumes_exactly() -> None:
    sources = [source("a"), source("b", start=1000, weight=2)]
    sampler = Sampler(sources, SHAPE, seed=5)
    sampler.batch(17)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = draws(sampler, 30)
    resumed = Sampler(sources, SHAPE, seed=5)
    resumed.load_state_dict(state)
    assert np.array_equal(draws(resumed, 30), expected)


def test_a_source_that_is_too_short_is_named() -> None:
    Sampler([source(tokens=LENGTH + 2)], SHAPE, 0)
    with pytest.raises(ConfigError, match="source 'a' has 9 tokens; sequence_length 8 needs"):
        Sampler([source(tokens=LENGTH + 1)], SHAPE, 0)
    with pytest.raises(ConfigError, match=r"0 tokens beside what data.validation_split 0.9999 hol"):
        Sampler([source(tokens=0)], SHAPE, 0, 0.9999)


def test_bos_takes_the_place_of_the_first_input() -> None:
    plain, begun = (Sampler([source()], Shape(LENGTH, bos), 1).batch(3) for bos in (None, 7))
    inputs = plain.inputs.copy()
    inputs[::LENGTH] = 7
    assert np.array_equal(begun.inputs, inputs) and np.array_equal(begun.targets, plain.targets)


@pytest.mark.parametrize(
    ("documents", "lengths"),
    [
        ((0, 3, 8), [3, 5]),  # the one at 8 is a target only
        ((0, 1, 2, 7), [1, 1, 5, 1]),
        ((), [8]),
        ((0,), [8]),
    ],
    ids=str,
)
def test_a_sequence_begins_where_a_document_does(
    documents: tuple[int, ...], lengths: list[int]
) -> None:
    tokens = source(documents=documents).tokens
    with_boundaries = Shape(LENGTH, boundaries=True).windows([(tokens, 0, LENGTH)])
    assert with_boundaries.lengths == lengths
    assert Shape(LENGTH).windows([(tokens, 0, LENGTH)]).lengths == [LENGTH]
    assert (with_boundaries.targets == with_boundaries.inputs + 1).all()


def test_boundaries_in_the_middle_of_a_stream() -> None:
    tokens = source(documents=(0, 13, 14, 29)).tokens
    shape = Shape(LENGTH, boundaries=True)
    windows = shape.windows([(tokens, 10, LENGTH), (tokens, 13, LENGTH), (tokens, 22, LENGTH)])
    assert windows.lengths == [3, 1, 4] + [1, 7] + [7, 1]


def shards(lengths: list[int], opened: list[int]) -> list[Shard]:
    """Shards of a stream that counts upwards, each beginning with a document."""

    def load(index: int) -> tuple[np.ndarray, np.ndarray]:
        opened.append(index)
        first = sum(lengths[:index])
        return np.arange(first, first + lengths[index], dtype=np.int32), np.array([0])

    return [Shard(n, lambda index=index: load(index)) for index, n in enumerate(lengths)]


def test_a_stream_over_many_files() -> None:
    lengths, opened = [5, 1, 0, 7, 3], []
    tokens = joined([Tokens(shards(lengths, opened)[:2], 10), Tokens(shards(lengths, opened)[2:])])
    assert len(tokens) == 16 and tokens.num_bytes == 10 and not opened
    for start in range(17):
        for stop in range(start, 20):
            found = tokens.read(start, stop)
            assert found.tolist() == list(range(start, min(stop, 16))) and found.dtype == np.int64
            begun = [place for place in (0, 5, 6, 13) if start <= place < stop]
            assert tokens.starts(start, stop).tolist() == begun
    assert sorted(opened) == [0, 1, 3, 4], "each once, and only where there is something"


def test_few_files_are_open_at_a_time() -> None:
    opened: list[int] = []
    count = OPEN_SHARDS + 5
    tokens = Tokens(shards([2] * count, opened))
    for _ in range(2):
        tokens.read(0, 2 * count)
    assert len(tokens._open) == OPEN_SHARDS and len(opened) == 2 * count


def validation(tokens: int, shape: Shape = SHAPE, spread: bool = False) -> Validation:
    return Validation(source(tokens=tokens).tokens, shape, spread)


def together(windows: list[Windows]) -> tuple[list[int], list[int], list[int]]:
    return (
        [int(i) for w in windows for i in w.inputs],
        [int(i) for w in windows for i in w.targets],
        [n for w in windows for n in w.lengths],
    )


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 40, 41, 42])
def test_the_whole_validation_text_is_scored_once(tokens: int, spread: bool) -> None:
    text = validation(tokens, spread=spread)
    assert text.num_targets == text.count(10**9) == tokens - 1
    inputs, targets, lengths = together(list(text.windows(10**9, 3)))
    assert inputs == list(range(tokens - 1)) and targets == list(range(1, tokens))
    assert all(n == LENGTH for n in lengths[:-1]) and sum(lengths) == tokens - 1
    assert [len(w.lengths) for w in text.windows(10**9, 3)][:-1] == [3] * ((tokens - 2) // 24)


@pytest.mark.parametrize("count", [1, 8, 11, 16, 30])
def test_a_part_of_the_validation_text(count: int) -> None:
    inputs, targets, _ = together(list(validation(801).windows(count, 2)))
    assert inputs == list(range(count)) and targets == [i + 1 for i in inputs]
    inputs, targets, lengths = together(list(validation(801, spread=True).windows(count, 2)))
    assert len(inputs) == count and targets == [i + 1 for i in inputs] and len(set(inputs)) == count
    windows = -(-count // LENGTH)
    starts = [inputs[sum(lengths[:i])] for i in range(windows)]
    assert starts == [100 * i // windows * LENGTH for i in range(windows)]


def test_validation_begins_and_cuts_windows_as_training_does() -> None:
    tokens = source(tokens=20, documents=(0, 10)).tokens
    inputs, targets, lengths = together(
        list(Validation(tokens, Shape(LENGTH, 7, boundaries=True)).windows(99, 9))
    )
    assert lengths == [8, 2, 6, 3] and targets == list(range(1, 20))
    assert [i for i, token in enumerate(inputs) if token == 7 and i != 7] == [0, 8, 16]


def test_documents_of_a_tokenizer_with_bos(tmp_path: Path) -> None:
    """A document's own sequence begins with BOS; the separator ends the one before."""
    write_texts(tmp_path)
    tokenizer = train_tokenizer(["the sea"], 262, tmp_path / "plain.json")
    tokenizer.add_special_tokens(["<bos>"])
    bos, end = tokenizer.token_to_id("<bos>"), tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair=None, special_tokens=[("<bos>", bos)]
    )
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cde"}\n' * 9)
    s = settings(tmp_path)
    s.data.sources["sea"].files[:] = s.data.sources["shore"].files[:] = [f"{tmp_path}/a.jsonl"]
    sampler, _ = build_data(s, tokenizer, tmp_path / "cache")
    tokens = sampler.sources[0].tokens
    ab, cde = (tokenizer.encode(t, add_special_tokens=False).ids for t in ("ab", "cde"))
    assert sampler.bos == bos
    assert tokens.read(0, 99).tolist() == [end, bos, *ab, end, bos, *cde] * 9
    size = len(ab) + len(cde) + 4
    assert tokens.starts(0, size).tolist() == [1, len(ab) + 3]
    windows = Shape(10, bos, boundaries=True).windows([(tokens, 1, 10)])
    first = len(ab) + 2
    assert windows.lengths[0] == first and windows.inputs[first - 1] == end
    assert windows.inputs[first] == bos
