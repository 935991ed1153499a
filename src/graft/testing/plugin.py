"""The pytest plugin: marks for what a build may lack and for known gaps, and a fixture for torch.compile.

    @pytest.mark.needs_transform("fuse_rope")      skipped, with the reason, in a build without it
    @pytest.mark.needs_device("cuda")              skipped, with the reason, on a machine without it
    @pytest.mark.needs_stage("scheduling")         skipped, with the reason, where torch lacks what it is watched by
    @pytest.mark.known_gap("only even sizes")      must fail, by an assertion; fails the run when it starts to pass

Installed with graft (entry point group `pytest11`). The entry point has the module's own name, so that
`-p graft.testing.plugin` and `pytest_plugins` name the same plugin and nothing is registered twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

MARKS = (
    "needs_transform(name, …): skip where this build has no transform of that name",
    "needs_device(name, …): skip where the device (cuda, cuda:1) is not there",
    "needs_stage(name, …): skip where this torch lacks the names by which a stage of torch.compile is watched",
    "known_gap(reason): an assertion that does not hold yet; strict, so it fails when it starts to pass",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKS:
        config.addinivalue_line("markers", line)


def pytest_itemcollected(item: pytest.Item) -> None:
    """A known gap is a strict xfail that lets assertions fail and nothing else."""
    mark = item.get_closest_marker("known_gap")
    if mark is None:
        return
    if len(mark.args) != 1 or not isinstance(mark.args[0], str) or not mark.args[0].strip():
        raise pytest.UsageError(
            f"{item.nodeid}: known_gap needs one reason: @pytest.mark.known_gap('what is missing')"
        )
    reason = f"known gap: {mark.args[0]} (when this passes, the gap is closed: remove the mark)"
    item.add_marker(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs_transform"):
        for name in mark.args:
            if problem := transform_problem(name):
                pytest.skip(problem)
    for mark in item.iter_markers("needs_device"):
        for name in mark.args:
            if problem := device_problem(name):
                pytest.skip(f"needs {name}: {problem}")
    for mark in item.iter_markers("needs_stage"):
        for name in mark.args:
            if problem := stage_problem(name):
                pytest.skip(f"needs stage {name}: {problem}")


def stage_problem(name: str) -> str | None:
    from graft.base.errors import near
    from graft.stages.story import STAGES
    from graft.stages.watch import missing_names

    return missing_names().get(name) if name in STAGES else f"there is no such stage{near(name, STAGES)}"


def transform_problem(name: str) -> str | None:
    from graft.base.errors import near
    from graft.passes.registry import TransformRegistry, load_all

    load_all()
    known = TransformRegistry.names()
    return None if name in known else f"this build has no transform {name!r}{near(name, known)}"


def device_problem(name: str) -> str | None:
    from graft.testing.numbers import device_problem as problem

    return problem(name)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile starts and ends with nothing compiled, and takes nothing from caches on disk."""
    from graft.backends.inductor import reset_compiler
    from graft.backends.inductor_caches import without_caches

    reset_compiler()
    with without_caches():
        yield
    reset_compiler()
