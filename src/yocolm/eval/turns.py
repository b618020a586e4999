"""Several questions over one long text: what was asked and answered stays in the context."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from yocolm.eval.haystack import Haystack, continuation
from yocolm.eval.needle import passage_of, score_numbers
from yocolm.eval.report import Grid, Report, Side, cells_by
from yocolm.eval.words import draw_keys, draw_numbers
from yocolm.tokenizer import Tokenizer


@dataclass(frozen=True)
class TurnPlan:
    """What is tried: ``runs`` conversations at every length.

    lengths: tokens of the last prompt and its answer if all answers are as long as they may be.
    turns: needles in the text, and questions, one for each, whose order is not the text's.
    true_answers: keep the true answers in the context instead of the model's.
    """

    lengths: Sequence[int]
    turns: int = 8
    true_answers: bool = False
    runs: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive({"lengths": self.lengths, "turns": self.turns, "runs": self.runs})
        check_different({"lengths": self.lengths})


@dataclass
class Conversation:
    """A text with its needles, and what has been said about it so far."""

    length: int
    run: int
    keys: list[str]
    values: list[str]
    body: list[int]
    said: list[Turn] = field(default_factory=list)


class TurnMaker:
    """Draws the conversations of a plan."""

    def __init__(
        self, plan: TurnPlan, words: Words, haystack: Haystack, frame: Frame, tokenizer: Tokenizer
    ) -> None:
        self._plan, self._words, self._haystack = plan, words, haystack
        self._frame, self._tokenizer = frame, tokenizer

    def conversation(self, length: int, run: int) -> Conversation:
        """One whose last prompt and answer, whatever is answered, fit the length; with the true
        answers they fill it."""
        plan, words = self._plan, self._words
        rng = random.Random(f"{plan.seed}/{length}/{run}")
        keys = draw_keys(words.keys, plan.turns, rng)
        taken = self._haystack.numbers.__contains__
        values = draw_numbers(words.digits, plan.turns, rng, taken)
        pieces = [
            continuation(self._tokenizer, " " + words.template.needle.format(key=key, value=value))
            for key, value in zip(keys, values, strict=True)
        ]
        said = [self.turn(key, f" {value}.") for key, value in zip(keys[:-1], values, strict=False)]
        before, behind = self._frame.around([*said, self.turn(keys[-1])])
        room = words.room()
        if not plan.true_answers:  # the model's may be as long as they can
            room += (plan.turns - 1) * words.room()
        left = length - len(before) - len(behind) - room
        passage = passage_of(self._haystack, left, pieces, f"{plan.seed}/{run}", length)
        cuts = [passage.cut(rng.random()) for _ in pieces]
        body = passage.insert(list(zip(cuts, pieces, strict=True)))
        return Conversation(length, run, keys, values, body)

    def turn(self, key: str, answer: str = "") -> Turn:
        form = self._words.template
        return Turn(form.question.format(key=key), form.cue.format(key=key), answer)

    def prompt(self, talk: Conversation) -> list[int]:
        """The prompt of the next turn."""
        turn = self.turn(talk.keys[len(talk.said)])
        before, behind = self._frame.around([*talk.said, turn])
        return [*before, *talk.body, *behind]


def evaluate_turns(
    llm: Answers,
    tokenizer: Tokenizer,
    haystack: Haystack,
    plan: TurnPlan,
    words: Words,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Have all conversations of a plan; as ``needle.evaluate_needles``."""
    maker = TurnMaker(plan, words, haystack, Frame(llm, tokenizer, words), tokenizer)
    asker = Asker(llm, words)
    samples: list[dict[str, Any]] = []
    for length in plan.lengths:
        for group in groups([length] * plan.runs):
            talks = [maker.conversation(length, run) for run in group]
            for turn in range(plan.turns):
                prompts = [maker.prompt(talk) for talk in talks]
                for talk, answer in zip(talks, asker.answer(prompts, words.room()), strict=True):
                    samples.append(_sample(talk, turn, answer, words.digits))
                    value = talk.values[turn]
                    kept = f" {value}." if plan.true_answers else first_sentence(answer.text)
                    talk.said.append(maker.turn(talk.keys[turn], kept))
                if progress is not None:
                    progress(len(samples), len(plan.lengths) * plan.runs * plan.turns)
    return samples, asker.times()


def first_sentence(text: str) -> str:
    """An answer up to its first full stop or line end, with a full stop behind it: models that
    continue text go on with something else."""
    said = re.split(r"(?<=\S)[.\n]", text, maxsplit=1)[0].rstrip()
    return f"{said}."


def _sample(talk: Conversation, turn: int, answer: Answer, digits: int) -> dict[str, Any]:
    return {
        "length": talk.length,
        "run": talk.run,
        "turn": turn + 1,
        "key": talk.keys[turn],
        "value": talk.values[turn],
        "answer": answer.text,
        "score": score_numbers(answer.text, [talk.values[turn]], digits),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "seconds": answer.seconds,
    }


def turn_report(
    model: str,
    plan: TurnPlan,
    words: Words,
    samples: Sequence[dict[str, Any]],
    totals: dict[str, Any],
    notes: Sequence[str] = (),
) -> Report:
    """A heat map of turn by length."""
    turns, lengths = Side("turn", range(1, plan.turns + 1)), Side.lengths(plan.lengths)
    return Report.of_questions(
        "multi-turn",
        model,
        {**vars(plan), **words.describe()},
        samples,
        totals,
        cells=cells_by(samples, lengths, turns),
        grids=[Grid.of("Accuracy by turn and length", turns, lengths, samples)],
        notes=list(notes),
    )
