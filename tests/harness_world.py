"""Tiny checkpoints with a tokenizer, and their scores by whole forward passes: those of
transformers where it has the model, else of our dense one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from torch import Tensor

import gemma_reference
from references import DATA, logits_of
from yocolm.engine.llm import LLM
from yocolm.eval.harness import TextModel, open_model
from yocolm.fields import write_json
from yocolm.models.registry import load_model

Logits = Callable[[list[int]], Tensor]  # [T, V] behind each token
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
BOS, EOS = 1, 2
VOCAB = 264
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n")]
GOLDEN = ("llama-tiny", "llama-bias-tiny", "yoco-fla-gret-tiny", "yoco-fla-swa-tiny")
GEMMA: dict[str, Any] = {
    "gemma3n": lambda **more: gemma_reference.gemma3n_config("wwfwwf", 2, **more),
    "gemma4": lambda **more: gemma_reference.gemma4_config("wwwfwwwf", 4, **more),
}
FAMILIES = (*GOLDEN, *GEMMA)
_WORDS = (
    "the a an and on then that cat sat mat of in hand sand other, naïve 日本 Tom's 42 ! ?".split()
)


def text_of(words: int, seed: int) -> str:
    """Words, with a space before each but the first."""
    return " ".join(random.Random(seed).choices(_WORDS, k=words))


def byte_tokenizer(bos: bool = False) -> tokenizers.Tokenizer:
    """Bytes behind four symbols, with four merges; ``bos``: it begins every text with <s>."""
    vocab = {name: index for index, name in enumerate(SPECIAL)}
    for piece in (*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)):
        vocab[piece] = len(vocab)
    assert len(vocab) == VOCAB
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
        )
    return inner


@cache
def _gemma(name: str) -> Any:
    fields = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
    return gemma_reference.build(GEMMA[name](**fields))


def model_folder(folder: Path, name: str, bos: bool = False) -> Path:
    """A checkpoint with the tokenizer, in ``folder``."""
    if name in GEMMA:
        _gemma(name).save_pretrained(folder)
    else:
        shutil.copytree(DATA / name, folder, dirs_exist_ok=True)
    byte_tokenizer(bos).save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    write_json(
        folder / "tokenizer_config.json", {**named, "tokenizer_class": "PreTrainedTokenizerFast"}
    )
    return folder


def reference_logits(folder: Path, name: str) -> Logits:
    if name in GEMMA:
        return lambda tokens: gemma_reference.logits(_gemma(name), tokens)
    if name.startswith("yoco"):
        ours, _ = load_model(str(folder), "float32")
        return lambda tokens: logits_of(ours, torch.tensor(tokens))
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return lambda tokens: _theirs(theirs, tokens)


@torch.no_grad()
def _theirs(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


def small(folder: Path, max_length: int | None = None, **settings: Any) -> TextModel:
    """The checkpoint in a small engine, whose chunks and pages are smaller than texts."""
    options = {"page_size": 16, "max_num_batched_tokens": 64, "kv_memory": "32MB", **settings}
    return TextModel(open_llm(folder, max_length, **options))


def open_llm(folder: Path, max_length: int | None = None, **settings: Any) -> LLM:
    return open_model(
        str(folder), max_length=max_length, **{"dtype": "float32", "device": "cpu", **settings}
    )


class Naive:
    """Scores by the definition, a whole forward pass for each request or token."""

    def __init__(self, folder: Path, name: str, max_length: int, bos: bool = False) -> None:
        self.logits, self.max_length, self.bos = reference_logits(folder, name), max_length, bos
        self.ends = (EOS, 3) if name.startswith("llama") else (EOS,)
        self.tokenizer = byte_tokenizer(bos)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=not text.startswith("<s>")).ids

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """[T, V] in float64, behind each token."""
        return self.logits(list(tokens)).double().log_softmax(-1)

    def score(self, before: list[int], after: list[int]) -> tuple[float, bool]:
        """The log-probability of ``after``, each token from all that fits before it."""
        inputs = (before + after)[:-1][-self.max_length :]
        rows = self.logprobs(inputs)[len(inputs) - len(after) :]
        picked = rows[range(len(after)), after]
        return float(picked.sum()), rows.argmax(-1).tolist() == after

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """``context`` ends in no space, and is not empty."""
        before = self.encode(context)
        return self.score(before, self.encode(context + continuation)[len(before) :])

    def rolling(self, text: str) -> float:
        """Each token from as much as its window leaves before it, windows counted by hand."""
        tokens = self.encode(text)
        total, length = 0.0, self.max_length
        for first in range(0, len(tokens), length):
            new = tokens[first : first + length]
            history = ([BOS, *tokens])[: first + len(new)][-length:]
            total += self.score(history[: len(history) - len(new) + 1], new)[0]
        return total

    def greedy(self, context: str, count: int) -> list[int]:
        """The likeliest tokens, until one that ends the text."""
        tokens = self.encode(context)[-(self.max_length - count) :]
        drawn: list[int] = []
        while len(drawn) < count and not (drawn and drawn[-1] in self.ends):
            drawn.append(int(self.logits(tokens + drawn)[-1].argmax()))
        return drawn

    def text(self, tokens: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=True))
