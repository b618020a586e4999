"""`yocolm serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import ssl
from pathlib import Path
from typing import Any

import yaml

from yocolm.chat import ChatTemplate, load_chat_template
from yocolm.engine.llm import LLM
from yocolm.errors import ConfigError, RequestError
from yocolm.models.registry import load_generation_config, resolve
from yocolm.server import logs
from yocolm.server.app import make_service
from yocolm.server.serve import bind, serve
from yocolm.server.settings import PREFIX, ServerSettings, gather

log = logging.getLogger("yocolm.server")
_ENGINE = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_memory", "page_size")
_ENGINE += ("compile", "num_checkpoints", "checkpoint_spacing", "mean_tokens", "swap_space")
_ENGINE += ("policy", "ttft_target", "tpot_target", "priority_aging")


def run(arguments: argparse.Namespace) -> int:
    config = arguments.config or os.environ.get(f"{PREFIX}CONFIG") or None
    file = {} if config is None else _read(Path(config))
    named = file.pop("model", None)
    settings = gather(vars(arguments), file, str(config))
    model = arguments.model or os.environ.get(f"{PREFIX}MODEL") or named or "bundled"
    logs.configure(settings.log_level, settings.log_format)
    _check_files(settings)
    source = resolve(model)
    engine = {name: getattr(settings, name) for name in _ENGINE}
    llm = LLM(
        model,
        dtype=settings.dtype,
        device=settings.device,
        prompt_logprobs=settings.prompt_logprobs,
        enforce_eager=settings.eager,
        enable_prefix_caching=settings.prefix_caching,
        calibrate=settings.calibrate,
        **{name: value for name, value in engine.items() if value is not None},
    )
    generation = load_generation_config(source) if settings.generation_config == "auto" else {}
    template = _template(settings, source.folder)
    with contextlib.suppress(RequestError):  # no tokenizer, or no end of text
        llm.engine.guides.prepare()  # seconds for a large vocabulary: not while others stream
    service = make_service(llm.engine, template, settings, str(model), generation)
    return serve(service, bind(settings.host, settings.port))


def _check_files(settings: ServerSettings) -> None:
    """The files of TLS, before a model is loaded."""
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(settings, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"{name}={path!r} cannot be read: give a PEM file")
    if settings.ssl_keyfile is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(settings.ssl_certfile or "", settings.ssl_keyfile)
        except ssl.SSLError as error:
            raise ConfigError(
                f"ssl_keyfile={settings.ssl_keyfile!r} and ssl_certfile={settings.ssl_certfile!r} "
                f"do not make a certificate: {error}"
            ) from error
    if settings.ssl_ca_certs is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(settings.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"ssl_ca_certs={settings.ssl_ca_certs!r} holds no certificates: {error}"
            ) from error


def _template(settings: ServerSettings, folder: Path | None) -> ChatTemplate:
    loaded = load_chat_template(folder)
    if settings.chat_template is None:
        return loaded
    path = Path(settings.chat_template)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={str(path)!r} cannot be read: {error}") from error
    return ChatTemplate({"default": text}, loaded.special_tokens, str(path))


def _read(path: Path) -> dict[str, Any]:
    """A YAML file of settings."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read as YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path} must hold settings by name, such as port: 8000")
    return data
