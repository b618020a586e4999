"""Which files hold the texts of a training, and the documents in them."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from yocolm.errors import ConfigError, MissingDependencyError
from yocolm.train.settings import TrainSettings

PROMPT, COMPLETION = "prompt", "completion"  # fields of a record of which one is learnt alone
LINES = "raw_content_lines"  # a text as a list of its lines
AUTHORS_FIELDS = ("content", LINES)  # what their loader takes where "text" is absent
PARQUET_ROWS = 1000  # of a parquet file in memory at once
TRAIN, VALID = "train", "valid"  # splits of the authors' layout


class Exchange(NamedTuple):
    """A document of (prompt, completion) turns: completions alone are predicted."""

    turns: tuple[tuple[str, str], ...]


Document = str | Exchange


def parts_of(document: Document) -> list[tuple[str, bool]]:
    """The texts of a document in order, and whether they are to be predicted."""
    if isinstance(document, str):
        return [(document, True)]
    return [part for said, answer in document.turns for part in ((said, False), (answer, True))]


def text_of(document: Document) -> str:
    """The whole text of a document, prompts too."""
    return "".join(text for text, _ in parts_of(document))


@dataclass(frozen=True)
class SourceFiles:
    """A source: its files in order, its share of the draws, and fields of a record, first first.

    With ``whole_documents`` every window begins with a document.
    """

    name: str
    files: list[Path]
    weight: float
    fields: tuple[str, ...]
    whole_documents: bool = False


def find_sources(s: TrainSettings) -> list[SourceFiles]:
    """The sources that the settings name, or those of the authors' folder; in their order.

    Raises ConfigError for a file, a pattern or a source that is not there, and without any weight.
    """
    if s.data.folder is None:
        found = [
            SourceFiles(
                name,
                expand(source.files, f"data.sources.{name}.files"),
                source.weight,
                (s.data.text_field,),
                source.whole_documents,
            )
            for name, source in s.data.sources.items()
        ]
    else:
        found = read_layout(Path(s.data.folder), TRAIN, s.data.text_field)
    weights = s.data.weights or {}
    names = [source.name for source in found]
    for name in weights:
        if name not in names:
            raise ConfigError(f"data.weights names {name!r}; the sources are {', '.join(names)}")
    found = [replace(source, weight=weights.get(source.name, source.weight)) for source in found]
    if not any(source.weight for source in found):
        where = "data.weights" if weights else f"the weight in {s.data.folder}"
        raise ConfigError(
            f"{where} is 0 for every source; give one of {', '.join(names)} a weight above 0"
        )
    return found


def find_validation(s: TrainSettings) -> list[SourceFiles]:
    """The files to validate on: ``data.validation``, or ``json/valid.json`` of the folder."""
    if s.data.validation:
        files = expand(s.data.validation, "data.validation")
        return [SourceFiles("data.validation", files, 1.0, (s.data.text_field,))]
    assert s.data.folder is not None, "checked with the settings"
    folder = Path(s.data.folder)
    if not (folder / "json" / f"{VALID}.json").exists():
        raise ConfigError(
            f"there is nothing to validate on: {folder} has no json/{VALID}.json; set "
            "data.validation_split, or name files as data.validation"
        )
    return read_layout(folder, VALID, s.data.text_field)


def expand(patterns: list[str], where: str) -> list[Path]:
    """Files that the glob ``patterns`` match, each once, in name order within a pattern.

    Raises ConfigError for a pattern without a match.
    """
    files: list[Path] = []
    for pattern in patterns:
        matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        found = [path for path in matches if path.is_file()]
        if not found:
            raise ConfigError(f"{where}: no file matches {pattern!r}")
        files.extend(found)
    return list(dict.fromkeys(files))


def read_layout(folder: Path, split: str, text_field: str) -> list[SourceFiles]:
    """Sources of a folder in the layout of YOCO's authors.

    ``json/SPLIT.json`` lists sources as ``{"name": ..., "weight": ...}``, of which
    ``json/NAME.json`` lists the shards, relative to ``folder`` or absolute. As in their loader,
    "count" may stand for "weight", and "source" for the file of shards.
    """
    index = folder / "json" / f"{split}.json"
    entries = _read_list(index)
    found: dict[str, SourceFiles] = {}
    for number, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{index}: entry {number} is {entry!r}; it must have a 'name'")
        if name in found:
            raise ConfigError(f"{index}: there are two sources {name!r}; rename one")
        shards = entry.get("source") or _read_list(folder / "json" / f"{name}.json")
        files = _shards(folder, shards, f"{index}: source {name!r}")
        fields = tuple(dict.fromkeys((text_field, *AUTHORS_FIELDS)))
        found[name] = SourceFiles(name, files, _weight(entry, f"{index}: source {name!r}"), fields)
    return list(found.values())


def _read_list(path: Path) -> list[Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{path} must hold a list with at least one entry")
    return values


def _weight(entry: Mapping[str, Any], where: str) -> float:
    value = entry.get("weight", entry.get("count"))
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:  # an int may be above it
        raise ConfigError(f"{where} has the weight {value!r}; it must be a number, at least 0")
    return float(value)


def _shards(folder: Path, names: Any, where: str) -> list[Path]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: its shards must be a list of paths")
    files = list(dict.fromkeys(folder / name for name in names))
    for path in files:
        if not path.is_file():
            raise ConfigError(
                f"{where}: there is no file {path}; paths are absolute or relative to {folder}"
            )
    return files


def kind(path: Path) -> str:
    """How a file is read, by the end of its name in whatever case."""
    return {".jsonl": "records", ".parquet": "parquet"}.get(path.suffix.lower(), "text")


def read_documents(path: Path, fields: Sequence[str]) -> Iterator[Document]:
    """Documents of one file, one at a time: each record of a ``.jsonl`` or ``.parquet`` file.

    A record's text is in the first of ``fields`` that it has, or in a ``prompt`` and a
    ``completion``: two strings, or two lists of as many strings. Any other file is one document,
    byte for byte. Raises ConfigError naming the record at fault.
    """
    readers = {"records": _read_jsonl, "parquet": _read_parquet, "text": _read_text}
    try:
        yield from readers[kind(path)](path, fields)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _read_text(path: Path, fields: Sequence[str]) -> Iterator[str]:
    yield _decode(path, path.read_bytes(), 0)


def _decode(path: Path, line: bytes, offset: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {offset + error.start}") from None


def _read_jsonl(path: Path, fields: Sequence[str]) -> Iterator[Document]:
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):  # of bytes: text may hold other line separators
            content = line.removeprefix(codecs.BOM_UTF8)  # of a file, or of one behind another
            text = _decode(path, content, offset + len(line) - len(content))
            offset += len(line)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                record = None
            yield _document(record, fields, f"{path}:{number} is no JSON record")


def _read_parquet(path: Path, fields: Sequence[str]) -> Iterator[Document]:
    try:
        import datasets
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} needs the package datasets: pip install 'yocolm[train]'"
        ) from error
    try:
        columns = pyarrow.parquet.read_schema(path).names
        num_rows = pyarrow.parquet.read_metadata(path).num_rows
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is no parquet file: {error}") from None
    chosen = [field for field in fields if field in columns]
    if PROMPT in columns and COMPLETION in columns:
        chosen += [field for field in (PROMPT, COMPLETION) if field not in chosen]
    if not chosen:
        raise ConfigError(
            f"{path} has the columns {', '.join(columns)}, and none of {', '.join(fields)}; "
            "name the one that holds the text as data.text_field"
        )
    if twice := [field for field in chosen if columns.count(field) > 1]:
        raise ConfigError(f"{path} has more than one column {twice[0]!r}; rename all but one")
    pattern = glob.escape(str(path.absolute()))
    # Batches are as large as the first group of rows otherwise, which may be empty.
    options = {"split": "train", "streaming": True, "columns": chosen, "batch_size": PARQUET_ROWS}
    try:
        rows = datasets.load_dataset("parquet", data_files=pattern, **options)
        for number, row in zip(range(num_rows), rows, strict=False):
            yield _document(row, fields, f"{path}, row {number}, is no record")
    except ConfigError:
        raise
    except (pyarrow.ArrowException, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"datasets cannot read {path}: {reason}; write it anew") from error


def _document(record: Any, fields: Sequence[str], where: str) -> Document:
    values = record if isinstance(record, Mapping) else {}
    field = next((field for field in fields if values.get(field) is not None), "")
    text = values.get(field)
    if not field and values.get(PROMPT) is not None and values.get(COMPLETION) is not None:
        return _exchange(values[PROMPT], values[COMPLETION], where)
    if field == LINES and isinstance(text, list) and all(isinstance(line, str) for line in text):
        text = "\n".join(text)
    if not _is_text(text):
        names = " or ".join(map(repr, fields))
        raise ConfigError(
            f"{where} with a string in {names} (or with {PROMPT!r} and {COMPLETION!r}); mend it, "
            "or name another field as data.text_field"
        )
    return text


def _exchange(prompts: Any, completions: Any, where: str) -> Exchange:
    if isinstance(prompts, str) and isinstance(completions, str):
        prompts, completions = [prompts], [completions]
    lists = isinstance(prompts, list) and isinstance(completions, list)
    if not lists or len(prompts) != len(completions) or not prompts:
        raise ConfigError(
            f"{where} whose {PROMPT!r} and {COMPLETION!r} are two strings, or two lists of as "
            "many; mend it"
        )
    turns = tuple(zip(prompts, completions, strict=True))
    if not all(_is_text(text) for turn in turns for text in turn):
        raise ConfigError(f"{where} with strings alone in {PROMPT!r} and {COMPLETION!r}; mend it")
    return Exchange(turns)


def _is_text(value: Any) -> TypeGuard[str]:
    """Half a surrogate pair is no text: no tokenizer takes it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_held_out(document: str, share: float) -> bool:
    """Whether a document is among the ``share`` that is kept for validation.

    Its text decides, so that a document is on the same side in every file and however often.
    """
    if not share:
        return False
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def training_documents(s: TrainSettings, names: Sequence[str] = ()) -> Iterator[str]:
    """The documents to train on, of the sources ``names`` (all, if there are none given)."""
    sources = {source.name: source for source in find_sources(s)}
    for name in names or sources:
        if name not in sources:
            raise ConfigError(f"tokenizer.train_on names {name!r}; there are {list(sources)}")
        for path in sources[name].files:
            for document in read_documents(path, sources[name].fields):
                text = text_of(document)
                if not is_held_out(text, s.data.validation_split):
                    yield text
