"""Retrieval documents: running text with facts in it, and questions about facts further up.

    python recipes/needle/prepare.py TEXTS OUT --tokens 4000000 --distance 2048 --seed 1

writes OUT, a .jsonl of documents. TEXTS is what recipes/austen/prepare.py wrote. Each document is a
continuous piece of one text; between its sentences stand facts ("The special magic number for
Barolin is 48213.") and, log-uniformly up to ``--distance`` tokens later, questions with their
answers; in exams all questions stand behind the text. With ``--answers`` every document is an exam
as a list of prompts and completions, so that answers alone are learnt. Every fact is new, no key is
a city of the needle evaluation, and Persuasion is not read.
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
from typing import NamedTuple

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
# A fact as it is stated, the question, the answer.
MAGIC = (
    "The special magic number for {key} is {value}.",
    "What is the special magic number for {key}?",
    "The special magic number for {key} is {value}.",
)
JOINT = (
    "What are the special magic numbers for {keys}?",
    "The special magic numbers for {keys} are {values}.",
)
FORMS = (
    (
        "The {what} of {key} is {value}.",
        "What is the {what} of {key}?",
        "The {what} of {key} is {value}.",
    ),
    ("{key}'s {what} is {value}.", "What is {key}'s {what}?", "{key}'s {what} is {value}."),
    (
        "Remember that the {what} for {key} was {value}.",
        "What was the {what} for {key}?",
        "The {what} for {key} was {value}.",
    ),
    (
        "{key} was sold for {value} pounds.",
        "For how much was {key} sold?",
        "{key} was sold for {value} pounds.",
    ),
    ("{key}: {value}.", "{key}:", "{value}."),
    (
        "In the register {key} has {what} {value}.",
        "Which {what} has {key}?",
        "In the register {key} has {what} {value}.",
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


class Question(NamedTuple):
    """What is asked, and its answer."""

    asked: str
    answer: str

    def __str__(self) -> str:
        return f"{self.asked} {self.answer}"


@dataclass(frozen=True)
class Fact:
    """A statement, and what asks for it and gives it back."""

    statement: str
    question: Question
    key: str
    value: str
    is_magic: bool


class Exam(NamedTuple):
    """A text, and questions about it."""

    text: str
    questions: list[Question]

    def __str__(self) -> str:
        return " ".join([self.text, *map(str, self.questions)])

    def record(self) -> dict[str, list[str]]:
        """The questions as prompts, the text before the first; the answers as completions."""
        prompts = [f" {question.asked}" for question in self.questions]
        prompts[0] = self.text + prompts[0]
        return {
            "prompt": prompts,
            "completion": [f" {question.answer}" for question in self.questions],
        }


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
        form = MAGIC if is_magic else self.random.choice(FORMS)
        fill = {"key": key, "value": value, "what": self.random.choice(ATTRIBUTES)}
        statement, asked, answer = (text.format(**fill) for text in form)
        question = Question(_first_upper(asked), answer)
        return Fact(_first_upper(statement), question, key, value, is_magic)

    def question(self, fact: Fact, others: list[Fact]) -> Question:
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
        return Question(*(text.format(keys=keys, values=values) for text in JOINT))

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
                part = str(self.question(fact, [other for _, _, other in due]))
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

    def exam(self, size: int, least: int = 2, share: float | None = None) -> Exam:
        """Running text with facts all over it, and behind it questions about them in any order.

        ``least`` is the lowest number of facts, ``share`` that of the text in the document.
        """
        sentences = self._passage(size)
        text_size = int(size * (share or self.random.uniform(0.55, 0.8)))
        most = max(2 * least, size / (350 if share is None else 1000))
        count = int(math.exp(self.random.uniform(math.log(least), math.log(most))))
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
        questions: list[Question] = []
        for fact in asked:
            if questions and length >= size:
                break
            questions.append(self.question(fact, facts))
            length += len(str(questions[-1])) + 1
        return Exam(" ".join(parts), questions)

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


def make(maker: Maker, arguments: argparse.Namespace) -> dict[str, str | list[str]]:
    """The record of one document."""
    distance = int(arguments.distance * CHARS_PER_TOKEN)
    if arguments.answers:
        size = int(distance * maker.random.choice((0.25, 0.5, 0.9, 0.9)))
        return {**maker.exam(size, least=4, share=maker.random.uniform(0.8, 0.94)).record()}
    size = int(distance * maker.random.uniform(1.0, 3.0))
    kind = maker.random.random()
    if kind < arguments.echoes:
        return {"text": maker.echo(size)}
    if kind < arguments.echoes + arguments.exams:
        return {"text": str(maker.exam(int(distance * maker.random.uniform(0.15, 0.95))))}
    return {"text": maker.document(size, distance, arguments.densities)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="about so many")
    parser.add_argument("--distance", type=int, default=2048, help="tokens, the longest")
    parser.add_argument("--echoes", type=float, default=0.0, help="share of documents that repeat")
    parser.add_argument("--exams", type=float, default=0.0, help="share with all questions behind")
    parser.add_argument("--answers", action="store_true", help="exams of which answers are learnt")
    parser.add_argument(
        "--densities",
        type=lambda text: tuple(map(float, text.split(","))),
        default=(0.05, 0.2, 0.5, 0.8),
        help="of facts among sentences; one is drawn for each document",
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    maker = Maker(read_sentences(arguments.texts), arguments.seed)
    left = arguments.tokens * CHARS_PER_TOKEN
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with open(arguments.out, "w", encoding="utf-8") as file:
        while left > 0:
            record = make(maker, arguments)
            file.write(json.dumps(record) + "\n")
            left -= sum(len(text) for parts in record.values() for text in parts)


if __name__ == "__main__":
    main()
