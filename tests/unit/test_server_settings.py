"""Settings from four places: the later wins, and errors say where a value comes from."""

import argparse
from dataclasses import fields
from typing import Any

import pytest

from yocolm.cli import build_parser
from yocolm.errors import ConfigError
from yocolm.server.settings import ServerSettings, gather


def test_the_later_source_wins() -> None:
    file = {"port": 1, "max-queue": 2, "dtype": "float32", "api_key": ["a", "b"]}
    environment = {"YOCOLM_MAX_QUEUE": "3", "YOCOLM_DTYPE": "bfloat16", "YOCOLM_HOST": ""}
    settings = gather({"dtype": "auto", "port": None}, file, environment=environment)
    assert (settings.port, settings.max_queue, settings.dtype) == (1, 3, "auto")
    assert settings.api_key == ("a", "b") and settings.host == "127.0.0.1"
    assert gather({}, environment={}) == ServerSettings()


def test_options_of_the_command_line() -> None:
    parse = build_parser().parse_args
    arguments = parse(
        "serve some/folder --port 0 --api-key a --api-key b --max-model-len 32K --log-requests "
        "--no-access-log --request-timeout 2.5 --kv-memory 1GiB".split()
    )
    settings = gather(vars(arguments), environment={"YOCOLM_ACCESS_LOG": "yes"})
    assert arguments.model == "some/folder" and settings.port == 0
    assert settings.api_key == ("a", "b") and settings.max_model_len == 32768
    assert settings.log_requests and not settings.access_log
    assert gather({"root_path": "/llm/"}, environment={}).root_path == "/llm"
    assert settings.request_timeout == 2.5 and settings.kv_memory == "1GiB"
    options = vars(parse(["serve"]))
    assert all(options[item.name] is None for item in fields(ServerSettings))
    assert options["model"] is None


def test_lists_and_flags_in_the_environment() -> None:
    environment = {"YOCOLM_API_KEY": "a, b", "YOCOLM_LOG_REQUESTS": "on", "YOCOLM_PORT": "80"}
    settings = gather({}, environment=environment)
    assert settings.api_key == ("a", "b") and settings.log_requests and settings.port == 80


@pytest.mark.parametrize(
    ("options", "file", "environment", "message"),
    [
        ({"port": "70000"}, {}, {}, "--port='70000' must be a whole number from 0 to 65535"),
        ({"port": "x"}, {}, {}, "--port='x'"),
        ({}, {"port": True}, {}, "port in the configuration file='True'"),
        ({}, {"prot": 1}, {}, "'prot' in the configuration file is no setting; known: .*port"),
        ({}, {}, {"YOCOLM_PORT": "tcp://1.2.3.4"}, "YOCOLM_PORT='tcp://1.2.3.4'"),
        ({}, {}, {"YOCOLM_LOG_REQUESTS": "maybe"}, "YOCOLM_LOG_REQUESTS='maybe' must be true or"),
        ({"dtype": "int8"}, {}, {}, "--dtype='int8' must be one of auto, float32, bfloat16"),
        ({"request_timeout": "-1"}, {}, {}, "--request-timeout='-1' must be a number of seconds"),
        ({"request_timeout": "nan"}, {}, {}, "--request-timeout='nan'"),
        ({"max_model_len": "9" * 50}, {}, {}, "--max-model-len='999"),
        ({}, {"served_model_name": [1]}, {}, "served_model_name in the configuration file"),
        ({}, {"host": 5}, {}, "host in the configuration file='5' must be text"),
        ({"ssl_keyfile": "key"}, {}, {}, "both ssl_keyfile and ssl_certfile"),
        ({"root_path": "llm"}, {}, {}, "--root-path='llm' must begin with /"),
        ({"ssl_ca_certs": "ca"}, {}, {}, "ssl_ca_certs='ca' .*give ssl_keyfile and ssl_certfile"),
    ],
)
def test_values_that_cannot_be(
    options: dict[str, Any], file: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        gather(options, file, environment=environment)


def test_keys_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        gather({}, {}, environment={"YOCOLM_API_KEY": "secret,,"})
    assert "secret" not in str(caught.value) and "YOCOLM_API_KEY" in str(caught.value)


def test_every_setting_has_an_option_with_help() -> None:
    [commands] = [
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    options = {action.dest: action for action in commands.choices["serve"]._actions}
    for item in fields(ServerSettings):
        assert options[item.name].help, item.name
