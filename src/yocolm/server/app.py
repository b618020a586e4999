"""The FastAPI application: routes, what every exchange passes through, errors, documentation."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from yocolm import __version__
from yocolm.chat import ChatTemplate
from yocolm.engine.engine import Engine
from yocolm.engine.sampling_params import SamplingParams
from yocolm.errors import ConfigError, RequestError
from yocolm.server import chat, completions, extra, page, protocol
from yocolm.server.errors import ApiError, ClientGone, failed
from yocolm.server.gate import REQUEST_ID, Gate
from yocolm.server.live import Live
from yocolm.server.loop import EngineLoop
from yocolm.server.params import DEFAULTS
from yocolm.server.service import Service
from yocolm.server.settings import ServerSettings
from yocolm.server.stream import PREDICTED_TTFT
from yocolm.server.telemetry import Telemetry
from yocolm.server.tools import TOOL_PARSERS

log = logging.getLogger("yocolm.server")
Handler = Callable[[Service, Request], Awaitable[Response]]

_GETS: dict[str, Handler] = {
    "/v1/models": extra.models,
    "/v1/models/{name:path}": extra.model,
    "/health": extra.health,
    "/ready": extra.ready,
    "/metrics": extra.show_metrics,
    "/version": extra.version,
    "/live.json": page.live_data,
}
_PAGES: dict[str, Handler] = {"/": page.page, **dict.fromkeys(page.ASSETS, page.asset)}
_POSTS: dict[str, tuple[Handler, type[BaseModel]]] = {
    "/v1/completions": (completions.completions, protocol.CompletionRequest),
    "/v1/chat/completions": (chat.chat_completions, protocol.ChatRequest),
    "/v1/embeddings": (extra.embeddings, protocol.EmbeddingRequest),
    "/tokenize": (extra.tokenize, protocol.TokenizeRequest),
    "/detokenize": (extra.detokenize, protocol.DetokenizeRequest),
}
_OPEN = ("/health", "/ready", "/metrics", "/version")  # without a key
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_SINCE = {"name": "since", "in": "query", "required": False, "schema": {"type": "number"}}
_SINCE["description"] = "'now' of the answer before, to be told only what is new"
_PARAMETERS = {"/v1/models/{name:path}": [_NAME], "/live.json": [_SINCE]}
_REF = "#/components/schemas/{model}"


def make_service(
    engine: Engine,
    template: ChatTemplate,
    settings: ServerSettings,
    model_name: str,
    generation_config: Mapping[str, Any] | None = None,
) -> Service:
    """An engine with all that its server shares. Its loop starts with the application.

    Raises ConfigError for settings that do not fit.
    """
    if settings.tool_parser not in TOOL_PARSERS:
        raise ConfigError(
            f"tool_parser={settings.tool_parser!r} is unknown; known: {', '.join(TOOL_PARSERS)}"
        )
    names = settings.served_model_name or (model_name,)
    telemetry = Telemetry(engine, names[0], settings.log_requests)
    capacity = engine.scheduler.max_num_seqs + settings.max_queue
    given = generation_config or {}
    defaults = {name: given[name] for name in DEFAULTS if given.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(
            f"generation_config.json of model {model_name}: {error}; correct the file, or start "
            "with --generation-config none"
        ) from error
    ends, usual = given.get("stop_strings") or (), given.get("max_new_tokens")
    if usual is not None and (type(usual) is not int or usual < 1):
        raise ConfigError(
            f"generation_config.json of model {model_name}: max_new_tokens is {usual!r}; it must "
            "be a whole number above 0; correct the file, or start with --generation-config none"
        )
    loop = EngineLoop(engine, telemetry, capacity)
    live = Live(loop, telemetry, settings, names)
    return Service(engine, loop, telemetry, live, template, settings, names, defaults, ends, usual)


def make_app(service: Service) -> FastAPI:
    """The application of a service; it starts and stops the engine's loop."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        try:
            yield
        finally:
            await service.loop.stop()

    app = FastAPI(
        title="yocolm",
        description="OpenAI-compatible API of a decoder-decoder language model.",
        version=__version__,
        lifespan=lifespan,
    )
    _add_routes(app, service)
    _handle_errors(app)
    _add_middleware(app, service)
    _describe_bodies(app, service.model_names)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    def add(path: str, handler: Handler, method: str, **more: Any) -> None:
        app.add_api_route(
            path,
            _endpoint(service, handler),
            methods=[method],
            name=handler.__name__,
            response_class=Response if path == "/metrics" else JSONResponse,
            description=handler.__doc__ or "",
            responses=_responses(path),
            openapi_extra=more or None,
        )

    for path, handler in _GETS.items():
        known = {"parameters": _PARAMETERS[path]} if path in _PARAMETERS else {}
        add(path, handler, "GET", **known)
    for path, handler in {**_GETS, **_PAGES}.items():
        methods = ["HEAD"] if path in _GETS else ["GET", "HEAD"]
        app.add_api_route(
            path, _endpoint(service, handler), methods=methods, include_in_schema=False
        )
    for path, (handler, body) in _POSTS.items():
        add(path, handler, "POST", requestBody=_described(body))


