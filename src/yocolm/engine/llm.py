"""Offline inference with vLLM's names: ``LLM(model).generate(prompts, SamplingParams(...))``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import torch

from yocolm.chat import ChatTemplate, Messages, encode_chat, load_chat_template
from yocolm.engine.engine import Engine, Prompt, require_device
from yocolm.engine.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from yocolm.engine.sampling_params import (
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    end_turns,
)
from yocolm.engine.settings import EngineSettings
from yocolm.errors import ConfigError, RequestError
from yocolm.models.base import CausalLM
from yocolm.models.registry import (
    eos_token_ids,
    load_generation_config,
    load_model,
    load_tokenizer,
    resolve,
)


class LLM:
    """A model behind an engine.

    Args:
        model: folder, ``"bundled"``, Hugging Face id or ``"random:PRESET"``.
        dtype: "auto" (as saved), "float32" or "bfloat16".
        device: "auto", "cpu" or "cuda".
        seed: of the weights of ``random:PRESET``.
        skip_tokenizer_init: serve token ids only.
        settings: fields of ``EngineSettings``: max_num_batched_tokens, max_num_seqs, max_model_len,
            kv_memory, page_size, prompt_logprobs, fast_prefill, compile; in ``more`` the others,
            such as swap_space, policy, mean_tokens.
        enable_prefix_caching: keep what was computed for prompts that begin alike.
        calibrate: measure what steps cost, in seconds, unless this machine and model are known;
            None: where the policy is "traffic".
        enforce_eager: the same as ``compile="eager"``.
        per_layer_tables: "mapped" leaves tables of per-layer inputs in their file, "resident" loads
            them; see ``load_model``.

    Raises subclasses of YocolmError for what cannot be loaded or does not fit.
    """

    def __init__(
        self,
        model: str | Path = "bundled",
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        seed: int = 0,
        skip_tokenizer_init: bool = False,
        max_num_batched_tokens: int = EngineSettings.max_num_batched_tokens,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        kv_memory: int | str | None = None,
        page_size: int = EngineSettings.page_size,
        prompt_logprobs: str = "exact",
        fast_prefill: bool = True,
        compile: str = "auto",
        enforce_eager: bool = False,
        per_layer_tables: str = "mapped",
        enable_prefix_caching: bool = True,
        calibrate: bool | None = None,
        **more: Any,
    ) -> None:
        _check_names(more)
        settings = EngineSettings(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kv_memory=kv_memory,
            page_size=page_size,
            prompt_logprobs=cast(Any, prompt_logprobs),
            fast_prefill=fast_prefill,
            compile=cast(Any, "eager" if enforce_eager else compile),
            prefix_caching=enable_prefix_caching,
            **more,
        )
        source = resolve(model)
        module, config = load_model(
            source,
            dtype,
            require_device(device),
            seed,
            per_layer_tables=per_layer_tables,
            packed=settings.compile != "inductor",  # it knows plain matrices only
            show_progress=True,
        )
        tokenizer = None if skip_tokenizer_init else load_tokenizer(source)
        generation = load_generation_config(source)
        ends = eos_token_ids(config, generation, tokenizer)
        self._turn_ends: list[str] = generation.get("stop_strings") or []
        self.engine = Engine(cast(CausalLM, module), config, tokenizer, settings, ends)
        if settings.policy == "traffic" if calibrate is None else calibrate:
            self.engine.calibrate()
        self._folder = source.folder
        self._counter = 0

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's own; CheckpointError if its file is damaged."""
        return load_chat_template(self._folder)

    def get_tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts; results come in their order.

        Args:
            prompts: one prompt or several; each is text, token ids, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show progress on standard error.
            priority: of each prompt; lower goes first.

        Raises RequestError before anything runs if one of them cannot be served. A request that
        fails on the way has its ``error`` set.
        """
        listed = _as_list(prompts)
        params = _params_of(sampling_params, len(listed))
        with self._added(listed, params, priority) as ids:
            return self._finish(ids, use_tqdm)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the model's chat template.

        An answer ends at an end-of-text token, at ``stop`` of its parameters, and at the
        ``stop_strings`` of the model's generation_config.json unless ``ignore_eos``.

        Args:
            messages: a conversation (dictionaries with role and content), or a list of them.
            sampling_params, use_tqdm: as for ``generate``.
            chat_template, add_generation_prompt, continue_final_message, tools: as for
                ``ChatTemplate.render``.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.

        Raises RequestError before anything runs, also where the model has no chat template.
        """
        prompts = [
            self.chat_prompt(
                one,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for one in _conversations(messages)
        ]
        params = [self.chat_params(one) for one in _params_of(sampling_params, len(prompts))]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def chat_params(self, params: SamplingParams) -> SamplingParams:
        """Those of an answer in a chat: it also ends at generation_config.json's stop_strings."""
        return end_turns(params, self._turn_ends)

    def chat_prompt(self, messages: Messages, **options: Any) -> Prompt:
        """A conversation as a prompt, text and token ids; options are ``ChatTemplate.render``'s."""
        if self.engine.tokenizer is None:
            raise RequestError("chat needs a tokenizer, which this model does not have")
        text = self.chat_template.render(messages, **options)
        return {"prompt": text, "prompt_token_ids": encode_chat(self.engine.tokenizer, text)}

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt: its last token's final hidden state, or the mean over tokens.

        Raises RequestError before anything runs if one of the prompts cannot be served.
        """
        listed = _as_list(prompts)
        with self._added(listed, [pooling_params or PoolingParams()] * len(listed)) as ids:
            outputs = self._finish(ids, use_tqdm)
        return [
            EmbeddingRequestOutput(
                request_id=output.request_id,
                outputs=None if output.embedding is None else EmbeddingOutput(output.embedding),
                prompt_token_ids=output.prompt_token_ids,
                finished=output.finished,
                error=output.error,
            )
            for output in outputs
        ]

    @contextmanager
    def _added(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        priority: Sequence[int] | None = None,
    ) -> Iterator[list[str]]:
        """Queue requests; whatever interrupts leaves none of them behind."""
        ids: list[str] = []
        levels = [0] * len(prompts) if priority is None else list(priority)
        if len(levels) != len(prompts):
            raise RequestError(
                f"{len(levels)} priorities for {len(prompts)} prompts; give one for each"
            )
        try:
            for prompt, one, level in zip(prompts, params, levels, strict=True):
                while str(self._counter) in self.engine.scheduler.requests:
                    self._counter += 1
                request_id = str(self._counter)
                self._counter += 1
                if isinstance(one, SamplingParams):  # if not, the engine says so
                    one = replace(one, output_kind=RequestOutputKind.FINAL_ONLY)
                ids.append(request_id)  # first: whatever interrupts, it is aborted
                self.engine.add_request(request_id, prompt, one, priority=level)
            yield ids
        finally:
            for request_id in ids:
                self.engine.abort(request_id)

    def _finish(self, ids: list[str], show_progress: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        wanted = set(ids)  # requests may have been added to the engine directly as well
        while len(done) < len(ids):
            for output in self.engine.step():
                if output.finished and output.request_id in wanted:
                    done[output.request_id] = output
            if show_progress:
                print(f"\r{len(done)}/{len(ids)} requests", end="", file=sys.stderr, flush=True)
        if show_progress:
            print(file=sys.stderr)
        return [done[request_id] for request_id in ids]


def _conversations(messages: Messages | Iterable[Messages]) -> list[Messages]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(f"messages is {messages!r}; give a list of messages, each an object")
    listed: list[Any] = list(messages)
    return [listed] if listed and isinstance(listed[0], Mapping) else listed


def _check_names(settings: Iterable[str]) -> None:
    known = {item.name for item in fields(EngineSettings)}
    for name in settings:
        if name not in known:
            listed = ", ".join(sorted(known))
            raise ConfigError(f"{name!r} is no setting of an engine; known: {listed}")


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; give text, token ids, or a list of prompts")
    listed = list(prompts)
    if listed and all(isinstance(item, Integral) for item in listed):
        return [cast(Prompt, listed)]
    return cast(Any, listed)


def _params_of(
    params: SamplingParams | Iterable[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise RequestError(f"sampling_params is {params!r}; give SamplingParams, or one for each")
    listed = list(params)
    if len(listed) != count:
        raise RequestError(f"{len(listed)} sampling_params for {count} prompts; give one for each")
    return listed
