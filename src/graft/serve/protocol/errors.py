"""Errors in the shape of the API that was asked: OpenAI's, or Anthropic's."""

from __future__ import annotations

from typing import Any

from graft.serve.protocol import answers
from graft.serve.protocol.messages import PATH

ANTHROPIC = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def of_messages(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def error_value(
    path: str, message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    if of_messages(path):
        kind = ANTHROPIC.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    return answers.error_body(message, status, param, code)


def error_event(path: str, value: dict[str, Any]) -> bytes:
    """The last of a stream: Anthropic's events have their kind in a line of its own."""
    return (b"event: error\n" if of_messages(path) else b"") + answers.event(value)
