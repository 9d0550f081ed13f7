"""Errors as clients see them: OpenAI's shape, no paths, no addresses, no tracebacks."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from billfish.errors import (
    BillfishError,
    CapacityError,
    CheckpointError,
    EngineDiedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    shown,
)
from billfish.server.schema_common import FieldError

RETRY_AFTER = 1
"""Seconds after which a refused request may be tried again."""

MAX_MESSAGE = 1000

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(HTTPException):
    """An answer that is an error. type, param, code: fields of OpenAI's error objects."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.kind, self.param, self.code = kind, param, code

    @property
    def body(self) -> dict[str, Any]:
        message = self.detail
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + "..."
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        content = msgspec.json.encode(self.body)
        return Response(content, self.status_code, self.headers, "application/json")


def from_error(error: BaseException, renamed: Mapping[str, str] | None = None) -> ApiError:
    """What a client is told of an error. renamed: fields of the request by the names of the
    parameters that were made from them."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            param = (renamed or {}).get(error.parameter, error.parameter)
            return ApiError(400, f"{param}: {error.reason}", param=param)
        case QueueFullError():
            retry = {"Retry-After": str(RETRY_AFTER)}
            return ApiError(
                429, str(error), kind="rate_limit_error", code="rate_limit_exceeded", headers=retry
            )
        case CapacityError():
            field = (renamed or {}).get("prompt_token_ids")
            return ApiError(400, str(error), param=field, code="context_length_exceeded")
        case EngineUnavailableError():
            retry = {"Retry-After": str(RETRY_AFTER)}
            what = {
                "starting": "the engine is starting",
                "draining": "the server is shutting down",
            }.get(error.state, "the engine is not running")
            return ApiError(503, what, kind=SERVER, code=f"engine_{error.state}", headers=retry)
        case EngineDiedError():
            return ApiError(
                500, "the engine ended while it worked on the request", kind=SERVER,
                code="engine_died",
            )  # fmt: skip
        case CheckpointError():  # its message names a file
            return ApiError(400, f"messages: {error.reason}", param="messages")
        case BillfishError():
            return ApiError(500, "the request failed", kind=SERVER)
        case HTTPException():
            return _from_http(error)
    return ApiError(500, "internal error", kind=SERVER)


def _from_http(error: HTTPException) -> ApiError:
    """What the framework itself refuses."""
    known = {
        404: ("there is nothing at this path", "not_found"),
        405: ("this path does not take this method", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, ("the request cannot be read", None))
    headers = dict(error.headers) if error.headers else None
    return ApiError(error.status_code, message, code=code, headers=headers)


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The most telling of pydantic's errors: of alternatives, the one that fits furthest."""
    best = max(errors, key=lambda error: len(_place(error, body)))
    place = _place(best, body)
    cause = (best.get("ctx") or {}).get("error")
    if isinstance(cause, FieldError):
        place = [*place, cause.field]
    elif tag := _field_of_tag(best):
        place = [*place, tag]
    param = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in place).removeprefix(".")
    reason = {
        "extra_forbidden": "is not supported",
        "none_required": "is not supported",
        "missing": "is required",
        "union_tag_not_found": "is required",
        "dict_type": "should be an object",
        "model_type": "should be an object",
        "model_attributes_type": "should be an object",
    }.get(best["type"])
    if best["type"] == "list_type" and best["loc"][-1] == "list":  # one of two alternatives
        reason = "should be a string or a list"
    elif best["type"] == "union_tag_invalid":
        reason = f"must be one of {best['ctx']['expected_tags']}, got {shown(best['ctx']['tag'])}"
    elif reason is None:
        reason = str(best["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    code = "unsupported_parameter" if reason == "is not supported" else None
    param = param if len(param) <= 200 else f"{param[:200]}..."
    return ApiError(400, f"{param or 'body'}: {reason}", param=param or None, code=code)


def _field_of_tag(error: Mapping[str, Any]) -> str | None:
    """The field that was to say which of several models a value is, where that is what is wrong."""
    if error["type"] not in ("union_tag_invalid", "union_tag_not_found"):
        return None
    by = str(error["ctx"]["discriminator"])  # a field in quotes, or a function
    return by.strip("'") if by.startswith("'") else None


def _place(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """Where it is in the body. pydantic's own path also names the alternatives it tried."""
    place: list[str | int] = []
    value = body
    where, *steps = error["loc"]
    if where != "body":
        return steps
    for number, step in enumerate(steps):
        in_dict = isinstance(value, dict) and step in value
        in_list = isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value)
        if in_dict or in_list:
            value = value[step]
        elif not (error["type"] == "missing" and number == len(steps) - 1):
            continue
        place.append(step)
    return place
