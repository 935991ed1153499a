"""/openapi.json names what is there, and describes what it gives; schemathesis runs it (tests/clients/fuzz.py)."""

from __future__ import annotations

import pytest

from graft.serve.app import ROUTES
from graft.serve.openapi import OPEN_PATHS, openapi
from serve_cases import http_client, serving

ERROR = {"$ref": "#/components/schemas/Error"}
UNDESCRIBED = {"/", "/dashboard", "/v1/dashboard", "/openapi.json", "/v1/kv_cache_events", "/metrics"}


def test_every_endpoint_of_json_is_described():
    routes = {(path.replace("{name:path}", "{name}"), method.lower()) for method, path, _ in ROUTES}
    paths = {(path, method) for path, found in openapi(("a",))["paths"].items() for method in found}
    assert paths == {(path, method) for path, method in routes if path not in UNDESCRIBED}


KINDS = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def check(made, schema, value, where="$"):
    """As much of JSON Schema as answers are described by."""
    if "$ref" in schema:
        schema = made["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    kinds = schema.get("type", list(KINDS))
    assert isinstance(value, tuple(KINDS[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))), where
    assert value == schema.get("const", value) and value in schema.get("enum", [value]), where
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= set(value), where
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                check(made, inner, value[name], f"{where}.{name}")
    if isinstance(value, list):
        assert len(value) >= schema.get("minItems", 0), where
        for one in value:
            check(made, schema.get("items", {}), one, f"{where}[]")


def test_answers_are_as_described():
    with serving("chat") as server, http_client(server.url) as client:
        made = client.get("/openapi.json").json()
        assert made["components"]["schemas"]["ModelName"] == {"enum": ["chat", None]}
        asked = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
            "/v1/completions": {"prompt": [5], "max_tokens": 2},
            "/v1/responses": {"input": "hi"},
            "/tokenize": {"prompt": "hi"},
            "/detokenize": {"tokens": [5]},
            "/v1/embeddings": {},
        }
        for path, found in made["paths"].items():
            for method, operation in found.items():
                address = path.replace("{name}", "chat")
                answer = client.request(method, address, json=asked.get(path) if method == "post" else None)
                content = operation["responses"][str(answer.status_code)]["content"]["application/json"]
                check(made, content["schema"], answer.json(), path)
                if path not in OPEN_PATHS and method == "post":
                    bad = client.post(address, json={"model": 5})
                    assert bad.status_code == 400
                    check(made, ERROR, bad.json(), path)
        for wrong in ({"error": "text"}, {"error": {"message": "x"}}, {}):
            with pytest.raises(AssertionError):
                check(made, ERROR, wrong)
