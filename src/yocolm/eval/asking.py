"""Questions about a long text, put to a model: how prompts are framed, answered and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from yocolm.engine.llm import LLM
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.sampling_params import SamplingParams
from yocolm.errors import NumericsError, RequestError
from yocolm.eval.haystack import continuation
from yocolm.eval.words import Template, check_digits, load_keys, template
from yocolm.models.registry import load_config, load_tokenizer
from yocolm.tokenizer import Tokenizer

PLAIN_TOKENS, CHAT_TOKENS = 16, 64  # of an answer, unless set
_BESIDE_DIGITS = 8  # tokens of an answer: a tokenizer may take one for each digit of a number
_AT_ONCE = 16  # sequences that hold state
_GROUP = 32  # prompts that exist at once,
_GROUP_TOKENS = 1 << 22  # and their tokens
_SPACING = 64  # states kept within the longest prompt, for others that begin alike
_MARK = "\ue000the text stands here\ue000"
Progress = Callable[[int, int], None]


class Answers(Protocol):
    """What is needed of ``LLM``."""

    def generate(self, prompts: Any, sampling_params: Any = None) -> list[RequestOutput]: ...

    def chat_prompt(self, messages: Any) -> Any: ...

    def chat_params(self, params: SamplingParams) -> SamplingParams: ...


@dataclass(frozen=True)
class Words:
    """What needles, questions and answers look like.

    template: sentences; ``keys`` and ``digits`` fill them.
    preamble: text before the passage.
    chat: as a user's message, without a cue.
    max_tokens: of an answer; None: 16, or more where ``digits`` may take more; in a chat 64.
    """

    template: Template
    keys: Sequence[str]
    digits: int = 7
    preamble: str = ""
    chat: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_digits(self.digits)

    @classmethod
    def make(
        cls,
        name: str = "magic",
        keys: str = "cities",
        digits: int = 7,
        preamble: str = "",
        chat: bool = False,
        max_tokens: int | None = None,
        **own: str | None,
    ) -> Words:
        """By names, with texts of one's own: needle, question, cue, link (None: the template's)."""
        return cls(template(name, **own), load_keys(keys), digits, preamble, chat, max_tokens)

    def room(self, answers: int = 1) -> int:
        """Tokens of an answer that has so many numbers."""
        plain = max(PLAIN_TOKENS, self.digits + _BESIDE_DIGITS)
        return self.max_tokens or (CHAT_TOKENS if self.chat else plain) * answers

    def describe(self) -> dict[str, Any]:
        return {
            "needle": self.template.needle,
            "question": self.template.question,
            "cue": None if self.chat else self.template.cue,
            "digits": self.digits,
            "preamble": self.preamble,
            "chat": self.chat,
        }


@dataclass(frozen=True)
class Turn:
    """A question, how its answer begins, and the answer where it has been given."""

    question: str
    cue: str
    answer: str = ""


class Frame:
    """What stands before and behind a passage in a prompt, as token ids."""

    def __init__(self, llm: Answers, tokenizer: Tokenizer, words: Words) -> None:
        self._llm, self.tokenizer, self._words = llm, tokenizer, words

    def around(self, turns: Sequence[Turn]) -> tuple[list[int], list[int]]:
        """The token ids before a passage and behind it; the last turn is to be answered.

        Raises RequestError where a chat is wanted and the model has no template for one.
        """
        if self._words.chat:
            return self._chat(turns)
        preamble = self._words.preamble
        before = self.tokenizer.opening()
        if preamble:
            before = self.tokenizer.encode(preamble)
        behind: list[int] = []
        for turn in turns:
            behind += continuation(self.tokenizer, f" {turn.question} {turn.cue}".rstrip())
            if turn.answer:
                behind += continuation(self.tokenizer, turn.answer)
        return before, behind

    def _chat(self, turns: Sequence[Turn]) -> tuple[list[int], list[int]]:
        preamble, messages = self._words.preamble, []
        for index, turn in enumerate(turns):
            opening = f"{preamble} {_MARK}\n\n".lstrip() if index == 0 else ""
            messages.append({"role": "user", "content": opening + turn.question})
            if index + 1 < len(turns):
                messages.append({"role": "assistant", "content": turn.answer.strip()})
        text: str = self._llm.chat_prompt(messages)["prompt"]
        before, found, behind = text.partition(_MARK)
        if not found:
            raise RequestError("the model's chat template changes the text of a user's message")
        encoded = self.tokenizer.encode(before, add_special_tokens=False)
        return encoded, continuation(self.tokenizer, behind)


@dataclass(frozen=True)
class Answer:
    """What a prompt was answered with; seconds from its first token computed to its last drawn."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float


