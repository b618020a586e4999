"""Needles in a haystack: sentences with random numbers hidden in text, asked for over depth and
length.

A prompt and its answer have exactly the tokens of their length (of several questions about one
text, the longest has). Needles stand between sentences of
the text; the one that is asked for at the depth of its cell, counted in tokens, the others
anywhere. No key occurs twice in a text, no number in the text by itself, and right is the exact
number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from yocolm.errors import RequestError
from yocolm.eval.asking import (
    Answer,
    Answers,
    Asker,
    Frame,
    Progress,
    Turn,
    Words,
    check_different,
    check_positive,
    groups,
)
from yocolm.eval.haystack import Haystack, Passage, continuation
from yocolm.eval.report import JSON_FILE, Grid, Report, Side, cells_by
from yocolm.eval.words import draw_keys, draw_numbers, listed, numbers_in
from yocolm.tokenizer import Tokenizer

_FAR = 0.05  # of a text: between a needle and the depth of its cell, from which on it is said


@dataclass(frozen=True)
class NeedlePlan:
    """What is tried: every number of needles at every length and depth, ``runs`` times.

    lengths: tokens of prompt and answer; of several questions about one text, of the longest.
    depths: of the needle that is asked for, from 0 (the start of the text) to 1.
    needles: numbers of needles in one text.
    ask: for how many of them; None for all.
    jointly: in one question, whose score is the share of the numbers that the answer has; else
        each in a question of its own.
    """

    lengths: Sequence[int]
    depths: Sequence[float] = tuple(i / 10 for i in range(11))
    needles: Sequence[int] = (1,)
    ask: int | None = 1
    jointly: bool = False
    runs: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive({"lengths": self.lengths, "needles": self.needles, "runs": self.runs})
        check_positive({"ask": 1 if self.ask is None else self.ask})
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise RequestError(f"depths are {list(self.depths)}; they must be from 0 to 1")
        check_different(
            {"lengths": self.lengths, "depths": self.depths, "numbers of needles": self.needles}
        )

    def asked(self, needles: int) -> int:
        return needles if self.ask is None else min(self.ask, needles)


@dataclass(frozen=True)
class Fact:
    """A needle: its key and number, and the share of the text's tokens before it."""

    key: str
    value: str
    depth: float


@dataclass(frozen=True)
class Question:
    """A prompt about a text, and the facts that it asks for, the first at the cell's depth."""

    needles: int
    length: int
    depth: float
    run: int
    facts: tuple[Fact, ...]
    prompt: list[int]


class NeedleMaker:
    """Draws the questions of a plan; the seed decides them all, whatever else is in the plan."""

    def __init__(
        self, plan: NeedlePlan, words: Words, haystack: Haystack, frame: Frame, tokenizer: Tokenizer
    ) -> None:
        self._plan, self._words, self._haystack = plan, words, haystack
        self._frame, self._tokenizer = frame, tokenizer

    def questions(self, length: int, needles: int, run: int) -> Iterator[Question]:
        """Those of one run, from the deepest on: what prompts have in common comes first."""
        for depth in sorted(self._plan.depths, reverse=True):
            yield from self._ask(length, needles, depth, run)

    def _ask(self, length: int, needles: int, depth: float, run: int) -> Iterator[Question]:
        plan, words = self._plan, self._words
        where = f"{plan.seed}/{length}/{needles}/{depth:.6f}"
        keys = _keys_of_run(words.keys, needles, run, random.Random(f"{where}/keys"))
        rng = random.Random(f"{where}/{run}")
        values = draw_numbers(words.digits, needles, rng, self._haystack.numbers.__contains__)
        depths = [depth, *(rng.random() for _ in range(needles - 1))]
        asked = plan.asked(needles)
        turns = self._turns(keys[:asked])
        frames = [self._frame.around([turn]) for turn in turns]
        pieces = [
            continuation(self._tokenizer, " " + words.template.needle.format(key=key, value=value))
            for key, value in zip(keys, values, strict=True)
        ]
        around = max(len(before) + len(behind) for before, behind in frames)
        room = words.room(asked if plan.jointly else 1)
        passage = passage_of(
            self._haystack, length - around - room, pieces, f"{plan.seed}/{run}", length
        )
        cuts = [passage.cut(one) for one in depths]
        body = passage.insert(list(zip(cuts, pieces, strict=True)))
        facts = [
            Fact(key, value, cut / max(1, len(passage.token_ids)))
            for key, value, cut in zip(keys, values, cuts, strict=True)
        ][:asked]
        for index, (before, behind) in enumerate(frames):
            wanted = tuple(facts) if plan.jointly else (facts[index],)
            yield Question(needles, length, depth, run, wanted, [*before, *body, *behind])

    def _turns(self, keys: Sequence[str]) -> list[Turn]:
        form = self._words.template
        if self._plan.jointly and len(keys) > 1:
            names = listed(keys)
            return [Turn(form.joint_question.format(keys=names), form.joint_cue.format(keys=names))]
        return [Turn(form.question.format(key=key), form.cue.format(key=key)) for key in keys]


