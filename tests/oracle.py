"""Something that answers like an ``LLM`` by looking for the answer in its prompt's text."""

import re
from collections.abc import Callable
from typing import Any

from yocolm.chat import load_chat_template
from yocolm.engine.outputs import CompletionOutput, RequestOutput
from yocolm.engine.sampling_params import SamplingParams
from yocolm.models.registry import BUNDLED
from yocolm.tokenizer import Tokenizer

MAGIC = "The special magic number for"


def find(text: str) -> str:
    """What the default template's last question asks for, links followed."""
    key = re.findall(r"special magic number for ([^?]*?) is\Z|number for ([^?.]*)\?", text)[-1]
    return follow(text, next(filter(None, key)))


def follow(text: str, key: str) -> str:
    while True:
        link = re.search(rf"{MAGIC} {key} is the same as the one for (.*?)\.", text)
        if link is None:
            break
        key = link.group(1)
    found = re.search(rf"{MAGIC} {key} is (\d+)\.", text)
    return found.group(1) if found else "not there"


class Oracle:
    """Answers every prompt by ``answer`` (of its text); keeps prompts and parameters."""

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[str], str]) -> None:
        self.tokenizer, self.answer = tokenizer, answer
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.texts: list[str] = []

    def generate(self, prompts: Any, sampling_params: Any = None) -> list[RequestOutput]:
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            self.prompts.append(ids)
            self.params.append(sampling_params)
            self.texts.append(text)
            answer = CompletionOutput(0, self.answer(text), [], finish_reason="stop")
            outputs.append(RequestOutput("0", None, ids, None, [answer], True))
        return outputs

    def chat_prompt(self, messages: Any) -> Any:
        return {"prompt": load_chat_template(BUNDLED).render(messages)}

    def chat_params(self, params: SamplingParams) -> SamplingParams:
        params.stop = ["<|turn-end|>"]
        return params
