"""Chains of facts in a long text: what a single needle does not test.

`retrieval`: the number of one key is said to be that of another, that of a third, and so on; right
is the number at the end of the chain that is asked for. `variables`: assignments of variables to
variables, as in RULER's variable tracking; the score is the share of the variables with the asked
value among as many that the answer names first, so that naming all variables gains nothing. Other
chains of the same kind stand between the links, so that no number or variable can be had by its
looks. With 0 hops a chain is a needle.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
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
from yocolm.eval.haystack import Haystack, continuation
from yocolm.eval.needle import passage_of, score_numbers
from yocolm.eval.report import Grid, Report, Side, cells_by, mean
from yocolm.eval.words import draw_keys, draw_numbers
from yocolm.tokenizer import Tokenizer

TASKS = ("retrieval", "variables")
_LETTERS = 5  # of a variable
_TOKENS_A_NAME = 8  # room for it in an answer


@dataclass(frozen=True)
class ChainPlan:
    """What is tried: every task and number of hops at every length, ``runs`` times.

    hops: links of each chain between its first fact and its last.
    chains: in one text, all of as many hops; one is asked for.
    shuffle: links in any order; else each behind the one that it refers to.
    """

    lengths: Sequence[int]
    tasks: Sequence[str] = TASKS
    hops: Sequence[int] = (0, 1, 2, 4)
    chains: int = 3
    shuffle: bool = False
    runs: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive({"lengths": self.lengths, "chains": self.chains, "runs": self.runs})
        if not self.hops or min(self.hops) < 0:
            raise RequestError(f"hops are {list(self.hops)}; they must be at least 0")
        for task in self.tasks:
            if task not in TASKS:
                raise RequestError(f"task {task!r} is unknown; give one of {', '.join(TASKS)}")
        check_different({"lengths": self.lengths, "tasks": self.tasks, "hops": self.hops})


@dataclass(frozen=True)
class Chain:
    """Sentences in the order in which each refers to the one before, and the names they define;
    all have ``value``."""

    sentences: list[str]
    names: list[str]
    value: str


@dataclass(frozen=True)
class ChainQuestion:
    """A prompt, and the chain that it asks for."""

    task: str
    hops: int
    length: int
    run: int
    chain: Chain
    prompt: list[int]


class ChainMaker:
    """Draws the questions of a plan."""

    def __init__(
        self, plan: ChainPlan, words: Words, haystack: Haystack, frame: Frame, tokenizer: Tokenizer
    ) -> None:
        if not words.template.link:
            raise RequestError("chains need a link: give --link, or a template that has one")
        self._plan, self._words, self._haystack = plan, words, haystack
        self._frame, self._tokenizer = frame, tokenizer

    def room(self, task: str, hops: int) -> int:
        """Tokens of an answer."""
        if task == "retrieval" or self._words.max_tokens:
            return self._words.room()
        return self._words.room() + _TOKENS_A_NAME * (hops + 1)

    def question(self, task: str, hops: int, length: int, run: int) -> ChainQuestion:
        plan = self._plan
        rng = random.Random(f"{plan.seed}/{task}/{hops}/{length}/{run}")
        chains = self._chains(task, hops, rng)
        asked = chains[0]
        before, behind = self._frame.around([self._turn(task, asked)])
        pieces = [
            [continuation(self._tokenizer, f" {sentence}") for sentence in chain.sentences]
            for chain in chains
        ]
        passage = passage_of(
            self._haystack,
            length - len(before) - len(behind) - self.room(task, hops),
            [piece for links in pieces for piece in links],
            f"{plan.seed}/{run}",
            length,
        )
        placed: list[tuple[int, list[int]]] = []
        for links in pieces:
            depths = [rng.random() for _ in links]
            if not plan.shuffle:
                depths.sort()
            placed += zip(map(passage.cut, depths), links, strict=True)
        prompt = [*before, *passage.insert(placed), *behind]
        return ChainQuestion(task, hops, length, run, asked, prompt)

    def _chains(self, task: str, hops: int, rng: random.Random) -> list[Chain]:
        count, each = self._plan.chains, hops + 1
        taken = self._haystack.numbers.__contains__
        values = draw_numbers(self._words.digits, count, rng, taken)
        if task == "retrieval":
            names = draw_keys(self._words.keys, count * each, rng)
            first, link = self._words.template.needle, self._words.template.link
        else:
            names = _variables(count * each, rng)
            first, link = "VAR {key} = {value}.", "VAR {key} = VAR {other}."
        chains = []
        for index, value in enumerate(values):
            own = names[index * each : (index + 1) * each]
            sentences = [first.format(key=own[0], value=value)]
            sentences += [
                link.format(key=key, other=other) for other, key in zip(own, own[1:], strict=False)
            ]
            chains.append(Chain(sentences, own, value))
        return chains

    def _turn(self, task: str, chain: Chain) -> Turn:
        form = self._words.template
        if task == "retrieval":
            key = chain.names[-1]
            return Turn(form.question.format(key=key), form.cue.format(key=key))
        count, value = len(chain.names), chain.value
        if count == 1:
            return Turn(
                f"Which variable has the value {value}?",
                f"The variable that has the value {value} is VAR",
            )
        return Turn(
            f"Which {count} variables have the value {value}, by themselves or through others?",
            f"The {count} variables that have the value {value} are VAR",
        )


def evaluate_chains(
    llm: Answers,
    tokenizer: Tokenizer,
    haystack: Haystack,
    plan: ChainPlan,
    words: Words,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask all questions of a plan; as ``needle.evaluate_needles``."""
    maker = ChainMaker(plan, words, haystack, Frame(llm, tokenizer, words), tokenizer)
    asker = Asker(llm, words)
    samples: list[dict[str, Any]] = []
    cells = [(task, n, length) for task in plan.tasks for length in plan.lengths for n in plan.hops]
    for task, hops, length in cells:
        for group in groups([length] * plan.runs):
            questions = [maker.question(task, hops, length, run) for run in group]
            prompts = [question.prompt for question in questions]
            answers = asker.answer(prompts, maker.room(task, hops))
            samples += map(_sampler(words.digits), questions, answers)
            if progress is not None:
                progress(len(samples), len(cells) * plan.runs)
    return samples, asker.times()