class Asker:
    """Answers prompts greedily, a group at a time, and counts.

    Args:
        llm: an ``LLM`` (or what answers like one).
        words: of the evaluation; ``chat`` ends answers where a chat's turn ends.
    """

    def __init__(self, llm: Answers, words: Words) -> None:
        self._llm, self._chat = llm, words.chat
        self.prompt_tokens = self.cached_tokens = self.prompts = 0
        self.seconds = 0.0

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
        """One answer for each prompt (token ids). Raises NumericsError where one fails."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        if self._chat:
            params = self._llm.chat_params(params)
        begin = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        self.seconds += time.perf_counter() - begin
        answers = []
        for ids, output in zip(prompts, outputs, strict=True):
            if output.error is not None:
                raise NumericsError(f"a prompt of {len(ids)} tokens failed: {output.error}")
            answers.append(
                Answer(output.outputs[0].text, len(ids), output.num_cached_tokens, _took(output))
            )
        self.prompts += len(answers)
        self.prompt_tokens += sum(answer.prompt_tokens for answer in answers)
        self.cached_tokens += sum(answer.cached_tokens for answer in answers)
        return answers

    def times(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "seconds": self.seconds,
        }


def groups(lengths: Iterable[int]) -> Iterator[list[int]]:
    """Cut a sequence of prompts, given by their lengths, into groups of indices that may exist at
    once."""
    group: list[int] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if group and (len(group) == _GROUP or tokens + length > _GROUP_TOKENS):
            yield group
            group, tokens = [], 0
        group.append(index)
        tokens += length
    if group:
        yield group


def open_llm(model: str | Path, longest: int, **settings: Any) -> tuple[LLM, Tokenizer]:
    """An engine for prompts and answers of up to ``longest`` tokens, that keeps what prompts have
    in common. ``settings`` are ``LLM``'s; None leaves one at its default.

    Raises RequestError for a model without a tokenizer.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise RequestError(f"{model} has no tokenizer; questions about a text need one")
    given = {
        "max_num_seqs": _AT_ONCE,
        "checkpoint_spacing": max(256, min(8192, longest // _SPACING)),
        **{name: value for name, value in settings.items() if value is not None},
    }
    return LLM(model, max_model_len=longest, **given), tokenizer


def default_lengths(model: str | Path) -> list[int]:
    """Powers of two from 1,024 to the context that the model was built for."""
    longest = load_config(model).max_position_embeddings
    lengths = [1024]
    while lengths[-1] * 2 <= longest:
        lengths.append(lengths[-1] * 2)
    return [min(lengths[0], longest)] if longest < 2048 else lengths


def beyond_context(model: str | Path, lengths: Sequence[int]) -> list[str]:
    """A note where lengths are more than the model was built for."""
    context = load_config(model).max_position_embeddings
    longer = [length for length in lengths if length > context]
    if not longer:
        return []
    shown = ", ".join(f"{length:,}" for length in longer)
    return [f"The model was built for {context:,} tokens; lengths beyond: {shown}."]


def check_positive(settings: Mapping[str, Sequence[int] | int]) -> None:
    """Raise RequestError where a number, or one of a list, is not at least 1, or a list empty."""
    for name, value in settings.items():
        numbers = [value] if isinstance(value, int) else list(value)
        if not numbers or min(numbers) < 1:
            raise RequestError(f"{name} is {value!r}; it must be at least 1")


def check_different(settings: Mapping[str, Sequence[Any]]) -> None:
    """Raise RequestError where a list has something twice, which would be counted twice."""
    for name, values in settings.items():
        twice = next((one for i, one in enumerate(values) if one in values[:i]), None)
        if twice is not None:
            raise RequestError(f"{name} have {twice} twice; give different ones")


def _took(output: RequestOutput) -> float:
    times = output.metrics
    if times is None or times.first_scheduled_time is None or times.finished_time is None:
        return 0.0
    return times.finished_time - times.first_scheduled_time
