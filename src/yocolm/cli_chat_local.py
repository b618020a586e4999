"""`yocolm chat` with a model in this process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from yocolm.cli_chat import Message, Piece
from yocolm.cli_generate import model_defaults
from yocolm.engine.llm import LLM
from yocolm.engine.sampling_params import RequestOutputKind, SamplingParams
from yocolm.errors import NumericsError


class InProcess:
    """Answers with the engine, one conversation at a time."""

    def __init__(self, arguments: argparse.Namespace, sampling: Mapping[str, Any]) -> None:
        model = arguments.model or "bundled"
        values = {**model_defaults(model, sampling), **sampling}
        params = SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
        self._llm = LLM(model, dtype=arguments.dtype, device=arguments.device)
        self._params = self._llm.chat_params(params)
        self._llm.chat_prompt([{"role": "user", "content": "Hi"}])  # now, if it cannot chat

    def answer(self, messages: list[Message]) -> Iterator[Piece]:
        engine, tokens = self._llm.engine, 0
        engine.add_request("chat", self._llm.chat_prompt(messages), self._params)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.error is not None:
                        raise NumericsError(output.error)
                    for sample in output.outputs:
                        tokens += len(sample.token_ids)
                        yield Piece(sample.text, tokens)
        finally:
            engine.abort("chat")
