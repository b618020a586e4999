"""What a server can be told, and from where: defaults, a YAML file, the environment, options.

Light to import: the command line builds its parser from these fields.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from yocolm.errors import ConfigError

PREFIX = "YOCOLM_"
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3}
MAX_COUNT = 2**40


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be text that is not empty")
    return value


def _path(value: Any) -> str:
    if value and not (isinstance(value, str) and value.startswith("/") and value.isascii()):
        raise ValueError("must begin with / and be ASCII, such as /llm")
    return (value or "").rstrip("/")


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value

    return parse


def _count(low: int, high: int = MAX_COUNT) -> Callable[[Any], int]:
    """A whole number; text may end in K, M or G, which count in 1024s."""

    def parse(value: Any) -> int:
        number = value
        if isinstance(value, str):
            digits, unit = value, 1
            if value[-1:].lower() in _UNITS:
                digits, unit = value[:-1], _UNITS[value[-1].lower()]
            short = digits.isascii() and digits.isdigit() and len(digits) < 20
            number = int(digits) * unit if short else None
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return number

    return parse


def _seconds(value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= 1e9:
        raise ValueError("must be a number of seconds from 0 to 1e9")
    return number


def _target(value: Any) -> float:
    seconds = _seconds(value)
    if seconds == 0:
        raise ValueError("must be a number of seconds above 0")
    return seconds


def _flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise ValueError("must be true or false")
    return text in _TRUE


def _texts(value: Any) -> tuple[str, ...]:
    """Several texts: a list, or one text with commas between them."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
        raise ValueError("must be a list of texts")
    texts = tuple(item.strip() for item in items)
    if not all(texts):
        raise ValueError("must be a list of texts that are not empty")
    return texts


