"""Answers to lm-evaluation-harness's questions equal those by whole forward passes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from harness_world import BOS, EOS, FAMILIES, Naive, model_folder, small, text_of
from tolerances import CROSS_PATH_FLOAT32
from yocolm.engine.outputs import RequestOutput
from yocolm.errors import RequestError
from yocolm.eval.harness import Span, TextModel

LENGTH = 128


class World:
    """A checkpoint, and its scores by the definition."""

    def __init__(self, folder: Path, name: str, bos: bool = False) -> None:
        self.folder = model_folder(folder, name, bos)
        self.naive = Naive(self.folder, name, LENGTH, bos)

    def open(self, **settings: Any) -> TextModel:
        return small(self.folder, LENGTH, **settings)


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bos"])
def yoco(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("model"), "yoco-fla-gret-tiny", request.param)


def questions(naive: Naive) -> list[tuple[str, str]]:
    """Choices of shared contexts, contexts longer than the model, and greedy continuations."""
    pairs = []
    for seed, words in enumerate((1, 3, 9, 20, 33, 60)):
        context = text_of(words, seed)
        pairs += [(context, f" {text_of(1 + choice, 100 + choice)}") for choice in range(4)]
        pairs.append((context, naive.text(naive.greedy(context, 1))))
    return pairs


def close(got: float, wanted: float) -> bool:
    """Sums of tens of logprobs."""
    return abs(got - wanted) < 10 * CROSS_PATH_FLOAT32


def test_loglikelihood_equals_whole_forward_passes(world: World) -> None:
    pairs = questions(world.naive)
    answers = world.open().loglikelihood(pairs)
    wanted = [world.naive.loglikelihood(*pair) for pair in pairs]
    assert all(close(a[0], b[0]) for a, b in zip(answers, wanted, strict=True))
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in wanted]
    assert {greedy for _, greedy in wanted} == {True, False}
    longest = max(len(world.naive.encode("".join(pair))) for pair in pairs)
    assert longest > LENGTH + 20, "no context was cut"


def test_greedy_is_what_is_so_in_every_token(world: World) -> None:
    naive, context = world.naive, text_of(4, 6)
    before, drawn = naive.encode(context), naive.greedy(context, 3)
    assert len(drawn) == 3
    first = (drawn[0] + 1) % 256
    second = int(naive.logits([*before, first])[-1].argmax())
    unlikely = (drawn[2] + 1) % 256
    asked = [drawn, [first, second], [*drawn[:2], unlikely]]
    spans = [Span(before + after, len(before)) for after in asked]
    answers = dict(world.open()._scores(spans))
    assert [answers[index][1] for index in range(3)] == [True, False, False]


@pytest.mark.parametrize("tokens", [1, 5, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH, 300])
def test_documents_are_scored_in_windows(yoco: World, tokens: int) -> None:
    text = yoco.naive.text(yoco.naive.encode(text_of(200, tokens))[:tokens])
    others = ["", text_of(7, 1)]
    got = yoco.open().loglikelihood_rolling([others[0], text, others[1]])
    wanted = [yoco.naive.rolling(one) for one in (others[0], text, others[1])]
    assert all(map(close, got, wanted)), (got, wanted)


def test_documents_are_scored_by_every_family(world: World) -> None:
    texts = [text_of(words, words) for words in (2, 40, 90)]
    got = world.open().loglikelihood_rolling(texts)
    assert all(map(close, got, map(world.naive.rolling, texts)))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 9, 14, 15, 40])
def test_windows_predict_every_token_once_from_the_most_there_is(
    yoco: World, length: int, count: int
) -> None:
    model = yoco.open()
    model.max_length = length
    tokens = list(range(10, 10 + count))
    stream, predicted = [BOS, *tokens], []
    for span in model.windows(tokens):
        assert len(span.tokens) <= length + 1
        first = len(predicted) + 1  # in the stream
        after = span.tokens[span.start :]
        assert after == stream[first : first + len(after)]
        assert span.tokens == stream[max(0, first + len(after) - length - 1) : first + len(after)]
        predicted += after
    assert predicted == tokens


def test_windows_are_those_of_the_harness(yoco: World) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    model = yoco.open()
    for length in (1, 3, 8):
        model.max_length = length
        for count in range(20):
            tokens = list(range(count))
            pairs = utils.get_rolling_token_windows(tokens, BOS, length, 1)
            theirs = [utils.make_disjoint_window(pair) for pair in pairs]
            ours = [(s.tokens[: s.start], s.tokens[s.start :]) for s in model.windows(tokens)]
            assert ours == theirs


def spelled(model: TextModel, span: Span) -> tuple[list[str], list[str]]:
    pieces = [model.tokenizer.token_string(token) or "" for token in span.tokens]
    return pieces[: span.start], pieces[span.start :]


@pytest.mark.parametrize(
    ("context", "continuation", "before", "after"),
    [
        ("on", " the", ["o", "n"], ["Ġthe"]),
        ("on ", "the", ["o", "n"], ["Ġthe"]),  # a space belongs to what follows
        ("on \n ", "x", ["o", "n"], ["Ġ", "Ċ", "Ġ", "x"]),
        ("a", "nd", ["a"], ["d"]),  # encoded together, cut behind as many tokens as before
        ("th", "e", ["th"], ["e"]),  # of "the", one token, none would be left
        ("", "the", ["<s>"], ["the"]),
        ("", "<s>the", ["<s>"], ["the"]),
        ("", "", ["<s>"], []),
        (" ", "the", ["<s>"], ["Ġthe"]),
        ("<s>on", " a", ["<s>", "o", "n"], ["Ġ", "a"]),
        ("on", "", ["o", "n"], []),
    ],
)
def test_where_a_continuation_begins(
    yoco: World, context: str, continuation: str, before: list[str], after: list[str]
) -> None:
    model = yoco.open()
    got = spelled(model, model.encode_pair(context, continuation))
    wanted = ["<s>"] * (yoco.naive.bos and before[0] != "<s>") + before
    assert got == (wanted, after)


def test_nothing_is_added_to_a_text_that_begins_with_bos(yoco: World) -> None:
    model = yoco.open()
    inner: Any = model.tokenizer
    inner.inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    plain = model.encode("on", add_special_tokens=False)
    assert model.encode("on") == [BOS, *plain, EOS]
    assert model.encode("<s>on") == [BOS, *plain]


def test_nothing_is_certain_and_nothing_before_is_bos(yoco: World) -> None:
    model, naive = yoco.open(), yoco.naive
    empty, first, nothing = model.loglikelihood([("", ""), ("", "the cat"), ("the", "")])
    assert empty == nothing == (0.0, True)
    after = naive.tokenizer.encode("the cat", add_special_tokens=False).ids
    wanted = naive.score([BOS], after)
    assert close(first[0], wanted[0]) and first[1] == wanted[1]


def test_the_longest_continuation_and_one_token_more(yoco: World) -> None:
    model = yoco.open()
    whole = "x" * LENGTH
    (score,) = model.loglikelihood([("the", whole)])
    before, after = yoco.naive.encode("the"), yoco.naive.encode("the" + whole)
    after = after[len(before) :]
    assert len(after) == LENGTH
    assert close(score[0], yoco.naive.score(before, after)[0])
    with pytest.raises(RequestError, match=f"continuation of {LENGTH + 1} tokens"):
        model.loglikelihood([("the", " a"), ("the", whole + "x")])


def test_choices_share_their_context(world: World) -> None:
    contexts = [text_of(18, seed) for seed in range(5)]
    pairs = [(context, f" {text_of(2, choice)}") for choice in range(4) for context in contexts]
    shared, alone = world.open(), world.open(enable_prefix_caching=False)
    answers, wanted = shared.loglikelihood(pairs), alone.loglikelihood(pairs)
    assert all(close(a[0], b[0]) and a[1] == b[1] for a, b in zip(answers, wanted, strict=True))
    # All but one choice of each find the full pages before the last token of the context.
    lengths = [len(world.naive.encode(context)) for context in contexts]
    found = sum(3 * (length // 16 * 16 if length % 16 else length - 16) for length in lengths)
    assert shared.cached_tokens >= found > 0 == alone.cached_tokens


def test_examples_that_all_begin_with_are_computed_once(world: World) -> None:
    examples = text_of(12, 1)
    count = len(world.naive.encode(examples)) // 16 * 16
    assert count >= 32
    pairs = [(f"{examples} {text_of(3, seed)} {seed}", " the") for seed in range(9)]
    model = world.open(max_num_batched_tokens=2048)  # all would run in the same step
    answers = model.loglikelihood(pairs)
    assert model.cached_tokens >= 9 * count
    wanted = [world.naive.loglikelihood(*pair) for pair in pairs]
    assert all(close(a[0], b[0]) for a, b in zip(answers, wanted, strict=True))


def test_the_same_question_is_computed_once(yoco: World) -> None:
    model = yoco.open()
    asked = [("the cat", " sat"), ("the cat", " sat"), ("the ", "cat sat"), ("the", " cat sat")]
    answers = model.loglikelihood(asked)
    assert model.prompt_tokens == 2 * len(yoco.naive.encode("the cat sat"))
    assert answers[0] == answers[1] and answers[2] == answers[3]


def test_answers_are_told_as_they_come_and_returned_in_order(yoco: World) -> None:
    model = yoco.open(batch_size=1)
    pairs = [(text_of(words, words), " the") for words in (3, 30, 9, 1, 17, 2, 8, 5)]
    told: dict[int, tuple[float, bool]] = {}
    told_before: list[int] = []
    run = model._run

    def counted(prompts: Any, params: Any) -> list[RequestOutput]:
        told_before.append(len(told))
        return run(prompts, params)

    model._run = counted
    answers = model.loglikelihood(pairs, told.__setitem__)
    assert answers == [told[index] for index in range(len(pairs))]
    assert told_before[0] == 0 and told_before[-1] > 0, "all were told at the end"
    totals: dict[int, float] = {}
    texts = ["", text_of(80, 1), text_of(3, 2)]
    assert model.loglikelihood_rolling(texts, totals.__setitem__) == [totals[i] for i in range(3)]
    assert model.loglikelihood([]) == model.loglikelihood_rolling([]) == []


def test_fast_prefill_changes_nothing(world: World) -> None:
    pairs = questions(world.naive)
    texts = [text_of(words, words) for words in (4, 50, 80)]
    prompts = [(text_of(words, 7 * words), {"max_gen_toks": 9}) for words in (1, 12, 50)]
    found = []
    for fast in (True, False):
        model = world.open(fast_prefill=fast)
        rows = count_rows(model)
        scores = model.loglikelihood(pairs)
        counted = sum(rows)
        found.append(
            (scores, model.loglikelihood_rolling(texts), model.generate_until(prompts), counted)
        )
    (fast, documents, written, few), (slow, all_documents, all_written, many) = found
    assert all(close(a[0], b[0]) and a[1] == b[1] for a, b in zip(fast, slow, strict=True))
    assert all(map(close, documents, all_documents))
    assert written == all_written
    assert few < many / 2, "fast prefill was not on, or not off"


def count_rows(model: TextModel) -> list[int]:
    """Rows that go through the second half, a number for each step from now on."""
    rows: list[int] = []
    runner: Any = model.llm.engine.runner
    read = runner.model.read

    def counted(x: torch.Tensor, kv: Any, batch: Any) -> torch.Tensor:
        rows.append(len(x))
        return read(x, kv, batch)

    runner.model.read = counted
    return rows
