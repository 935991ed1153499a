"""A plugin of the test run: every JSON document that a test makes graft print in its process follows its schema.

The processes of a run tell the first one which schemas of docs/schemas they met; the long run fails if there is one
that nobody did.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from graft.cli import documents

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
met: set[str] = set()


@cache
def schema_of(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def follows(found: Mapping[str, Any]) -> str:
    """The schema that a document names and follows; every field of it is described there."""
    import jsonschema

    name = found["schema"].partition("/")[0]
    schema = schema_of(name)
    jsonschema.validate(found, schema)
    if name != "serve-log":
        assert found.keys() <= schema["properties"].keys(), f"{name}: {found.keys() - schema['properties'].keys()}"
    met.add(name)
    return name


def watch() -> None:
    plain = documents.document
    if plain.__name__ == "checked":  # a forked process is watched already
        return

    def checked(name: str, data: Mapping[str, Any] | list[Any]) -> dict[str, Any]:
        found = plain(name, data)
        follows(json.loads(json.dumps(found)))
        return found

    documents.document = checked


def pytest_configure(config: pytest.Config) -> None:
    hands_out = config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if find_spec("jsonschema") is not None and not hands_out:
        watch()


def unmet(session: pytest.Session) -> list[str]:
    """Of a run of all tests that came to its end: schemas that no document followed."""
    config, known = session.config, find_spec("jsonschema") is not None and find_spec("mcp") is not None
    whole = (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS and not session.shouldstop and not session.shouldfail
    )
    some = ("markexpr", "keyword", "deselect", "lf", "failedfirst", "collectonly", "maxfail", "stepwise")
    if not known or not whole or any(config.getoption(name, None) for name in some):
        return []
    return sorted(set(documents.VERSIONS) - met)


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_testnodedown(node: Any) -> None:
    met.update(getattr(node, "workeroutput", {}).get("documents", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["documents"] = sorted(met)
    elif exitstatus != pytest.ExitCode.INTERRUPTED and (names := unmet(session)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nno test printed a document of docs/schemas: {', '.join(names)}")
