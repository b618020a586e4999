"""Sources, their tokens and the order in which they are drawn."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from yocolm.errors import ConfigError
from yocolm.train import data as module
from yocolm.train.data import Sampler, Source, count_bytes, expand, read_documents, tokenize
from yocolm.train.tokenizer import END_OF_TEXT, train_tokenizer

LENGTH = 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer(["the sea and the shore and the sea"], 264, path)


def source(name: str = "a", tokens: int = 100, weight: float = 1.0, start: int = 0) -> Source:
    """Tokens that count upwards, so that a window tells where it comes from."""
    return Source(name, np.arange(start, start + tokens, dtype=np.int32), weight, "")


def draws(sampler: Sampler, count: int) -> np.ndarray:
    return np.concatenate([sampler.batch(1)[0] for _ in range(count)])


def test_targets_follow_inputs() -> None:
    inputs, targets = Sampler([source()], LENGTH, 0).batch(5)
    assert inputs.shape == targets.shape == (5, LENGTH) and inputs.dtype == np.int64
    assert (targets == inputs + 1).all()


def test_the_order_follows_from_the_seed() -> None:
    sources = [source("a"), source("b", start=1000)]
    first = draws(Sampler(sources, LENGTH, seed=3), 40)
    assert np.array_equal(first, draws(Sampler(sources, LENGTH, seed=3), 40))
    assert not np.array_equal(first, draws(Sampler(sources, LENGTH, seed=4), 40))


def test_the_batch_size_does_not_change_the_order() -> None:
    sources = [source("a"), source("b", start=1000)]
    one = draws(Sampler(sources, LENGTH, seed=3), 12)
    sampler = Sampler(sources, LENGTH, seed=3)
    assert np.array_equal(one, np.concatenate([sampler.batch(4)[0] for _ in range(3)]))


@pytest.mark.parametrize("tokens", [LENGTH + 2, 2 * LENGTH + 1, 2 * LENGTH + 2, 100, 107])
def test_an_epoch_draws_each_window_once(tokens: int) -> None:
    one = source(tokens=tokens)
    per_epoch = max(1, (tokens - 1) // LENGTH - 1)
    orders, shifts = set(), set()
    for epoch in range(6):
        windows = [one.window(epoch * per_epoch + i, LENGTH, seed=0) for i in range(per_epoch)]
        assert all(len(w) == LENGTH + 1 and (np.diff(w) == 1).all() for w in windows)
        starts = [int(window[0]) for window in windows]
        first = min(starts)
        assert sorted(starts) == [first + i * LENGTH for i in range(per_epoch)]
        orders.add(tuple(start - first for start in starts))
        shifts.add(first)
    assert len(shifts) > 1, "windows shift from epoch to epoch"
    assert len(orders) > 1 or per_epoch == 1, "windows are reordered every epoch"


def test_every_token_is_drawn_sooner_or_later() -> None:
    one = source(tokens=40)
    seen = {int(token) for draw in range(200) for token in one.window(draw, LENGTH, seed=0)}
    assert seen == set(range(40))


def test_sources_are_drawn_by_weight() -> None:
    sources = [source("a", weight=3), source("b", start=1000), source("c", start=2000, weight=6)]
    inputs, _ = Sampler(sources, LENGTH, seed=0).batch(3000)
    counts = Counter(int(window[0]) // 1000 for window in inputs)
    for index, share in enumerate((0.3, 0.1, 0.6)):
        assert counts[index] / 3000 == pytest.approx(share, abs=0.03)


def test_a_state_resumes_exactly() -> None:
    sources = [source("a"), source("b", start=1000, weight=2)]
    sampler = Sampler(sources, LENGTH, seed=5)
    sampler.batch(17)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = draws(sampler, 30)
    resumed = Sampler(sources, LENGTH, seed=5)
    resumed.load_state_dict(state)
    assert np.array_equal(draws(resumed, 30), expected)


def test_a_source_that_is_too_short_is_named() -> None:
    Sampler([source(tokens=LENGTH + 2)], LENGTH, 0)
    with pytest.raises(ConfigError, match="source 'a' has 9 tokens; sequence_length 8 needs"):
        Sampler([source(tokens=LENGTH + 1)], LENGTH, 0)


def test_patterns(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl"):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.txt").mkdir()
    found = expand([f"{tmp_path}/*.txt", f"{tmp_path}/a*", f"{tmp_path}/**/c.jsonl"], "here")
    assert [path.name for path in found] == ["a.txt", "b.txt", "c.jsonl"]  # each once
    with pytest.raises(ConfigError, match=r"data.sources.a: no file matches '.*\.md'"):
        expand([f"{tmp_path}/*.md"], "data.sources.a")


def test_text_is_one_document_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\ntwo\rthree\u2028é\n".encode())
    assert list(read_documents(path, "text")) == ["one\r\ntwo\rthree\u2028é\n"]
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="a.txt is not UTF-8 at byte 3"):
        list(read_documents(path, "text"))


def test_every_record_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = ["one\ntwo", "line\u2028separator and \x85", ""]
    lines = [json.dumps({"id": 1, "body": text}, ensure_ascii=False) for text in records]
    path.write_text("\n\n".join(lines) + "\r\n", encoding="utf-8")
    assert list(read_documents(path, "body")) == records


@pytest.mark.parametrize("line", ["{", "[1]", '{"texts": "a"}', '{"text": null}', '{"text": 3}'])
def test_bad_records_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"a.jsonl:2 is no JSON record with a string in 'text'"):
        list(read_documents(path, "text"))


def test_every_document_follows_a_separator(tmp_path: Path, tokenizer: Tokenizer) -> None:
    documents = ["the sea", "", f"the {END_OF_TEXT} shore"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": d}) for d in documents))
    (tmp_path / "b.txt").write_text("and\nthe sea")
    files = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    ids = tokenize(files, tokenizer, "text", tmp_path / "cache", END_OF_TEXT)
    end = tokenizer.token_to_id(END_OF_TEXT)
    expected: list[int] = []
    for document in [*documents, "and\nthe sea"]:
        expected += [end, *tokenizer.encode(document).ids]
    assert ids.tolist() == expected and ids.dtype == np.int32
    assert tokenizer.decode(ids.tolist()) == "the seathe  shoreand\nthe sea"
    assert count_bytes(files, "text") == sum(len(d) for d in documents) + len("and\nthe sea")


def test_a_separator_that_the_tokenizer_lacks_is_an_error(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.txt").write_text("the sea")
    with pytest.raises(ConfigError, match="tokenizer has no token '<s>'.*tokenizer.separator"):
        tokenize([tmp_path / "a.txt"], tokenizer, "text", tmp_path / "cache", "<s>")


def test_tokens_are_cached(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text('{"text": "the sea", "title": "shore"}\n')
    readings = []
    read = read_documents
    monkeypatch.setattr(
        module, "read_documents", lambda *given: readings.append(given) or read(*given)
    )

    def run(with_tokenizer: Tokenizer = tokenizer, field: str = "text") -> list[int]:
        return tokenize([path], with_tokenizer, field, cache, END_OF_TEXT).tolist()

    first = run()
    assert run() == first and len(readings) == 1, "the second time from the cache"
    assert run(field="title") != first and len(readings) == 2, "another field"
    path.write_text('{"text": "the shore", "title": "shore"}\n')
    assert run() != first and len(readings) == 3, "the file has changed"
    other = train_tokenizer(["shore shore shore"], 262, tmp_path / "other.json")
    before = run()
    assert run(other) != before and len(readings) == 4, "another tokenizer"
    assert run() == before and len(readings) == 4
    assert not list(cache.glob("*partial*"))


def test_an_interrupted_write_leaves_no_cache(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("the sea")

    def run() -> np.ndarray:
        return tokenize([tmp_path / "a.txt"], tokenizer, "text", tmp_path / "cache", END_OF_TEXT)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            run()
    assert len(run()) > 1


def test_a_trained_tokenizer_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tokenizer.json"
    trained = train_tokenizer(["the sea", "and the shore"], 280, path)
    assert trained.get_vocab_size() <= 280 and trained.token_to_id(END_OF_TEXT) == 0
    for text in ("the sea", " é\r\n\t漢字 \U0001f30a  ", ""):
        assert trained.decode(trained.encode(text).ids) == text
    assert Tokenizer.from_file(str(path)).to_str() == trained.to_str()