def _memory(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("must be an amount of bytes, such as 2GiB")
    return value


def _swap(value: Any) -> Any:
    """An amount of bytes, or 0. vLLM counts it in GiB: such a small number is refused."""
    number = value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        number = int(value[:20])
    if isinstance(number, int) and not isinstance(number, bool):
        if 0 < number < 2**20:
            raise ValueError(f"would be {number} bytes: give a unit, such as {number}GiB, or 0")
        return number
    return _memory(value)


def _option(
    default: Any, parse: Callable[[Any], Any], help: str, group: str, metavar: str | None = None
) -> Any:
    metadata = {"parse": parse, "help": help, "group": group, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ServerSettings:
    """All settings of a server; None is chosen from the model. Built by ``gather``."""

    host: str = _option("127.0.0.1", _text, "address to listen on", "network", "HOST")
    port: int = _option(8000, _count(0, 65535), "port to listen on; 0: any", "network", "PORT")
    root_path: str = _option("", _path, "path under which a proxy serves us", "network", "PATH")
    api_key: tuple[str, ...] = _option(
        (), _texts, "key that clients must send; repeatable", "network", "KEY"
    )
    cors_origins: tuple[str, ...] = _option(
        (), _texts, "origin that browsers may call from, or *; repeatable", "network", "ORIGIN"
    )
    ssl_keyfile: str | None = _option(None, _text, "TLS key", "network", "FILE")
    ssl_certfile: str | None = _option(None, _text, "TLS certificate", "network", "FILE")
    ssl_ca_certs: str | None = _option(
        None, _text, "certificates that clients must be signed by", "network", "FILE"
    )
    max_body: int | None = _option(
        None, _count(1024), "largest request in bytes (default: from the context)", "limits", "N"
    )
    max_queue: int = _option(
        1000, _count(0), "samples that may wait; more are refused with 429", "limits", "N"
    )
    max_logprobs: int = _option(20, _count(0), "most logprobs per position", "limits", "N")
    request_timeout: float = _option(
        0.0, _seconds, "seconds until a request is given up; 0: never", "limits", "S"
    )
    drain_timeout: float = _option(
        30.0, _seconds, "seconds that running requests get after SIGTERM", "limits", "S"
    )
    served_model_name: tuple[str, ...] = _option(
        (), _texts, "name that clients use; repeatable (default: MODEL)", "model", "NAME"
    )
    dtype: str = _option(
        "auto", _one_of("auto", "float32", "bfloat16"), "of weights and KV", "model", "DTYPE"
    )
    device: str = _option("auto", _text, "auto (a GPU if there is one), cpu or cuda", "model", "D")
    chat_template: str | None = _option(
        None, _text, "a Jinja file instead of the model's template", "model", "FILE"
    )
    tool_parser: str = _option(
        "auto",
        _text,
        "form of tool calls in the model's text (auto: by the template)",
        "model",
        "NAME",
    )
    pooling: str = _option(
        "last", _one_of("last", "mean"), "of hidden states for embeddings", "model", "KIND"
    )
    generation_config: str = _option(
        "auto",
        _one_of("auto", "none"),
        "auto: sampling defaults from the model's generation_config.json; none: OpenAI's",
        "model",
        "KIND",
    )
    max_model_len: int | None = _option(
        None, _count(1), "longest prompt and output (default: the model's)", "engine", "N"
    )
    max_num_seqs: int | None = _option(None, _count(1), "sequences at a time", "engine", "N")
    max_num_batched_tokens: int = _option(
        2048, _count(1), "tokens in one step (prefill chunk)", "engine", "N"
    )
    kv_memory: str | int | None = _option(
        None, _memory, "memory for state, such as 512MB or 2GiB", "engine", "SIZE"
    )
    page_size: int | None = _option(None, _count(1), "tokens in a page of KV", "engine", "N")
    prefix_caching: bool = _option(
        True, _flag, "keep state for prompts that begin alike (default: on)", "engine"
    )
    num_checkpoints: int | None = _option(
        None,
        _count(0),
        "kept states of constant size, beside those of running sequences (default: by memory)",
        "engine",
        "N",
    )
    checkpoint_spacing: int = _option(
        8192, _count(1), "tokens between the kept states of a very long prompt", "engine", "N"
    )
    mean_tokens: int | None = _option(
        None,
        _count(1),
        "tokens that a request is expected to have, by which memory is divided into pools",
        "engine",
        "N",
    )
    swap_space: str | int | None = _option(
        None,
        _swap,
        "room for the state of preempted sequences; 0: none, compute it anew (default: 4GiB, at "
        "most twice that of the state)",
        "engine",
        "SIZE",
    )
    policy: str = _option(
        "fcfs",
        _one_of("fcfs", "traffic"),
        "fcfs: first come, first served, a budget of tokens a step; traffic: by what steps are "
        "predicted to take",
        "scheduling",
        "POLICY",
    )
    ttft_target: float | None = _option(
        None,
        _target,
        "seconds to the first token that the policy traffic aims at, unless a request says "
        "otherwise (default: 5 times what it takes alone)",
        "scheduling",
        "S",
    )
    tpot_target: float | None = _option(
        None,
        _target,
        "seconds between tokens, likewise (default: 2 times what it takes alone)",
        "scheduling",
        "S",
    )
    priority_aging: float = _option(
        10.0, _seconds, "seconds of waiting that are worth a level of priority", "scheduling", "S"
    )
    calibrate: bool = _option(
        True, _flag, "measure the machine at start-up, once for each model (default: on)", "engine"
    )
    prompt_logprobs: str = _option(
        "exact",
        _one_of("exact", "reject"),
        "reject: refuse requests for prompt logprobs, so that every prefill is the fast one",
        "engine",
        "MODE",
    )
    compile: str = _option(
        "auto",
        _one_of("auto", "eager", "inductor", "graph"),
        "how decode steps run; auto: CUDA graphs on a GPU, as they are on a CPU",
        "engine",
        "KIND",
    )
    eager: bool = _option(False, _flag, "the same as --compile eager", "engine")
    log_level: str = _option(
        "info", _one_of("debug", "info", "warning", "error"), "least level logged", "logs", "LEVEL"
    )
    log_format: str = _option("text", _one_of("text", "json"), "of log lines", "logs", "FORMAT")
    log_requests: bool = _option(False, _flag, "log the end of every request", "logs")
    access_log: bool = _option(False, _flag, "log every HTTP exchange", "logs")


_ALIASES = {  # as vLLM has them
    "--eager": ("--enforce-eager",),
    "--prefix-caching": ("--enable-prefix-caching",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for all settings. Absent ones stay None, so that other sources are heard."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for item in fields(ServerSettings):
        title = item.metadata["group"]
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        flags = "--" + item.name.replace("_", "-")
        text = item.metadata["help"]
        if item.metadata["parse"] is _flag:
            action = argparse.BooleanOptionalAction
            names = [flags, *_ALIASES.get(flags, ())]
            group.add_argument(*names, action=action, default=None, help=text)
            continue
        if item.default not in (None, (), "") and "default" not in text:
            text += (
                f" (default: {item.default:g})"
                if item.type == "float"
                else (f" (default: {item.default})")
            )
        action = "append" if item.metadata["parse"] is _texts else "store"
        group.add_argument(flags, metavar=item.metadata["metavar"], help=text, action=action)


def gather(
    options: Mapping[str, Any],
    file: Mapping[str, Any] | None = None,
    file_name: str = "the configuration file",
    environment: Mapping[str, str] | None = None,
) -> ServerSettings:
    """Settings from all sources; the later wins: defaults, file, environment, options.

    Args:
        options: by field name, None where an option was not given.
        file: what a YAML file holds; ``-`` and ``_`` are alike in its names.

    Raises ConfigError naming the source of a value that cannot be.
    """
    environment = os.environ if environment is None else environment
    known = {item.name: item for item in fields(ServerSettings)}
    values: dict[str, Any] = {}
    for name, value in _named(file or {}, known, file_name):
        values[name] = _parsed(known[name].metadata["parse"], value, f"{name} in {file_name}")
    for name, item in known.items():
        variable = PREFIX + name.upper()
        if environment.get(variable):
            values[name] = _parsed(item.metadata["parse"], environment[variable], variable)
        if options.get(name) is not None:
            option = "--" + name.replace("_", "-")
            values[name] = _parsed(item.metadata["parse"], options[name], option)
    settings = ServerSettings(**values)
    if (settings.ssl_keyfile is None) != (settings.ssl_certfile is None):
        raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile: give both or none")
    if settings.ssl_ca_certs is not None and settings.ssl_keyfile is None:
        raise ConfigError(
            f"ssl_ca_certs={settings.ssl_ca_certs!r} asks for certificates of clients, which needs "
            "TLS: give ssl_keyfile and ssl_certfile too"
        )
    return settings


def _named(
    file: Mapping[str, Any], known: Iterable[str], file_name: str
) -> Iterable[tuple[str, Any]]:
    for key, value in file.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(
                f"{key!r} in {file_name} is no setting; known: {', '.join(sorted(known))}"
            )
        if value is not None:
            yield name, value


def _parsed(parse: Callable[[Any], Any], value: Any, source: str) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        secret = "api_key" in source.lower().replace("-", "_")
        shown = "" if secret else f"={str(value)[:80]!r}"
        raise ConfigError(f"{source}{shown} {error}") from None
