"""Long documents: a file each, or a folder whose files are joined."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from yocolm.errors import RequestError
from yocolm.eval.perplexity import Text, read_text, tokenise
from yocolm.tokenizer import Tokenizer

HEADER = "==> {path} <=="  # a line before each file of a folder, as `head` writes it


@dataclass(frozen=True)
class Document:
    """A tokenised document of ``files`` files."""

    name: str
    text: Text
    files: int


def load_document(
    path: Path,
    tokenizer: Tokenizer,
    tokens: int,
    globs: Sequence[str] | None = None,
    shuffle: int | None = None,
    header: str = HEADER,
) -> Document:
    """A file, or the files of a folder one after another, as far as ``tokens`` tokens need them.

    Args:
        globs: names of a folder's files, such as ``*.c``, at any depth; None: all files that are
            UTF-8, hidden ones left out.
        shuffle: seed of the order of the files; None: by their paths.
        header: a line before each file of a folder, with its ``{path}``.

    Raises RequestError for what is not there, not UTF-8 or empty, and for text that the tokenizer
    does not give back.
    """
    if path.is_dir():
        parts = _folder(path, globs, shuffle, header)
    elif path.is_file():
        parts = iter([read_text(path)])
    else:
        raise RequestError(f"{path} is neither a file nor a folder")
    ids: list[int] = []
    sizes: list[int] = []
    files, first = 0, None
    for part in parts:
        text = tokenise(tokenizer, part)
        first = text if first is None else first
        ids += text.token_ids
        sizes += text.token_bytes
        files += 1
        if len(ids) > tokens:
            break
    if first is None or not ids:
        where = f" in {', '.join(map(repr, globs))}" if globs else ""
        raise RequestError(f"{path} holds no text{where}")
    kept = tokens + (first.prefix is None)
    ids, sizes = ids[:kept], sizes[:kept]
    return Document(str(path), Text(ids, sizes, sum(sizes), first.prefix, first.bos), files)


def _folder(
    folder: Path, globs: Sequence[str] | None, shuffle: int | None, header: str
) -> Iterator[str]:
    found: set[str] = set()
    for glob in globs or ["*"]:
        try:
            files = [path for path in folder.rglob(glob) if path.is_file()]
            found.update(path.relative_to(folder).as_posix() for path in files)
        except (NotImplementedError, ValueError, IndexError) as error:
            raise RequestError(
                f"glob {glob!r} does not name files within {folder} ({error}); give a pattern such "
                "as '*.c'"
            ) from error
    names = sorted(found)
    if not globs:
        names = [name for name in names if not any(p.startswith(".") for p in name.split("/"))]
    if shuffle is not None:
        random.Random(shuffle).shuffle(names)
    for index, name in enumerate(names):
        try:
            text = read_text(folder / name)
        except RequestError:
            if globs:
                raise
            continue
        yield "\n" * (index > 0) + header.replace("{path}", name) + "\n" + text
