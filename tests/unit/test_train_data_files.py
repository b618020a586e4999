"""Which files there are, in every layout, and the documents in them."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layouts import write_layout
from training import settings, values
from yocolm.errors import ConfigError, MissingDependencyError
from yocolm.train.data_files import (
    AUTHORS_FIELDS,
    expand,
    find_sources,
    find_validation,
    is_held_out,
    kind,
    read_documents,
    read_layout,
    training_documents,
)
from yocolm.train.settings import TrainSettings, parse_settings

TEXT = ("text",)


def with_data(around: Path, /, **data: Any) -> TrainSettings:
    s = settings(around)
    return replace(s, data=replace(s.data, **data))


def test_the_authors_layout(tmp_path: Path) -> None:
    write_layout(tmp_path)
    s = with_data(tmp_path, sources={}, folder=str(tmp_path), weights={"StarCoder": 3.0})
    found = find_sources(s)
    assert [(f.name, f.weight) for f in found] == [("CC", 0.5), ("StarCoder", 3.0)]
    assert [[p.name for p in f.files] for f in found] == [["00000.jsonl", "00001.jsonl"]] * 2
    assert list(training_documents(s)) == ["one", "two", "a = 1", "b = 2"]
    assert list(training_documents(s, ["StarCoder"])) == ["a = 1", "b = 2"]
    with pytest.raises(ConfigError, match="train_on names 'C'; there are .*CC.*StarCoder"):
        list(training_documents(s, ["C"]))
    with pytest.raises(ConfigError, match="data.weights names 'C'; the sources are CC, StarCoder"):
        find_sources(with_data(tmp_path, sources={}, folder=str(tmp_path), weights={"C": 1.0}))


def test_a_source_of_the_folder_may_be_left_out(tmp_path: Path) -> None:
    """Only where the others have no weight either is nothing left."""
    write_layout(tmp_path)
    given = values(tmp_path)
    given["data"] |= {"sources": {}, "folder": str(tmp_path), "weights": {"CC": 0}}
    found = find_sources(parse_settings(given))
    assert [(f.name, f.weight > 0) for f in found] == [("CC", False), ("StarCoder", True)]

    given["data"]["weights"]["StarCoder"] = 0
    with pytest.raises(ConfigError, match="data.weights is 0 for every source; give one of CC, St"):
        find_sources(parse_settings(given))
    entries = [{"name": "CC", "weight": 0}, {"name": "StarCoder", "weight": 0.0}]
    write_layout(tmp_path, train=entries)
    with pytest.raises(ConfigError, match=f"the weight in {tmp_path} is 0 for every source"):
        find_sources(with_data(tmp_path, sources={}, folder=str(tmp_path)))


def test_what_the_authors_loader_takes_as_well(tmp_path: Path) -> None:
    entry = {"name": "all", "count": 7, "source": ["shard/CC/00001.jsonl", "shard/x.jsonl"]}
    write_layout(tmp_path, train=[entry])
    lines = [{"raw_content_lines": ["a", "b"]}, {"text": "c", "content": "d"}]
    (tmp_path / "shard/x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    [source] = read_layout(tmp_path, "train", "text")
    assert source.weight == 7
    assert [t for p in source.files for t in read_documents(p, source.fields)] == [
        "two",
        "a\nb",
        "c",
    ]
    assert read_layout(tmp_path, "train", "content")[0].fields == (
        "content",
        "raw_content_lines",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "{"}, r"json/train.json is not valid JSON"),
        ({"train": []}, r"json/train.json must hold a list with at least one entry"),
        ({"train": {"name": "CC"}}, r"json/train.json must hold a list"),
        ({"train": [{"weight": 1}]}, r"entry 0 is \{'weight': 1\}; it must have a 'name'"),
        ({"train": [{"name": "CC", "weight": -1}]}, r"source 'CC' has the weight -1; .*at least 0"),
        ({"train": [{"name": "CC"}]}, r"source 'CC' has the weight None"),
        ({"train": [{"name": "CC", "weight": True}]}, r"source 'CC' has the weight True"),
        ({"train": [{"name": "CC", "weight": 1}] * 2}, r"there are two sources 'CC'"),
        ({"train": [{"name": "DD", "weight": 1}]}, r"cannot read .*json/DD.json: No such file"),
        ({"CC": ["shard/CC/7.jsonl"]}, r"source 'CC': there is no file .*/shard/CC/7.jsonl"),
        ({"CC": [3]}, r"source 'CC': its shards must be a list of paths"),
    ],
    ids=str,
)
def test_a_layout_with_a_fault(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_layout(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        read_layout(tmp_path, "train", "text")


def test_texts_to_validate_on(tmp_path: Path) -> None:
    s = with_data(tmp_path)
    [source] = find_validation(s)
    assert [p.name for p in source.files] == ["held_out.txt"] and source.fields == TEXT
    s = with_data(tmp_path, sources={}, folder=str(tmp_path), validation=[])
    write_layout(tmp_path)
    with pytest.raises(ConfigError, match=r"has no json/valid.json; set data.validation_split"):
        find_validation(s)
    write_layout(tmp_path, "valid")
    assert [v.name for v in find_validation(s)] == ["CC", "StarCoder"]


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
    assert list(read_documents(path, TEXT)) == ["one\r\ntwo\rthree\u2028é\n"]
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="a.txt is not UTF-8 at byte 3"):
        list(read_documents(path, TEXT))
    with pytest.raises(ConfigError, match="cannot read .*gone.txt: No such file"):
        list(read_documents(tmp_path / "gone.txt", TEXT))


def test_every_record_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = ["one\ntwo", "line\u2028separator and \x85", ""]
    lines = [json.dumps({"id": 1, "body": text}, ensure_ascii=False) for text in records]
    path.write_text("\n\n".join(lines) + "\r\n", encoding="utf-8")
    assert list(read_documents(path, ("body",))) == records


def test_a_byte_order_mark_is_no_part_of_a_record(tmp_path: Path) -> None:
    """Of a file, and of one that was appended; bytes are counted with it."""
    path = tmp_path / "a.jsonl"
    record = b'\xef\xbb\xbf{"text": "one"}\n'
    path.write_bytes(2 * record + b"\xef\xbb\xbf")
    assert list(read_documents(path, TEXT)) == ["one", "one"]
    path.write_bytes(record + b"\xef\xbb\xbf\xe9")
    with pytest.raises(ConfigError, match=f"a.jsonl is not UTF-8 at byte {len(record) + 3}"):
        list(read_documents(path, TEXT))


def test_names_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "A.JSONL"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(read_documents(path, TEXT)) == ["one", "two"]
    assert [kind(Path(name)) for name in ("a.Parquet", "b.TXT", "jsonl")] == [
        "parquet",
        "text",
        "text",
    ]


def test_records_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "\xe9"}\n')
    documents = read_documents(path, TEXT)
    assert next(documents) == "one"
    with pytest.raises(ConfigError, match="a.jsonl is not UTF-8 at byte 26"):
        next(documents)


BAD = ["{", "[1]", '{"texts": "a"}', '{"text": null}', '{"text": 3}', '{"text": ["a"]}', "NaN"]


@pytest.mark.parametrize("line", [*BAD, '{"text": "\\ud800"}', "[" * 100_000])
def test_bad_records_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"a.jsonl:2 is no JSON record with a string in 'text'"):
        list(read_documents(path, TEXT))


def test_fields_are_tried_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "c"}\n{"content": "d", "text": "t"}\n{}')
    with pytest.raises(ConfigError, match="a.jsonl:3 .* in 'text' or 'content' or 'raw_content"):
        list(read_documents(path, ("text", *AUTHORS_FIELDS)))
    path.write_text('{"content": "c"}\n{"content": "d", "text": "t"}\n')
    assert list(read_documents(path, ("text", *AUTHORS_FIELDS))) == ["c", "t"]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    from pyarrow import parquet

    texts = [f"row {i}\né" for i in range(2500)]
    path = tmp_path / "a[1].parquet"
    table = arrow.table({"id": list(range(2500)), "text": texts, "other": texts})
    parquet.write_table(table, path, row_group_size=100)
    assert list(read_documents(path, TEXT)) == texts
    with pytest.raises(ConfigError, match=r"has the columns id, text, other, and none of body"):
        list(read_documents(path, ("body",)))
    parquet.write_table(arrow.table({"text": ["a", None]}), path)
    with pytest.raises(ConfigError, match=r"parquet, row 1, is no record with a string in 'text'"):
        list(read_documents(path, TEXT))
    path.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"a\[1\].parquet is no parquet file"):
        list(read_documents(path, TEXT))


def test_parquet_with_nothing_in_it(tmp_path: Path) -> None:
    """No rows, or a first group without any."""
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    from pyarrow import parquet

    path = tmp_path / "A.PARQUET"
    table = arrow.table({"text": ["a", "b"]})
    parquet.write_table(table.slice(0, 0), path)
    assert list(read_documents(path, TEXT)) == []
    with parquet.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    assert list(read_documents(path, TEXT)) == ["a", "b"]


def test_parquet_that_cannot_be_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    text = arrow.array(["a"])
    parquet.write_table(arrow.Table.from_arrays([text, text], names=["text", "text"]), path)
    with pytest.raises(ConfigError, match=r"a.parquet has more than one column 'text'; rename"):
        list(read_documents(path, TEXT))
    for features in ({"text": {"_type": "Smell"}}, [], {"text": 3}):
        about = json.dumps({"info": {"features": features}})
        table = arrow.table({"text": text}).replace_schema_metadata({"huggingface": about})
        parquet.write_table(table, path)
        with pytest.raises(ConfigError, match=r"datasets cannot read .*a.parquet: .*; write it an"):
            list(read_documents(path, TEXT))


def test_parquet_needs_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = re.escape("needs the package datasets: pip install 'yocolm[train]'")
    with pytest.raises(MissingDependencyError, match=message):
        list(read_documents(tmp_path / "a.parquet", TEXT))


def test_the_text_decides_which_documents_are_held_out() -> None:
    texts = [f"document {i}" for i in range(4000)]
    assert not any(is_held_out(text, 0.0) for text in texts)
    few, more = ({t for t in texts if is_held_out(t, share)} for share in (0.1, 0.3))
    assert len(few) / 4000 == pytest.approx(0.1, abs=0.02)
    assert len(more) / 4000 == pytest.approx(0.3, abs=0.03)
    assert few < more, "a larger share holds out the same and others"


def test_a_tokenizer_never_sees_what_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = [f"document {i}" for i in range(100)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    s = with_data(tmp_path, validation=[], validation_split=0.3)
    for source in s.data.sources.values():
        source.files[:] = [str(path)]
    kept = [text for text in texts if not is_held_out(text, 0.3)]
    assert 0 < len(kept) < 100 and list(training_documents(s)) == kept * 2
