"""What lm-evaluation-harness asks of a model, answered by the engine: log-likelihoods, log-
likelihoods of whole documents in windows, and continuations.

Nothing of that package is needed here (`harness_tasks.py` has the adapter), but its rules are kept,
those of its Hugging Face model, so that scores agree: where a context ends and its continuation
begins, what stands before an empty context, what is cut from texts that are too long.

Continuations of one context (the choices of a question) share what was computed for it. They go to
the engine in waves: one of each context, then the others, which find it in the prefix cache. What
all requests begin with, such as examples, is computed before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

from yocolm.engine.llm import LLM
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.sampling_params import SamplingParams
from yocolm.errors import NumericsError, RequestError
from yocolm.eval.harness_generation import generation_params
from yocolm.models.registry import load_config
from yocolm.tokenizer import Tokenizer

BATCHES = 4  # how many times what runs at once goes to the engine together
Progress = Callable[[str, int, int], None]  # what is done, how many of it, of how many
Answer = TypeVar("Answer")


class Span(NamedTuple):
    """Tokens, of which those from ``start`` (at least 1) on are to be scored."""

    tokens: list[int]
    start: int


def open_model(
    model: str,
    *,
    max_length: int | None = None,
    batch_size: int | None = None,
    **settings: Any,
) -> LLM:
    """An engine for scoring: it takes ``max_length`` tokens (the model's own limit if None) and one
    more, which is predicted and never read.

    ``batch_size``: sequences at once. ``settings`` as for `LLM`.
    """
    length = load_config(model).max_position_embeddings if max_length is None else max_length
    return LLM(model, max_model_len=length + 1, max_num_seqs=batch_size, **settings)


class TextModel:
    """A model as a benchmark sees it: text in, numbers and text out.

    Args:
        llm: as `open_model` makes it. ``max_length``, the tokens a text may have behind which
            something is predicted, is one less than its ``max_model_len``.
        seed: of continuations that are drawn; the same text gets the same one whatever else is
            asked.
        progress: called as answers come.

    Raises RequestError for a model without a tokenizer.
    """

    def __init__(self, llm: LLM, seed: int = 0, progress: Progress | None = None) -> None:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise RequestError("the model has no tokenizer; tasks are texts, so they need one")
        self.llm, self.seed = llm, seed
        self.tokenizer: Tokenizer = tokenizer
        self.max_length = llm.engine.max_model_len - 1
        self.cached_tokens = 0  # that the prefix cache has spared
        self.prompt_tokens = 0  # all that were asked
        self._progress = progress
        settings, bos = llm.engine.settings, tokenizer.bos_token_id
        self._shares = settings.prefix_caching
        self._page = settings.page_size
        self._width = llm.engine.scheduler.max_num_seqs
        self._prefix = tokenizer.eos_token_id if bos is None else bos
        self._prefix_text = ""
        if self._prefix is not None:
            self._prefix_text = tokenizer.decode([self._prefix], skip_special_tokens=False)

    # Texts and tokens

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: BOS, else an end of text."""
        if self._prefix is None:
            raise RequestError(
                "the tokenizer names neither a BOS nor an EOS token, and a text without a context "
                "needs one before it: name one in tokenizer_config.json"
            )
        return self._prefix

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; none is added to a text that begins with BOS spelled out, as of a chat."""
        spelled = bool(self._prefix_text) and text.startswith(self._prefix_text)
        return self.tokenizer.encode(text, add_special_tokens and not spelled)

    def encode_pair(self, context: str, continuation: str) -> Span:
        """The tokens of both, the continuation's scored.

        The two are encoded together and cut behind as many tokens as the context has alone; spaces
        at its end count to the continuation. The context's own tokens stand before the cut.
        """
        text = context.rstrip()
        continuation = context[len(text) :] + continuation
        if not context:
            ids = self.encode(continuation, add_special_tokens=False)
            if ids[:1] == [self.prefix_token_id]:
                return Span(ids, 1)
            return Span([self.prefix_token_id, *ids], 1)
        before = self.encode(text)
        after = self.encode(text + continuation)[len(before) :]
        if not after and continuation:  # it has melted into the context's last token
            after = self.encode(continuation, add_special_tokens=False)
        before = before or [self.prefix_token_id]
        return Span(before + after, len(before))

    def windows(self, tokens: Sequence[int]) -> Iterator[Span]:
        """Windows over a document in which every token is predicted once, from the most there is.

        The first begins with ``prefix_token_id``. All have ``max_length`` tokens to predict from,
        but for a document that is shorter: of the last, only what is new is scored.
        """
        length = self.max_length
        stream = [self.prefix_token_id, *tokens]
        scored = 1  # the first that no window has predicted
        while scored < len(stream):
            stop = min(scored + length, len(stream))
            start = max(stop - length - 1, 0)
            yield Span(stream[start:stop], scored - start)
            scored = stop

    def fit(self, span: Span) -> Span:
        """Cut what does not fit from the left. RequestError if it would have been scored."""
        excess = len(span.tokens) - self.max_length - 1
        if excess <= 0:
            return span
        if excess >= span.start:
            raise RequestError(
                f"a continuation of {len(span.tokens) - span.start} tokens leaves no room for its "
                f"context within {self.max_length} tokens: raise the maximal length, or use "
                "another task"
            )
        return Span(span.tokens[excess:], span.start - excess)

    # What is asked

    def loglikelihood(
        self,
        pairs: Sequence[tuple[str, str]],
        done: Callable[[int, tuple[float, bool]], None] | None = None,
    ) -> list[tuple[float, bool]]:
        """Of each (context, continuation): the log-probability of the continuation, in nats, and
        whether each of its tokens is the likeliest. ``done`` gets every answer as it comes."""
        spans = [self.fit(self.encode_pair(*pair)) for pair in pairs]
        return self._collect("loglikelihood", len(pairs), self._scores(spans), done)

    def loglikelihood_rolling(
        self, texts: Sequence[str], done: Callable[[int, float], None] | None = None
    ) -> list[float]:
        """Of each text: the log-probability of all its tokens, in nats, in windows."""
        spans, owners = [], []
        for index, text in enumerate(texts):
            for span in self.windows(self.encode(text)):
                spans.append(span)
                owners.append(index)
        return self._collect(
            "loglikelihood_rolling", len(texts), self._sums(spans, owners, len(texts)), done
        )

    def generate_until(
        self,
        requests: Sequence[tuple[str, Mapping[str, Any]]],
        done: Callable[[int, str], None] | None = None,
    ) -> list[str]:
        """A continuation of each (context, generation arguments); see `generation_params`."""
        texts = self._texts(requests)
        return self._collect("generate_until", len(requests), texts, done)

    def _collect(
        self,
        what: str,
        count: int,
        found: Iterator[tuple[int, Answer]],
        done: Callable[[int, Answer], None] | None,
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        for index, answer in found:
            answers[index] = answer
            if done is not None:
                done(index, answer)
            if self._progress is not None:
                self._progress(what, len(answers), count)
        return [answers[index] for index in range(count)]

    # How it is computed

    def _scores(self, spans: Sequence[Span]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Log-probability of the scored tokens of each span, and whether all are the likeliest."""
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for index, span in enumerate(spans):
            if span.start == len(span.tokens):  # nothing is certain to follow
                yield index, (0.0, True)
            else:
                alike.setdefault((span.start, tuple(span.tokens)), []).append(index)
        indices = list(alike.values())
        wanted = [spans[same[0]] for same in indices]
        for wave in self._waves([span.tokens for span in wanted], [span.start for span in wanted]):
            outputs = self._run(
                [wanted[i].tokens for i in wave], [_scoring(wanted[i].start) for i in wave]
            )
            for i, output in zip(wave, outputs, strict=True):
                score = _score(output, wanted[i].start)
                for index in indices[i]:
                    yield index, score

    def _sums(
        self, spans: Sequence[Span], owners: Sequence[int], count: int
    ) -> Iterator[tuple[int, float]]:
        """The sum over the spans of each owner, as soon as all are known."""
        found: list[dict[int, float]] = [{} for _ in range(count)]
        left = [0] * count
        for owner in owners:
            left[owner] += 1
        yield from ((index, 0.0) for index in range(count) if not left[index])
        for at, (logprob, _) in self._scores(spans):
            owner = owners[at]
            found[owner][at] = logprob
            left[owner] -= 1
            if not left[owner]:  # in the order of the text, whatever came first
                yield owner, sum(found[owner][i] for i in sorted(found[owner]))

    def _texts(
        self, requests: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> Iterator[tuple[int, str]]:
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        seen: dict[str, int] = {}  # how often the same text was asked before
        end = self.tokenizer.eos_token_id
        eos = "" if end is None else self.tokenizer.decode([end], skip_special_tokens=False)
        for context, arguments in requests:
            repeat = seen[context] = seen.get(context, -1) + 1
            one = generation_params(
                arguments,
                max_length=self.max_length,
                eos=eos,
                seed=self.seed,
                context=context,
                repeat=repeat,
            )
            assert one.max_tokens is not None
            ids = self.encode(context) or [self.prefix_token_id]
            prompts.append(ids[-(self.max_length - one.max_tokens) :])
            params.append(one)
        for wave in self._waves(prompts, [len(ids) for ids in prompts]):
            outputs = self._run([prompts[i] for i in wave], [params[i] for i in wave])
            for i, output in zip(wave, outputs, strict=True):
                yield i, output.outputs[0].text

    def _waves(self, tokens: Sequence[list[int]], shared: Sequence[int]) -> Iterator[list[int]]:
        """Which of the requests to run together, longest first.

        The first ``shared`` tokens of each may be those of others: where that is worth it, one of
        those that share them runs before the others.
        """
        if self._shares:
            self._compute_common(tokens)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, count in enumerate(shared):
            groups.setdefault(tuple(tokens[index][:count]), []).append(index)
        ordered = sorted(groups.items(), key=lambda item: -max(len(tokens[i]) for i in item[1]))
        waits = [
            self._shares and len(group) > 1 and len(context) > self._page
            for context, group in ordered
        ]
        size = self._width if any(waits) else BATCHES * self._width
        for at in range(0, len(ordered), size):
            first: list[int] = []
            later: list[int] = []
            for (_, group), wait in zip(
                ordered[at : at + size], waits[at : at + size], strict=True
            ):
                cut = 1 if wait else len(group)
                first += group[:cut]
                later += group[cut:]
            yield first
            if later:
                yield later

    def _compute_common(self, tokens: Sequence[list[int]]) -> None:
        """Compute what all begin with, so that they find it in the prefix cache."""
        if len(tokens) < 3:
            return
        pairs = zip(min(tokens), max(tokens), strict=False)  # the two that differ first
        common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        common = common[: len(common) // self._page * self._page]
        if len(common) > 1:
            self._run([common], [_scoring(len(common) - 1)])

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        """Raises NumericsError for the first request that fails."""
        outputs = self.llm.generate(prompts, params)
        for output in outputs:
            if output.error is not None:
                raise NumericsError(
                    f"scoring a text of {len(output.prompt_token_ids)} tokens failed: "
                    f"{output.error}"
                )
            self.cached_tokens += output.num_cached_tokens
            self.prompt_tokens += len(output.prompt_token_ids)
        return outputs


def _scoring(start: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start, temperature=0.0
    )


def _score(output: RequestOutput, start: int) -> tuple[float, bool]:
    assert output.prompt_logprobs is not None
    total, greedy = 0.0, True
    scored = zip(output.prompt_token_ids[start:], output.prompt_logprobs[start:], strict=True)
    for token, entries in scored:
        assert entries is not None, "a token to be scored was not"
        total += entries[token].logprob
        greedy = greedy and entries[token].rank == 1
    return total, greedy
