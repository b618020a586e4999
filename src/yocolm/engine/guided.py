"""Structured outputs: what a sequence may draw next, by a JSON schema, a regex or a grammar.

llguidance does the parsing. It is imported when the first request asks for it: few do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from yocolm.errors import RequestError
from yocolm.tokenizer import JsonTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

CACHED_GRAMMARS = 64
MAX_CHOICES = 10_000
# Between JSON's tokens: one space, or a new line with its indentation. Unbounded white space, which
# a schema allows, is where a model that has lost the thread would stay for ever.
WHITESPACE = r"(\n {0,32}| ?)"
_FIELDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class GuidedParams:
    """The form that an output must have: exactly one of these.

    json: a JSON schema (a dictionary, or JSON text); json_object: True for any JSON object;
    regex: a regular expression in the syntax of Rust's regex crate, matched as a whole;
    choice: one of these texts; grammar: in Lark or GBNF form.

    Raises RequestError for a wrong type, and for none or several of them.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FIELDS if getattr(self, name) not in (None, False)]
        given += ["json"] * (self.json is False)
        if len(given) != 1:
            shown = " and ".join(given) or "none of them"
            raise RequestError(f"structured_outputs has {shown}; give one of {', '.join(_FIELDS)}")
        [name] = given
        value = getattr(self, name)
        if name == "json":
            object.__setattr__(
                self, name, _schema_text(value)
            )  # hashable, and the caller's may change
        elif name == "choice":
            object.__setattr__(self, name, _choices(value))
        elif name == "json_object" and value is not True:
            raise RequestError(f"structured_outputs.json_object={value!r} must be True or False")
        elif name in ("regex", "grammar") and not isinstance(value, str):
            raise RequestError(f"structured_outputs.{name}={value!r} must be text")

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in _FIELDS if getattr(self, name) not in (None, False))


def _schema_text(schema: Any) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not JSON: {error}") from error
    if not isinstance(parsed, dict | bool):
        raise RequestError(f"structured_outputs.json={text[:80]} must be a JSON schema, an object")
    return text


def _choices(choices: Any) -> tuple[str, ...]:
    listed = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not listed or not 1 <= len(choices) <= MAX_CHOICES:
        raise RequestError(
            f"structured_outputs.choice={str(choices)[:80]!r} must be a list of 1 to "
            f"{MAX_CHOICES} texts"
        )
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise RequestError(f"structured_outputs.choice holds {choice!r}; give texts, not empty")
    return tuple(choices)


class Guide:
    """Where one sequence is in its grammar. It outlives a preemption, as the tokens drawn do."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self.matcher, self.words = matcher, words

    def copy(self) -> Guide:
        return Guide(self.matcher.deep_copy(), self.words)

    def advance(self, token_id: int) -> None:
        """Take the token drawn; one that the grammar does not allow leaves an ``error``."""
        self.matcher.consume_token(token_id)

    @property
    def complete(self) -> bool:
        """Whether nothing may follow but an end token."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str | None:
        """What has gone wrong in the parser, for good."""
        if not self.matcher.is_error():
            return None
        return f"structured_outputs: {_one_line(self.matcher.get_error())}"


