"""An engine that says what a test wants it to say, and a small tokenizer to say it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import cast

import torch
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from spying import Spy
from tiny import FAMILIES
from yocolm.engine.engine import Engine
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.models.base import CausalLM
from yocolm.models.registry import build_model
from yocolm.tokenizer import JsonTokenizer

END = "</s>"
WORDS = ["he", "ll", "o", "w", "r", "d", "Ġ", "or", "ld", "ello", "Ġw", "Ġworld", "hello"]
MERGES = [("h", "e"), ("l", "l"), ("o", "r"), ("l", "d"), ("Ġ", "w")]


@cache
def tokenizer() -> JsonTokenizer:
    """Byte level: the end of text, all bytes, and a few longer pieces."""
    vocab = {END: 0}
    for word in (*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS):
        vocab.setdefault(word, len(vocab))
    inner = Inner(models.BPE(vocab=vocab, merges=MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    return JsonTokenizer(inner, None, (0,))


@cache
def _model() -> Spy:
    config = replace(FAMILIES["retention"], vocab_size=tokenizer().vocab_size)
    model = build_model(config, "cpu", torch.float32)
    init = model.init_weights
    assert callable(init)
    init(0)
    return Spy(model)


def spell(text: str) -> list[int]:
    """Token ids of a text, one for each byte."""
    chars = "".join(piece for piece, _ in tokenizer().inner.pre_tokenizer.pre_tokenize_str(text))
    return [_token(char) for char in chars]


def say(*pieces: str) -> list[int]:
    """One token for each of ``pieces``."""
    return [_token(piece.replace(" ", "Ġ")) for piece in pieces]


def _token(piece: str) -> int:
    token = tokenizer().inner.token_to_id(piece)
    assert token is not None, f"{piece!r} is no token"
    return token


def scripted_engine(tokens: Sequence[int], with_tokenizer: bool = True) -> Engine:
    """Draws ``tokens`` one after another, the same ones for all that draw in a step."""
    spy = _model()
    vocab, script = tokenizer().vocab_size, iter(tokens)

    def next_token(logits: Tensor) -> Tensor:
        ahead = torch.zeros_like(logits)
        ahead[:, next(script)] = 1000.0
        return ahead

    spy.after["logits"] = next_token
    return Engine(
        cast(CausalLM, spy),
        replace(FAMILIES["retention"], vocab_size=vocab),
        tokenizer() if with_tokenizer else None,
        EngineSettings(kv_memory="1MB", max_num_seqs=8, page_size=8),
        tokenizer().eos_token_ids,
    )


def stream(tokens: Sequence[int], params: SamplingParams) -> list[RequestOutput]:
    """Every output of a request that draws ``tokens``, the final one last."""
    engine = scripted_engine(tokens)
    engine.add_request("one", "hello", params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.check()
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs
