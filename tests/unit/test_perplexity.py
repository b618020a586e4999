"""Bits per byte against a computation without windows, batches or buckets."""

import copy
import json
import math
from pathlib import Path

import pytest
import tokenizers
import torch

from yocolm.config import CrossConfig, LlamaConfig, RetentionConfig, RopeConfig, YocoConfig
from yocolm.errors import NumericsError, RequestError
from yocolm.eval import perplexity as module
from yocolm.eval.perplexity import Text, read_text, score, tokenise, windows
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.llama import Llama
from yocolm.models.registry import load_tokenizer
from yocolm.models.yoco import Yoco
from yocolm.tokenizer import JsonTokenizer

VOCAB = 31


@pytest.fixture(scope="module", params=["yoco", "llama"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    rope = RopeConfig(10000.0, interleaved=True, inclusive=True)
    if request.param == "yoco":
        mixer, cross = RetentionConfig(2, 8, rope), CrossConfig(2, 1, 8, rope)
        built = Yoco(YocoConfig(VOCAB, 16, 32, 2, 1, mixer, cross, initializer_range=0.5))
    else:
        plain = RopeConfig(10000.0, interleaved=False, inclusive=False)
        built = Llama(LlamaConfig(VOCAB, 16, 32, 2, 2, 1, 8, plain, initializer_range=0.5))
    built.init_weights(seed=3)
    return built.eval()


def random_text(tokens: int, prefix: int | None, bos: int | None = None) -> Text:
    ids = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    sizes = [1 + i % 3 for i in range(tokens)]
    return Text(ids, sizes, sum(sizes), prefix, bos)


@torch.no_grad()
def loss_at(model: torch.nn.Module, history: list[int], target: int) -> float:
    """-log p(target | history), one token at a time."""
    hidden = model(Batch.packed(torch.tensor(history), [len(history)]), DenseState())
    logits = model.logits(hidden[-1:])  # type: ignore[operator]
    return -float(logits.double().log_softmax(-1)[0, target])


def naive(
    model: torch.nn.Module, text: Text, context: int, stride: int
) -> tuple[float, int, dict[int, list[tuple[float, int]]]]:
    """(total nll, tokens, {position: [(nll, bytes)]}) by the definition, window by window."""
    stream = ([] if text.prefix is None else [text.prefix]) + list(text.token_ids)
    sizes = list(text.token_bytes) if text.prefix is not None else list(text.token_bytes)[1:]
    by_position: dict[int, list[tuple[float, int]]] = {}
    total, scored, start = 0.0, 0, 0
    while scored < len(stream) - 1:
        stop = min(start + context, len(stream) - 1)
        for i in range(start, stop):
            history = stream[start : i + 1]
            if text.bos is not None:
                history[0] = text.bos
            nll = loss_at(model, history, stream[i + 1])
            by_position.setdefault(i - start, []).append((nll, sizes[i]))
            if i >= scored:
                total += nll
        scored = stop
        start += stride
    return total, scored, by_position


@pytest.mark.parametrize(("prefix", "bos"), [(0, None), (None, None), (7, 7)])
@pytest.mark.parametrize(
    ("tokens", "context", "stride"), [(2, 8, 4), (9, 8, 8), (40, 8, 3), (150, 100, 50), (33, 16, 1)]
)
def test_score_agrees_with_the_definition(
    model: torch.nn.Module,
    tokens: int,
    context: int,
    stride: int,
    prefix: int | None,
    bos: int | None,
) -> None:
    text = random_text(tokens, prefix, bos)
    total, scored, by_position = naive(model, text, context, stride)
    result = score(model, text, context=context, stride=stride, batch_size=3)
    assert result.tokens == scored == tokens - (prefix is None)
    assert result.first_token_scored == (prefix is not None)
    assert result.nll_per_token == pytest.approx(total / scored, abs=1e-4)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / text.num_bytes, abs=1e-4)
    assert [b.start for b in result.by_position] == (
        [0, 64] if context == 100 and tokens > 99 else [0]
    )
    for bucket in result.by_position:
        pairs = [pair for p in range(bucket.start, bucket.stop) for pair in by_position[p]]
        nll = sum(nll for nll, _ in pairs)
        assert bucket.tokens == len(pairs)
        assert bucket.nll_per_token == pytest.approx(nll / len(pairs), abs=1e-4)
        bits = nll / math.log(2) / sum(size for _, size in pairs)
        assert bucket.bits_per_byte == pytest.approx(bits, abs=1e-4)


def test_logits_in_blocks_change_nothing(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_text(200, 0)
    whole = score(model, text, context=64, stride=32)
    monkeypatch.setattr(module, "_FIRST_LOGITS_ROWS", 1)
    monkeypatch.setattr(module, "_LOGITS_ELEMENTS", 7 * VOCAB)
    blocked = score(model, text, context=64, stride=32)
    assert blocked.nll_per_token == pytest.approx(whole.nll_per_token, rel=1e-6)


def test_windows_score_every_input_once() -> None:
    for num_inputs, context, stride in [
        (1, 4, 2),
        (4, 4, 2),
        (5, 4, 2),
        (103, 10, 7),
        (10, 10, 10),
    ]:
        seen = []
        for start, stop, new in windows(num_inputs, context, stride):
            assert start <= new < stop <= min(start + context, num_inputs)
            seen += range(new, stop)
        assert seen == list(range(num_inputs))


def byte_tokenizer() -> JsonTokenizer:
    """Bytes as tokens, with one special token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["</s>"])
    return JsonTokenizer(inner, eos_token_ids=(256,))


def test_tokens_stand_for_all_bytes() -> None:
    text = tokenise(byte_tokenizer(), "a é€\r\n</s>z")
    assert text.num_bytes == 3 + 2 + 3 - 1 + 2 + 4 + 1
    assert sum(text.token_bytes) == text.num_bytes
    assert text.token_bytes[2:4] == [0, 2]  # the second byte of é completes it
    assert (text.prefix, text.bos) == (256, None)


def test_windows_begin_with_bos_where_the_tokenizer_adds_it() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.inner.add_special_tokens(["<s>"])
    assert tokenise(tokenizer, "ab").bos is None
    tokenizer.bos_token_id = 257  # named, but not put before texts
    assert (tokenise(tokenizer, "ab").prefix, tokenise(tokenizer, "ab").bos) == (257, None)
    tokenizer.inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 257), ("</s>", 256)]
    )
    text = tokenise(tokenizer, "ab")
    assert (text.prefix, text.bos, len(text.token_ids)) == (257, 257, 2)


def test_the_bundled_tokenizer_adds_no_bos() -> None:
    tokenizer = load_tokenizer("bundled")
    assert tokenizer is not None and tokenizer.opening() == []


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.inner.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(RequestError, match="at character 2"):
        tokenise(tokenizer, "abCd")


def test_bad_input_is_named(model: torch.nn.Module, tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    with pytest.raises(RequestError, match="byte 3 is 0xe9"):
        read_text(tmp_path / "latin1")
    for context, stride in [(4, 5), (4, 0)]:
        with pytest.raises(RequestError, match=f"stride is {stride}"):
            score(model, random_text(9, 0), context=context, stride=stride)
    with pytest.raises(RequestError, match="batch size is 0"):
        score(model, random_text(9, 0), context=4, stride=2, batch_size=0)
    with pytest.raises(RequestError, match="too short"):
        score(model, random_text(1, None), context=4, stride=2)
    with pytest.raises(RequestError, match="no tokenizer"):
        module.perplexity("random:160M", Path(__file__))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error(model: torch.nn.Module, value: float) -> None:
    text = random_text(40, 0)
    broken = copy.deepcopy(model)
    ids = list(text.token_ids)
    last = max(set(ids[:-1]) - {0}, key=ids.index)  # the token that is new the latest
    embeddings = broken.get_parameter("embed_tokens.weight")
    with torch.no_grad():
        embeddings[last] = value
    at = ids.index(last) + 1  # behind the prefix
    start = next(s for s in range(0, 40, 4) if s <= at < s + 8)
    assert start > 0
    with pytest.raises(NumericsError, match=f"window of tokens {start} to .*check its weights"):
        score(broken, text, context=8, stride=4, batch_size=3)


def test_a_perplexity_above_all_floats_is_left_out() -> None:
    result = module.Perplexity(900.0, 800.0, 1, 1, 8, 4, True)
    assert result.perplexity_per_token is None
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["nll_per_token"] == 800.0
