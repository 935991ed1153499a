"""JSON of the commands: every document says which schema it follows, docs/schemas/NAME.json, and its version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# A version goes up when a field that was there is gone or means something else; new fields leave it as it is.
VERSIONS: dict[str, int] = dict.fromkeys(
    (
        "autofuse", "bench", "bench-families", "bench-kernels", "bench-load", "bench-server", "bench-start",
        "cache-export", "cache-import", "cache-ls", "cache-prune", "cache-stats", "chat", "check", "check-all-models",
        "check-since", "compare", "compile", "config", "deploy", "deploy-plan", "diff", "discover", "dump",
        "dump-native", "error", "eval", "events", "explain", "explain-cost", "explain-io", "export", "mcp", "models",
        "new-transform", "note-diff", "ops", "report", "report-stages", "repro", "repro-kernel", "repro-kernels",
        "repro-matches", "run", "search", "serve-log", "skills-install", "skills-list", "skills-show", "stages",
        "stages-ask", "stages-buckets", "stages-diff", "stages-why", "transforms", "tune",
    ),
    1,
)  # fmt: skip


def print_json(name: str, data: Mapping[str, Any] | list[Any], *, flush: bool = False) -> None:
    print(json.dumps(document(name, data)), flush=flush)


def document(name: str, data: Mapping[str, Any] | list[Any]) -> dict[str, Any]:
    """A list is the field `items`: the document has to name its schema."""
    return {"schema": f"{name}/{VERSIONS[name]}", **(data if isinstance(data, Mapping) else {"items": data})}


def error_document(error: BaseException, message: str, code: int) -> dict[str, Any]:
    """kind: the class of the error; `message` is the line on standard error."""
    return document("error", {"error": {"kind": type(error).__name__, "message": message, "exit_code": code}})