def passage_of(
    haystack: Haystack, tokens: int, pieces: Sequence[Sequence[int]], seed: str, length: int
) -> Passage:
    """A passage that has ``tokens`` together with the pieces, from a sentence that ``seed`` draws.

    Raises RequestError where the pieces leave no room for text.
    """
    left = tokens - sum(map(len, pieces))
    if left < 1:
        raise RequestError(
            f"a length of {length} tokens leaves no room for text: needles, question and answer "
            f"take {length - left}; give a greater length, or fewer needles"
        )
    first = random.Random(f"{seed}/text").randrange(haystack.num_sentences)
    return haystack.passage(first, left)


def evaluate_needles(
    llm: Answers,
    tokenizer: Tokenizer,
    haystack: Haystack,
    plan: NeedlePlan,
    words: Words,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask all questions of a plan. Returns a dictionary for each, with a ``score`` from 0 to 1,
    and the totals of tokens and seconds.

    ``progress`` is called with (questions done, questions in all).
    """
    maker = NeedleMaker(plan, words, haystack, Frame(llm, tokenizer, words), tokenizer)
    asker = Asker(llm, words)
    samples: list[dict[str, Any]] = []
    cells = [(needles, length) for length in plan.lengths for needles in plan.needles]
    counts = {n: (1 if plan.jointly else plan.asked(n)) * len(plan.depths) for n in plan.needles}
    total = sum(counts[needles] for needles, _ in cells) * plan.runs
    for needles, length in cells:
        room = words.room(plan.asked(needles) if plan.jointly else 1)
        drawn = (q for run in range(plan.runs) for q in maker.questions(length, needles, run))
        for group in groups([length] * counts[needles] * plan.runs):
            questions = [next(drawn) for _ in group]
            answers = asker.answer([question.prompt for question in questions], room)
            for question, answer in zip(questions, answers, strict=True):
                samples.append(_sample(question, answer, words.digits))
            if progress is not None:
                progress(len(samples), total)
    return samples, asker.times()


def _sample(question: Question, answer: Answer, digits: int) -> dict[str, Any]:
    values = [fact.value for fact in question.facts]
    return {
        "needles": question.needles,
        "length": question.length,
        "depth": question.depth,
        "run": question.run,
        "keys": [fact.key for fact in question.facts],
        "values": values,
        "depths": [round(fact.depth, 4) for fact in question.facts],
        "answer": answer.text,
        "score": score_numbers(answer.text, values, digits),
        "prompt_tokens": answer.prompt_tokens,
        "seconds": answer.seconds,
    }


def score_numbers(text: str, values: Sequence[str], digits: int) -> float:
    """The share of the values that an answer has as whole numbers of at least so many digits: of
    several values anywhere, of one as the first."""
    numbers = numbers_in(text, digits)
    if len(values) == 1:
        numbers = numbers[:1]
    return sum(value in numbers for value in values) / len(values)


def needle_report(
    model: str,
    plan: NeedlePlan,
    words: Words,
    samples: Sequence[dict[str, Any]],
    totals: dict[str, Any],
    notes: Sequence[str] = (),
) -> Report:
    """Heat maps of depth by length for each number of needles; with several, those by length."""
    counts, lengths = Side("needles", plan.needles), Side.lengths(plan.lengths)
    depths = Side("depth", plan.depths, lambda depth: f"{100 * depth:.0f} %")
    grids = []
    if len(plan.needles) > 1:
        title = "Accuracy by number of needles and length"
        grids.append(Grid.of(title, counts, lengths, samples))
    for needles in plan.needles:
        title = "Accuracy by depth and length" + (f", {needles} needles" if needles > 1 else "")
        own = [sample for sample in samples if sample["needles"] == needles]
        grids.append(Grid.of(title, depths, lengths, own))
    asked = "all" if plan.ask is None else plan.ask
    return Report.of_questions(
        "needle",
        model,
        {**vars(plan), "ask": asked, **words.describe()},
        samples,
        totals,
        cells=cells_by(samples, counts, lengths, depths),
        grids=grids,
        notes=[*notes, *_misplaced(samples)],
    )


def _misplaced(samples: Sequence[dict[str, Any]]) -> list[str]:
    """A note where needles do not lie where their cells say."""
    got: dict[tuple[Any, ...], float] = {}
    for one in samples:  # the first question about a text is the one for the cell's needle
        place = (one["needles"], one["length"], one["depth"], one["run"])
        got.setdefault(place, one["depths"][0])
    off = [abs(depth - place[2]) for place, depth in got.items()]
    far = sum(one > _FAR for one in off)
    if not far:
        return []
    return [
        f"{far} of {len(off)} texts have no end of a sentence near the depth of their cell: the "
        f"needle lies up to {100 * max(off):.0f} % of the text from it ({JSON_FILE} has where)."
    ]


def _keys_of_run(keys: Sequence[str], count: int, run: int, rng: random.Random) -> list[str]:
    """``count`` different keys, and others in the other runs of a cell as far as there are any."""
    order = draw_keys(keys, len(keys), rng)
    if count > len(keys):
        draw_keys(keys, count, rng)  # says so
    return [order[(run * count + i) % len(order)] for i in range(count)]
