"""Texts as tokens on the disk: the same as in one go, redone when something changes, never torn."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from yocolm.errors import ConfigError
from yocolm.train import data_cache as module
from yocolm.train.data_cache import TokenCache
from yocolm.train.data_files import Document, SourceFiles, is_held_out, read_documents
from yocolm.train.data_lock import has_locks, locked
from yocolm.train.data_tokens import Tokens
from yocolm.train.tokenizer import END_OF_TEXT, train_tokenizer

SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer(["the sea and the shore and the sea"], 264, path)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose documents have been read."""
    found: list[str] = []

    def reading(path: Path, fields: Sequence[str]) -> Iterator[Document]:
        found.append(path.name)
        return read_documents(path, fields)

    monkeypatch.setattr(module, "read_documents", reading)
    return found


def source(*files: Path, field: str = "text") -> SourceFiles:
    return SourceFiles("one", list(files), 1.0, (field,))


def load(cache: Path, tokenizer: Tokenizer, *files: Path, **options: str) -> list[int]:
    [found] = TokenCache(cache, tokenizer, END_OF_TEXT).load([source(*files, **options)])
    return everything(found.training)


def everything(tokens: Tokens) -> list[int]:
    return tokens.read(0, len(tokens)).tolist()


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def write_records(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_every_document_follows_a_separator(tmp_path: Path, tokenizer: Tokenizer) -> None:
    documents = ["the sea", "", f"the {END_OF_TEXT} shore", "é\u2028"]
    files = [write_records(tmp_path / "a.jsonl", documents), tmp_path / "b.txt"]
    files[1].write_text("and\nthe sea")
    cache = TokenCache(tmp_path / "cache", tokenizer, END_OF_TEXT)
    [found] = cache.load([source(*files)])
    end, expected, starts = tokenizer.token_to_id(END_OF_TEXT), [], []
    for document in [*documents, "and\nthe sea"]:
        starts.append(len(expected))
        expected += [end, *tokenizer.encode(document).ids]
    assert everything(found.training) == expected and len(found.held_out) == 0
    assert found.training.starts(0, 999).tolist() == starts
    assert found.training.num_bytes == sum(len(d.encode()) for d in documents) + 11


def test_a_separator_that_the_tokenizer_lacks_is_an_error(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match="tokenizer has no token '<s>'.*tokenizer.separator"):
        TokenCache(tmp_path, tokenizer, "<s>")


def test_only_what_has_changed_is_tokenised_again(
    tmp_path: Path, tokenizer: Tokenizer, readings: list[str]
) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text(f'{{"text": "the sea {file.name}", "title": "shore"}}\n')
    cache = tmp_path / "cache"
    first = load(cache, tokenizer, *files)
    assert load(cache, tokenizer, *files) == first and readings == ["a.jsonl", "b.jsonl"]
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    b, a = (end + tokenizer.encode(f"the sea {f.name}").ids for f in files[::-1])
    assert first == a + b and load(cache, tokenizer, *files[::-1]) == b + a and len(readings) == 2
    files[0].write_text('{"text": "the shore", "title": "shore"}\n')
    assert load(cache, tokenizer, *files) == end + tokenizer.encode("the shore").ids + b
    assert readings[2:] == ["a.jsonl"], "the changed file alone"
    assert load(cache, tokenizer, files[0], field="title") != first and len(readings) == 4
    os.replace(files[0], tmp_path / "c.jsonl")
    load(cache, tokenizer, tmp_path / "c.jsonl")
    assert len(readings) == 4, "another name, the same text"
    (tmp_path / "c.txt").write_bytes((tmp_path / "c.jsonl").read_bytes())
    load(cache, tokenizer, tmp_path / "c.txt")
    assert readings[4:] == ["c.txt"], "the same bytes, read in another way"
    other = train_tokenizer(["shore shore shore"], 262, tmp_path / "other.json")
    assert load(cache, other, files[1]) != b and readings[5:] == ["b.jsonl"]
    assert load(cache, tokenizer, files[1]) == b and len(readings) == 6
    assert len(entries(cache)) == 6 and not list(cache.glob("*.lock"))


def test_the_digest_is_of_contents_and_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = [write_records(tmp_path / f"{name}.jsonl", [name]) for name in "ab"]
    moved = write_records(tmp_path / "c.jsonl", ["a"])

    def digest(*files: Path) -> str:
        return (
            TokenCache(tmp_path / "cache", tokenizer, END_OF_TEXT).load([source(*files)])[0].digest
        )

    first = digest(*files)
    assert digest(moved, files[1]) == first != digest(*files[::-1])
    write_records(files[0], ["c"])
    assert digest(*files) != first


def test_a_file_is_hashed_once(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it is not touched, and has not been touched shortly before."""
    file, cache = write_records(tmp_path / "a.jsonl", ["the sea"]), tmp_path / "cache"
    hashed: list[int] = []
    clock = time.time_ns
    monkeypatch.setattr(module.time, "time_ns", lambda: hashed.append(1) or clock() + ahead)
    ahead = 0
    for _ in range(2):
        load(cache, tokenizer, file)
    assert len(hashed) == 2, "it might have been written to since, in the same tick of the clock"
    ahead = 10**10
    for _ in range(3):
        load(cache, tokenizer, file)
    assert len(hashed) == 3
    stat = file.stat()
    file.write_text(file.read_text().replace("sea", "tea"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert tokenizer.decode(load(cache, tokenizer, file)).strip() == "the tea"
    assert len(hashed) == 4, "a file of the same size and with its old time is read again"


def test_held_out_documents_are_in_neither_both_nor_none(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    texts = [f"the sea {i}" for i in range(60)]
    files = [
        write_records(tmp_path / "a.jsonl", texts[:40]),
        write_records(tmp_path / "b.jsonl", texts[20:]),
    ]
    cache = tmp_path / "cache"

    def ids(chosen: Sequence[str]) -> list[int]:
        return tokenizer.encode("".join(END_OF_TEXT + text for text in chosen)).ids

    for share in (0.3, 0.6):
        [found] = TokenCache(cache, tokenizer, END_OF_TEXT, share).load([source(*files)])
        both = texts[:40] + texts[20:]  # those that are there twice are on one side twice
        out = [text for text in both if is_held_out(text, share)]
        kept = [text for text in both if not is_held_out(text, share)]
        assert everything(found.training) == ids(kept) and everything(found.held_out) == ids(out)
        assert found.held_out.num_bytes == sum(map(len, out))
        assert len(found.held_out.starts(0, 10**6)) == len(out)
        assert out and kept and not set(out) & set(kept)


@pytest.mark.parametrize("kind", ["byte level", "byte level with regex", "prefix", "whitespace"])
def test_long_documents_are_cut_without_a_difference(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the tokenizer does at the beginning of a text, the tokens are those of the whole."""
    monkeypatch.setattr(module, "PIECE", 50)
    monkeypatch.setattr(module, "BATCH", 200)
    rng = np.random.default_rng(0)
    words = [
        "the",
        "sea",
        "and",
        "shore",
        " ",
        "  \n",
        "it's",
        "\n\n",
        "x" * 70,
        "3.14",
        "é",
        "漢字",
    ]
    text = " ".join(words[i] for i in rng.integers(len(words), size=900))
    special = train_tokenizer([text], 400, tmp_path / "tokenizer.json")
    if kind == "byte level":  # merges over spaces
        special.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    elif kind == "prefix":
        special.normalizer = normalizers.Prepend("_")
    elif kind == "whitespace":
        special.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces = list(TokenCache(tmp_path, special, END_OF_TEXT)._cut(text))
    assert "".join(pieces) == text and (len(pieces) > 30) == (kind != "prefix")
    path = tmp_path / "a.txt"
    path.write_text(text)
    end = special.token_to_id(END_OF_TEXT)
    assert load(tmp_path / "cache", special, path) == [end, *special.encode(text).ids]


def test_truncation_and_padding_of_a_tokenizer_do_not_touch_documents(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_records(tmp_path / "a.jsonl", ["the sea and the shore", "the"])
    expected = load(tmp_path / "cache", tokenizer, path)
    limited = Tokenizer.from_str(tokenizer.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=9)
    assert load(tmp_path / "cache", limited, path) == expected


def test_a_long_file_takes_bounded_memory(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of pieces, each written before the next is made; however many documents."""
    monkeypatch.setattr(module, "BATCH", 5000)
    path = write_records(tmp_path / "a.jsonl", [f"the sea {i}" for i in range(4000)])
    sizes: list[tuple[int, int]] = []
    flush = module._Writer.flush
    monkeypatch.setattr(
        module._Writer,
        "flush",
        lambda self: (
            sizes.append((len(self.pending["ids"]), len(self.pending["starts"]))) or flush(self)
        ),
    )
    ids = load(tmp_path / "cache", tokenizer, path)
    assert max(n for n, _ in sizes) < 5000 and sum(n for n, _ in sizes) == len(ids)
    assert sum(n for _, n in sizes) == 4000


@pytest.mark.parametrize("fault", ["disk full", "bad record"])
def test_a_failed_build_leaves_nothing(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path, cache = write_records(tmp_path / "a.jsonl", ["the sea"] * 9), tmp_path / "cache"
    good = path.read_text()
    with monkeypatch.context() as patch:
        if fault == "disk full":

            def fail(*_: object) -> None:
                raise OSError("disk full")

            patch.setattr(module, "_rename", fail)
        else:
            path.write_text(good + '{"text": 3}\n')
        with pytest.raises((OSError, ConfigError), match=f"{fault}|a.jsonl:10 is no"):
            load(cache, tokenizer, path)
    assert not [p for p in cache.iterdir() if p.is_dir()]
    path.write_text(good)
    assert len(load(cache, tokenizer, path)) > 9


@pytest.mark.parametrize("damage", ["cut off", "no counts", "no file"])
def test_damage_is_named(tmp_path: Path, tokenizer: Tokenizer, damage: str) -> None:
    path, cache = write_records(tmp_path / "a.jsonl", ["the sea"]), tmp_path / "cache"
    load(cache, tokenizer, path)
    [entry] = entries(cache)
    ids = cache / entry / "training.ids"
    if damage == "cut off":
        ids.write_bytes(ids.read_bytes()[:-1])
    elif damage == "no file":
        ids.unlink()
    else:
        (cache / entry / "counts.json").write_text("{")
    with pytest.raises(ConfigError, match=f"the tokens in .*{entry} are damaged; delete"):
        load(cache, tokenizer, path)


CHILD = """
import sys, time
from pathlib import Path
from tokenizers import Tokenizer
from yocolm.train import data_cache as module
from yocolm.train.data_files import SourceFiles

folder = Path(sys.argv[1])
read = module.read_documents

def slowly(path, fields):
    for document in read(path, fields):
        yield document
        print("reading", flush=True)
        while not (folder / "go").exists():
            time.sleep(0.01)

module.read_documents = slowly
module.BATCH = 1
cache = module.TokenCache(folder / "cache", Tokenizer.from_file(sys.argv[2]), sys.argv[3])
cache.load([SourceFiles("one", [folder / "a.jsonl"], 1.0, ("text",))])
print("done", flush=True)
"""


@pytest.fixture
def child(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[subprocess.Popen[str]]:
    """Another process that is in the middle of a.jsonl, and waits there for the file "go"."""
    write_records(tmp_path / "a.jsonl", ["the sea", "the shore"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(tmp_path / "tokenizer.json"), END_OF_TEXT],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    yield process
    process.kill()
    process.communicate()


def test_a_killed_build_is_never_picked_up(
    tmp_path: Path, tokenizer: Tokenizer, child: subprocess.Popen[str]
) -> None:
    cache = tmp_path / "cache"
    assert len(entries(cache)) == 1 and entries(cache)[0].startswith(".")
    child.kill()
    child.wait()
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    expected = end + tokenizer.encode("the sea").ids + end + tokenizer.encode("the shore").ids
    assert load(cache, tokenizer, tmp_path / "a.jsonl") == expected
    [entry] = entries(cache)
    assert not entry.startswith(".") and not list(cache.glob("*.lock")), "nothing is left behind"


def test_processes_share_the_files_out(
    tmp_path: Path, tokenizer: Tokenizer, child: subprocess.Popen[str], readings: list[str]
) -> None:
    """What another is busy with comes last and is waited for."""
    cache, other = tmp_path / "cache", write_records(tmp_path / "b.jsonl", ["and"])
    found: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: found.append(load(cache, tokenizer, tmp_path / "a.jsonl", other))
    )
    thread.start()
    wait_for(lambda: any(not name.startswith(".") for name in entries(cache)))
    assert thread.is_alive() and readings == ["b.jsonl"]
    (tmp_path / "go").touch()
    thread.join()
    assert child.wait() == 0 and readings == ["b.jsonl"] and len(entries(cache)) == 2
    assert tokenizer.decode(found[0]) == "the seathe shoreand"


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_without_locks_the_first_to_finish_wins(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, readings: list[str]
) -> None:
    """File systems that know no locks: work is done twice, and nobody's work is harmed."""
    path, cache = write_records(tmp_path / "a.jsonl", ["the sea"]), tmp_path / "cache"
    assert module.locked is locked
    monkeypatch.setattr("yocolm.train.data_lock.fcntl", None)
    rename, inner = module._rename, []

    def overtaken(partial: Path, entry: Path) -> None:
        monkeypatch.setattr(module, "_rename", rename)
        inner.append(load(cache, tokenizer, path))
        assert partial.exists()
        rename(partial, entry)

    monkeypatch.setattr(module, "_rename", overtaken)
    assert load(cache, tokenizer, path) == inner[0]
    assert readings == ["a.jsonl"] * 2 and len(entries(cache)) == 1


def test_locks(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.lock"
    with locked(path) as lock:
        assert lock.held and lock.alone
        with locked(path, wait=False) as other:
            assert not other.held
        assert path.exists(), "who did not hold it leaves it alone"
        order: list[str] = []

        def later() -> None:
            with locked(path) as waited:
                order.append("second" if waited.held else "")

        thread = threading.Thread(target=later)
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and not path.exists()
    with pytest.raises(RuntimeError), locked(path):
        raise RuntimeError
    with locked(path, wait=False) as lock:
        assert lock.held, "a failure lets go of it"
    assert has_locks(tmp_path / "new") and not list((tmp_path / "new").iterdir())
