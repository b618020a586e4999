"""Routes beside generation: models, embeddings, tokens, health and metrics."""

from __future__ import annotations

import base64
import struct
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from yocolm import __version__
from yocolm.chat import encode_chat
from yocolm.engine.sampling_params import PoolingParams
from yocolm.server import metrics
from yocolm.server.chat import extra_variables, render
from yocolm.server.completions import prompts_of
from yocolm.server.errors import ApiError, unavailable
from yocolm.server.loop import Urgency
from yocolm.server.protocol import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from yocolm.server.service import Service, off_loop, request_id_of
from yocolm.tokenizer import Tokenizer


async def models(service: Service, request: Request) -> Response:
    """The names of the model."""
    cards = [_card(service, name) for name in service.model_names]
    return JSONResponse({"object": "list", "data": cards})


async def model(service: Service, request: Request) -> Response:
    """One of the names."""
    name = request.path_params["name"]
    service.check_model(name)
    return JSONResponse(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "yocolm",
        "root": service.model_names[0],
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }


async def embeddings(service: Service, request: Request) -> Response:
    """Final hidden states of prompts, pooled."""
    body = await service.read(request, EmbeddingRequest, generates=True)
    answer_id = request_id_of(request, "embd-")
    prompts = prompts_of(body.input)
    normalize = body.normalize is not False
    pooling = body.pooling or service.settings.pooling
    params = PoolingParams(pooling_type=pooling.upper(), normalize=normalize)
    renamed = {"prompt": "input"}
    jobs = await service.jobs(
        request,
        answer_id,
        prompts,
        params,
        EmbeddingRequest.model_fields,
        renamed=renamed,
        urgency=Urgency(body.priority or 0),
    )
    async with service.answering(request, jobs) as box:
        outputs = await box.take_all()
    count = sum(len(job.ids) for job in jobs)

    def answer() -> Response:
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _encoded(output.embedding or [], body.encoding_format),
            }
            for index, output in enumerate(outputs)
        ]
        told = {"id": answer_id, "object": "list", "data": data, "model": body.model}
        return JSONResponse({**told, "usage": {"prompt_tokens": count, "total_tokens": count}})

    return await off_loop(sum(len(output.embedding or ()) for output in outputs), answer)


def _encoded(values: list[float], form: str | None) -> list[float] | str:
    if form != "base64":
        return values
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _tokenizer(service: Service) -> Tokenizer:
    if service.engine.tokenizer is None:
        raise ApiError("this model has no tokenizer: send token ids")
    return service.engine.tokenizer


async def tokenize(service: Service, request: Request) -> Response:
    """Text, or a conversation, to token ids."""
    body = await service.read(request, TokenizeRequest)
    tokenizer = _tokenizer(service)
    if body.messages is not None:
        opens = body.add_generation_prompt is not False
        variables = extra_variables(body.chat_template_kwargs)
        text = await render(
            service, body.messages, body.tools, add_generation_prompt=opens, variables=variables
        )
        ids = await off_loop(len(text), lambda: encode_chat(tokenizer, text))
    else:
        prompt, special = body.prompt or "", body.add_special_tokens is not False
        ids = await off_loop(len(prompt), lambda: tokenizer.encode(prompt, special))

    def answer() -> Response:
        told: dict[str, Any] = {"count": len(ids), "max_model_len": service.engine.max_model_len}
        told["tokens"] = ids
        if body.return_token_strs:
            told["token_strs"] = [tokenizer.token_string(token) for token in ids]
        return JSONResponse(told)

    return await off_loop(len(ids), answer)


async def detokenize(service: Service, request: Request) -> Response:
    """Token ids to text, special tokens written out."""
    body = await service.read(request, DetokenizeRequest)
    tokenizer, vocab = _tokenizer(service), service.engine.config.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < vocab), None)
    if wrong is not None:
        raise ApiError(
            f"tokens holds {wrong}, which is outside the vocabulary: give 0 to {vocab - 1}",
            param="tokens",
        )
    text = await off_loop(len(body.tokens), lambda: tokenizer.decode(body.tokens, False))
    return JSONResponse({"prompt": text})


async def health(service: Service, request: Request) -> Response:
    """Whether the engine lives."""
    if not service.loop.alive:
        raise unavailable(f"the engine has stopped: {service.loop.death}")
    return JSONResponse({"status": "ok"})


async def ready(service: Service, request: Request) -> Response:
    """Whether new requests are taken."""
    if not service.loop.ready:
        why = "it is shutting down" if service.loop.draining else "the engine has stopped"
        raise unavailable(f"not ready: {why}")
    return JSONResponse({"status": "ready"})


async def version(service: Service, request: Request) -> Response:
    """The version of yocolm."""
    return JSONResponse({"version": __version__})


async def show_metrics(service: Service, request: Request) -> Response:
    """Metrics in Prometheus' text form."""
    return Response(service.telemetry.registry.render(), media_type=metrics.CONTENT_TYPE)
