"""What stands before the routes: keys, the path of a proxy, browsers of other origins."""

from typing import Any

import httpx2 as httpx
import pytest

from scripted import scripted_engine
from serving import TEMPLATE, error_of, service_of, talk
from yocolm.errors import ConfigError
from yocolm.server.app import make_service
from yocolm.server.settings import ServerSettings


def test_behind_a_proxy() -> None:
    """Routes, the paths that need no key and the description know the path of the proxy."""
    service = service_of(scripted_engine([]), root_path="/llm/", api_key=["key"])

    async def work(client: httpx.AsyncClient) -> None:
        for path in ("/health", "/docs", "/openapi.json"):
            assert (await client.get(f"/llm{path}")).status_code == 200, path
        assert '"/llm/openapi.json"' in (await client.get("/llm/docs")).text.replace("'", '"')
        schema = (await client.get("/llm/openapi.json")).json()
        assert schema["servers"] == [{"url": "/llm"}] and "/v1/models" in schema["paths"]
        error_of(await client.get("/llm/v1/models"), 401)
        error_of(await client.get("/llm/health/x"), 401)
        headers = {"authorization": "Bearer key"}
        assert (await client.get("/llm/v1/models", headers=headers)).status_code == 200

    talk(service, work)


def test_browsers_of_other_origins() -> None:
    """A browser asks first, without a key; only the origins that were named may go on."""
    service = service_of(scripted_engine([]), cors_origins=["https://a.example"], api_key=["key"])
    asked = {"access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"

    async def work(client: httpx.AsyncClient) -> None:
        path = "/v1/completions"
        answer = await client.options(path, headers={"origin": "https://a.example", **asked})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        other = await client.options(path, headers={"origin": "https://b.example", **asked})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        refused = await client.post(path, json={}, headers={"origin": "https://a.example"})
        error_of(refused, 401)  # which the page may read
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in refused.headers["access-control-expose-headers"]

    talk(service, work)


def test_no_other_origin_unless_named() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        answer = await client.get("/health", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers

    talk(service_of(scripted_engine([])), work)


def test_head() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for path in ("/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/tiny"):
            assert (await client.head(path)).status_code == 200, path
        assert (await client.head("/v1/models/x")).status_code == 404
        operations = (await client.get("/openapi.json")).json()["paths"]
        assert all("head" not in operation for operation in operations.values())

    talk(service_of(scripted_engine([])), work)


@pytest.mark.parametrize("wrong", [{"temperature": "x"}, {"top_p": 7}, {"top_k": [1]}])
def test_sampling_defaults_that_cannot_be(wrong: dict[str, Any]) -> None:
    engine, settings = scripted_engine([]), ServerSettings()
    make_service(engine, TEMPLATE, settings, "tiny", {"temperature": 0.5, "top_k": None})
    with pytest.raises(ConfigError, match=f"generation_config.json of model tiny: {[*wrong][0]}="):
        make_service(engine, TEMPLATE, settings, "tiny", wrong)
