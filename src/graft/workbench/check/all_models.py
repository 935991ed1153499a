"""The same check on a tiny model of every family of the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graft.base.files import Progress
from graft.models.registry import families
from graft.workbench.check.checklist import check
from graft.workbench.check.request import CheckRequest
from graft.workbench.check.results import CheckReport


def check_all(request: CheckRequest, progress: Progress | None = None) -> Iterator[CheckReport]:
    """One report a family, as they come."""
    names = [f"tiny-{family}" for family in families()]
    for index, name in enumerate(names):
        if progress:
            progress(name, index, len(names))
        yield check(name, replace(request, must_match=False))
    if progress:
        progress("", len(names), len(names))