class GuideFactory:
    """Compiles grammars for one tokenizer; any thread may.

    ``vocab_size`` is the model's, ``ends`` are the tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, ends: Iterable[int]) -> None:
        self._tokenizer, self._ends = tokenizer, sorted(ends)
        self._vocab_size = vocab_size
        self._inner: LLTokenizer | None = None
        self._lock = Lock()
        self._compile = lru_cache(maxsize=CACHED_GRAMMARS)(self._compile_now)
        self._held: dict[int, Guide] = {}  # by the id of parameters that are still in use

    def start(self, params: GuidedParams) -> Guide:
        """A guide at the beginning. Raises RequestError that says what is wrong with a grammar.

        A second call with the same object never compiles: the first may be a check in any thread,
        the second is between the engine's steps.
        """
        guide = self._held.get(id(params))
        if guide is None:
            self.prepare()
            guide = self._held[id(params)] = self._compile(params)
            finalize(params, self._held.pop, id(params), None).atexit = False
        return guide.copy()

    def prepare(self) -> None:
        """Read the tokenizer, which takes seconds, and Python's lock, where it has 262,144 tokens.

        The first ``start`` would do it. Raises RequestError where no grammar can be followed.
        """
        with self._lock:
            if self._inner is None:
                self._inner = self._read_tokenizer()

    def _read_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, which this engine lacks")
        if not self._ends:
            raise RequestError(
                "structured_outputs needs an end-of-text token, and this model names none: set "
                "eos_token_id in its generation_config.json"
            )
        size = max(self._vocab_size, self._tokenizer.vocab_size)
        return _ll_tokenizer(self._tokenizer, size, self._ends)

    def _compile_now(self, params: GuidedParams) -> Guide:
        import llguidance

        assert self._inner is not None
        try:
            grammar = _grammar(params)
        except ValueError as error:
            raise _refusal(params, str(error)) from error
        matcher = llguidance.LLMatcher(self._inner, grammar, log_level=0)
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        guide = Guide(matcher, (self._inner.vocab_size + 31) // 32)
        self._try_first_token(params, guide.copy())
        return guide

    def _try_first_token(self, params: GuidedParams, guide: Guide) -> None:
        """Some grammars are found too complex, or impossible, only when they are followed."""
        bits = MaskWorker().compute([guide])[0].view(np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if len(allowed) and not guide.matcher.is_error():
            guide.advance(int(allowed[-1]))
        if guide.matcher.is_error() or not len(allowed):
            error = guide.matcher.get_error()
            nothing = not error or error.startswith("NoExtension")
            raise _refusal(params, "it allows no output" if nothing else error)


class MaskWorker:
    """Computes masks beside the model's forward pass.

    A thread waits for llguidance's threads, which do without Python's lock.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def start(self, guides: Sequence[Guide]) -> Future[np.ndarray]:
        """Masks of the next token, [guides, words] int32; wait for them before guides advance.

        A word has the bits of 32 tokens. There are bits enough for all tokens of the model.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="yocolm-masks")
        return self._pool.submit(self.compute, guides)

    def compute(self, guides: Sequence[Guide]) -> np.ndarray:
        """The same at once."""
        import llguidance

        if self._executor is None:
            self._executor = llguidance.LLExecutor()
        masks = np.zeros((len(guides), guides[0].words), np.int32)
        jobs = [(guide.matcher, index) for index, guide in enumerate(guides)]
        self._executor.unsafe_compute_mask_ptr(
            jobs, masks.ctypes.data, guides[0].words * masks.itemsize, len(guides)
        )
        return masks


def _grammar(params: GuidedParams) -> str:
    import llguidance

    matcher = llguidance.LLMatcher
    match params.kind:
        case "json" | "json_object":
            schema = '{"type": "object"}' if params.json is None else str(params.json)
            options: Any = {"whitespace_pattern": WHITESPACE}
            return matcher.grammar_from_json_schema(schema, defaults=options)
        case "regex":
            return matcher.grammar_from_regex(str(params.regex))
        case "choice":
            # Alternatives of a grammar are limited to 2000, those of a regex are not.
            return matcher.grammar_from_regex("|".join(map(re.escape, params.choice or ())))
        case _:
            return llguidance.grammar_from("grammar", str(params.grammar))


def _ll_tokenizer(tokenizer: Tokenizer, size: int, ends: list[int]) -> LLTokenizer:
    import llguidance

    if isinstance(tokenizer, JsonTokenizer):
        return llguidance.LLTokenizer(tokenizer.inner.to_str(), n_vocab=size, eos_token=ends)
    wrapped = llguidance.TokenizerWrapper(_ByteTokens(tokenizer, ends[0]))
    return llguidance.LLTokenizer(wrapped, n_vocab=size, eos_token=ends)


class _ByteTokens:
    """A tokenizer as llguidance asks for one: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(index) or b"" for index in ids]
        self.special_token_ids = [index for index in ids if tokenizer.is_special(index)]

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded, add_special_tokens=False)


def _refusal(params: GuidedParams, reason: str) -> RequestError:
    return RequestError(f"structured_outputs.{params.kind} cannot be used: {_one_line(reason)}")


def _one_line(message: str) -> str:
    """The first part of a message, without the parser's state that follows it."""
    text = " ".join(message.partition("<state>")[0].split())
    return text if len(text) <= 300 else text[:300] + "..."