def _add_middleware(app: FastAPI, service: Service) -> None:
    settings = service.settings
    app.add_middleware(
        Gate,
        keys=settings.api_key,
        open_paths=(*_OPEN, *_PAGES, "/docs", "/redoc", "/openapi.json"),
        max_body=service.max_body,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, PREDICTED_TTFT, "retry-after"],
        )


def _describe_bodies(app: FastAPI, model_names: tuple[str, ...]) -> None:
    """Routes read bodies themselves, so that FastAPI knows nothing of their schemas."""
    plain_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        schema = plain_openapi()
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        parts.update(_schemas(model_names))
        return schema

    app.openapi = openapi


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    return endpoint


def _described(body: type[BaseModel]) -> dict[str, Any]:
    reference = {"$ref": _REF.format(model=body.__name__)}
    return {"required": True, "content": {"application/json": {"schema": reference}}}


def _responses(path: str) -> dict[int | str, dict[str, Any]]:
    """Every status that a route may answer with, so that clients can be generated and checked."""
    meanings = {400: "a field is wrong", 401: "no valid key", 404: "unknown", 413: "too large"}
    meanings |= {429: "the queue is full", 500: "the step failed", 503: "not available"}
    meanings |= {504: "it took too long"}
    if path in _OPEN:
        meanings = {503: meanings[503]}
    reference = {"$ref": _REF.format(model="ErrorAnswer")}
    content = {"application/json": {"schema": reference}}
    return {
        status: {"description": meaning, "content": content} for status, meaning in meanings.items()
    }


def _schemas(model_names: tuple[str, ...]) -> dict[str, Any]:
    bodies: list[Any] = [(body, "validation") for _, body in _POSTS.values()]
    bodies.append((protocol.TextPart, "validation"))
    _, schemas = models_json_schema(bodies, ref_template=_REF)
    for schema in schemas["$defs"].values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"type": "string", "enum": list(model_names)}
    text = {"type": ["string", "null"]}
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}}
        | {"param": text, "code": text},
    }
    answer = {"type": "object", "required": ["error"], "properties": {"error": error}}
    return {**schemas["$defs"], "ErrorAnswer": answer}


def _handle_errors(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body, error.status, error.headers)

    async def on_request_error(request: Request, error: Exception) -> Response:
        return await on_api_error(request, ApiError(str(error)))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        answer = await on_api_error(request, ApiError(message, error.status_code))
        answer.headers.update(error.headers or {})
        return answer

    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # never sent: there is no client

    async def on_bug(request: Request, error: Exception) -> Response:
        log.error(
            "unexpected error",
            exc_info=error,
            extra={"request_id": request.state.request_id},
        )
        error = failed("an unexpected error; see the server's log")
        # Outside the gate, which adds it elsewhere.
        headers = {**error.headers, REQUEST_ID: request.state.request_id}
        return JSONResponse(error.body, error.status, headers)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, on_gone)
    app.add_exception_handler(Exception, on_bug)
