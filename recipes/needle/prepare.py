"""Retrieval documents: running text with facts in it, and questions about facts further up.

    python recipes/needle/prepare.py TEXTS OUT --tokens 4000000 --distance 2048 --seed 1

writes OUT, a .jsonl of documents. TEXTS is what recipes/austen/prepare.py wrote. Each document is a
continuous piece of one text; between its sentences stand facts ("The special magic number for
Barolin is 48213.") and, log-uniformly up to ``--distance`` tokens later, questions with their
answers. Every fact is new. What the evaluation asks for never occurs as a fact: no key is a city of
the needle evaluation, and no value has seven digits. Persuasion is not read.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from yocolm.eval.words import CITIES

TEXTS = (
    "austen/emma.txt",
    "austen/mansfield_park.txt",
    "austen/northanger_abbey.txt",
    "austen/pride_and_prejudice.txt",
    "austen/sense_and_sensibility.txt",
    "moby_dick.txt",
    "tom_sawyer.txt",
    "brown.txt",
    "addresses.txt",
    "opticks.txt",
    "devil.txt",
    "jargon.txt",
)
CHARS_PER_TOKEN = 3.3
DIGITS = (3, 4, 5, 6, 6, 7, 7, 7, 7, 8, 8, 9)  # of a value
MAGIC = (
    "The special magic number for {key} is {value}.",
    "What is the special magic number for {key}? The special magic number for {key} is {value}.",
)
JOINT = (
    "What are the special magic numbers for {keys}? The special magic numbers for {keys} are "
    "{values}."
)
FORMS = (
    (
        "The {what} of {key} is {value}.",
        "What is the {what} of {key}? The {what} of {key} is {value}.",
    ),
    ("{key}'s {what} is {value}.", "What is {key}'s {what}? {key}'s {what} is {value}."),
    (
        "Remember that the {what} for {key} was {value}.",
        "What was the {what} for {key}? The {what} for {key} was {value}.",
    ),
    (
        "{key} was sold for {value} pounds.",
        "For how much was {key} sold? {key} was sold for {value} pounds.",
    ),
    ("{key}: {value}.", "{key}: {value}."),
    (
        "In the register {key} has {what} {value}.",
        "Which {what} has {key}? In the register {key} has {what} {value}.",
    ),
)
ATTRIBUTES = (
    "number",
    "magic number",
    "special number",
    "secret code",
    "telephone number",
    "account number",
    "age",
    "lucky number",
    "house number",
    "password",
    "word",
    "weight",
    "price",
)
SYLLABLES = (
    "ba be bo bri da de do dra fa fe fen ga gel go ha hel ho i ja jo ka kel ki la le lin lo ma me "
    "mor na ne nor o pa pel pi ra re rin ro sa sel si sto ta te tor u va vel vi wa wen ya ze zor"
).split()
ENDINGS = "n r l s th m dale ton ford by wick grad ville mouth a o".split()


@dataclass(frozen=True)
class Fact:
    """A statement and the question that gives it back."""

    statement: str
    question: str
    key: str
    value: str
    is_magic: bool


class Maker:
    """Draws facts and documents; one seed decides all."""

    def __init__(self, texts: dict[str, list[str]], seed: int) -> None:
        self.random = random.Random(seed)
        self.texts = texts
        self.names = list(texts)
        self.sizes = [len(sentences) for sentences in texts.values()]
        words: set[str] = set()
        for sentences in texts.values():
            for sentence in sentences:
                words.update(re.findall(r"[a-z]{4,9}", sentence))
        self.words = sorted(words)
        self.forbidden = {city.lower() for city in CITIES}

    def word(self) -> str:
        return self.random.choice(self.words)

    def key(self) -> str:
        pick = self.random.random()
        if pick < 0.5:
            count = self.random.choice((1, 2, 2, 3))
            name = "".join(self.random.choice(SYLLABLES) for _ in range(count))
            name = (name + self.random.choice(ENDINGS)).capitalize()
        elif pick < 0.75:
            name = self.word().capitalize()
        else:
            name = f"{self.word()} {self.word()}"
            name = name.title() if self.random.random() < 0.5 else f"the {name}"
        return self.key() if name.lower() in self.forbidden else name

    def value(self) -> str:
        if self.random.random() < 0.1:
            return self.word()
        digits = self.random.choice(DIGITS)
        return str(self.random.randrange(10 ** (digits - 1), 10**digits))

    def fact(self) -> Fact:
        key, value = self.key(), self.value()
        is_magic = self.random.random() < 0.45
        statement, question = MAGIC if is_magic else self.random.choice(FORMS)
        fill = {"key": key, "value": value, "what": self.random.choice(ATTRIBUTES)}
        said, asked = (_first_upper(text.format(**fill)) for text in (statement, question))
        return Fact(said, asked, key, value, is_magic)

    def question(self, fact: Fact, others: list[Fact]) -> str:
        """What asks for ``fact``, now and then together with up to seven of the ``others``."""
        if not fact.is_magic or self.random.random() > 0.25:
            return fact.question
        known = {other.key: other.value for other in others if other.is_magic}
        known.pop(fact.key, None)
        count = min(self.random.choice((1, 1, 2, 3, 5, 7)), len(known))
        if count == 0:
            return fact.question
        asked = [(fact.key, fact.value), *self.random.sample(sorted(known.items()), count)]
        self.random.shuffle(asked)
        keys, values = (_listed(part) for part in zip(*asked, strict=True))
        return JOINT.format(keys=keys, values=values)

    def echo(self, size: int) -> str:
        """Lists of random keys, words and numbers, each said two to four times."""
        parts: list[str] = []
        while sum(map(len, parts)) < size:
            items = [
                self.random.choice((self.key, self.word, self.value))()
                for _ in range(self.random.randint(4, 40))
            ]
            parts += [" ".join(items) + "."] * self.random.randint(2, 4)
        return " ".join(parts)

    def document(self, size: int, distance: int, densities: tuple[float, ...]) -> str:
        """About ``size`` characters, questions up to ``distance`` characters behind their facts."""
        density = self.random.choice(densities)
        sentences = self._passage(size)
        parts: list[str] = []
        due: list[tuple[float, int, Fact]] = []
        length = serial = 0
        while length < size:
            if due and due[0][0] <= length:
                _, _, fact = heapq.heappop(due)
                part = self.question(fact, [other for _, _, other in due])
            elif self.random.random() < density:
                fact = self.fact()
                part = fact.statement
                for _ in range(self.random.choice((1, 1, 2, 3))):
                    gap = math.exp(self.random.uniform(math.log(60), math.log(distance)))
                    serial += 1
                    heapq.heappush(due, (length + gap, serial, fact))
            else:
                part = next(sentences)
            parts.append(part)
            length += len(part) + 1
        return " ".join(parts)

    def exam(self, size: int) -> str:
        """Running text with facts all over it, and behind it questions about them in any order."""
        sentences = self._passage(size)
        text_size = int(size * self.random.uniform(0.55, 0.8))
        count = int(math.exp(self.random.uniform(math.log(2), math.log(max(4, size / 350)))))
        places = sorted(self.random.uniform(0, text_size) for _ in range(count))
        facts = [self.fact() for _ in range(count)]
        parts: list[str] = []
        length = said = 0
        while length < text_size or said < count:
            if said < count and places[said] <= length:
                parts.append(facts[said].statement)
                said += 1
            else:
                parts.append(next(sentences))
            length += len(parts[-1]) + 1
        asked = facts * 2
        self.random.shuffle(asked)
        for fact in asked:
            if length >= size:
                break
            parts.append(self.question(fact, facts))
            length += len(parts[-1]) + 1
        return " ".join(parts)

    def _passage(self, size: int) -> Iterator[str]:
        """Sentences of one text, from a random place on, around its end if need be."""
        name = self.random.choices(self.names, self.sizes)[0]
        sentences = self.texts[name]
        at = self.random.randrange(len(sentences))
        while True:
            yield sentences[at % len(sentences)]
            at += 1


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _first_upper(text: str) -> str:
    return text[0].upper() + text[1:]


def read_sentences(folder: Path) -> dict[str, list[str]]:
    """The sentences of every text, line breaks inside kept."""
    found = {}
    for name in TEXTS:
        text = (folder / name).read_text(encoding="utf-8")
        found[name] = [s for s in re.split(r"(?<=[.!?;])\s+", text) if 0 < len(s) < 600]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="about so many")
    parser.add_argument("--distance", type=int, default=2048, help="tokens, the longest")
    parser.add_argument("--echoes", type=float, default=0.0, help="share of documents that repeat")
    parser.add_argument("--exams", type=float, default=0.0, help="share with all questions behind")
    parser.add_argument(
        "--densities",
        type=lambda text: tuple(map(float, text.split(","))),
        default=(0.05, 0.2, 0.5, 0.8),
        help="of facts among sentences; one is drawn for each document",
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    maker = Maker(read_sentences(arguments.texts), arguments.seed)
    left = arguments.tokens * CHARS_PER_TOKEN
    distance = int(arguments.distance * CHARS_PER_TOKEN)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.out, "w", encoding="utf-8") as file:
        while left > 0:
            size = int(distance * maker.random.uniform(1.0, 3.0))
            kind = maker.random.random()
            if kind < arguments.echoes:
                document = maker.echo(size)
            elif kind < arguments.echoes + arguments.exams:
                document = maker.exam(int(distance * maker.random.uniform(0.15, 0.95)))
            else:
                document = maker.document(size, distance, arguments.densities)
            file.write(json.dumps({"text": document}) + "\n")
            left -= len(document)


if __name__ == "__main__":
    main()