def _sampler(digits: int) -> Callable[[ChainQuestion, Answer], dict[str, Any]]:
    def sample(question: ChainQuestion, answer: Answer) -> dict[str, Any]:
        chain = question.chain
        wanted = [chain.value] if question.task == "retrieval" else chain.names
        if question.task == "retrieval":
            score = score_numbers(answer.text, wanted, digits)
        else:
            score = score_variables(answer.text, wanted)
        return {
            "task": question.task,
            "hops": question.hops,
            "length": question.length,
            "run": question.run,
            "asked": chain.names[-1] if question.task == "retrieval" else chain.value,
            "wanted": wanted,
            "answer": answer.text,
            "score": score,
            "prompt_tokens": answer.prompt_tokens,
            "seconds": answer.seconds,
        }

    return sample


def score_variables(text: str, wanted: Sequence[str]) -> float:
    """The share of the wanted variables among the first different ones, as many, that an answer
    names."""
    pattern = rf"\b[A-Z]{{{_LETTERS}}}\b"
    named = list(dict.fromkeys(re.findall(pattern, text)))[: len(wanted)]
    return len(set(named) & set(wanted)) / len(wanted)


def chain_report(
    model: str,
    plan: ChainPlan,
    words: Words,
    samples: Sequence[dict[str, Any]],
    totals: dict[str, Any],
    notes: Sequence[str] = (),
) -> Report:
    """A heat map of hops by length for each task."""
    tasks, hops = Side("task", plan.tasks), Side("hops", plan.hops)
    lengths = Side.lengths(plan.lengths)
    return Report.of_questions(
        "multi-hop",
        model,
        {**vars(plan), **words.describe(), "link": words.template.link},
        samples,
        totals,
        "score",
        cells=cells_by(samples, tasks, hops, lengths, counted=_counted),
        grids=[
            Grid.of(
                f"Score by hops and length, {task}",
                hops,
                lengths,
                [sample for sample in samples if sample["task"] == task],
            )
            for task in plan.tasks
        ],
        notes=list(notes),
    )


def _counted(scores: Sequence[float]) -> dict[str, Any]:
    return {"score": mean(scores), "all_right": mean([float(score == 1) for score in scores])}


def _variables(count: int, rng: random.Random) -> list[str]:
    """Different names of capital letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=_LETTERS))] = None
    return list(names)
