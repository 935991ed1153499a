"""The pytest plugin: marks, matrices, the fixture, and that it is registered once however it comes in."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import graft
import graft.testing.numbers  # pytester drops what an inner run imports first, and torch cannot be imported twice
from graft.passes.registry import load_all

load_all()
SOURCE = Path(graft.__file__).parents[1]
PLUGIN = "graft.testing.plugin"


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs a test file with the plugin as its only addition; in a process of its own where it compiles something."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))

    def run_file(text, *args, apart=False):
        pytester.makepyfile(text)
        runner = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return runner("-p", PLUGIN, "-rsxX", "--strict-markers", "-p", "no:cacheprovider", *args)

    return run_file


def test_a_transform_missing_in_this_build_is_a_skip_with_the_reason(run):
    result = run(
        """
        import pytest
        @pytest.mark.needs_transform("fuse_swiglu")
        def test_there(): pass
        @pytest.mark.needs_transform("fuse_swiglu", "fuse_swigloo")
        def test_missing(): assert False
        """
    )
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*this build has no transform 'fuse_swigloo'; did you mean 'fuse_swiglu'*"])


def test_a_device_that_is_not_there_is_a_skip_with_the_reason(run):
    result = run(
        """
        import pytest
        from graft.testing import matrix
        @pytest.mark.needs_device("cpu")
        def test_cpu(): pass
        @pytest.mark.needs_device("tpu")
        def test_tpu(): assert False
        @matrix(dtypes=("float32", "bfloat16"), devices=("cpu", "cuda:99"))
        def test_matrix(dtype, device): assert device == "cpu"
        """,
        "-v",
    )
    result.assert_outcomes(passed=3, skipped=3)
    result.stdout.fnmatch_lines(
        ["*::test_matrix?float32-cpu? PASSED*", "SKIPPED*needs tpu: this kit knows cpu and cuda*"]
    )
    assert "torch sees" in result.stdout.str()


GAPS = """
import pytest
@pytest.mark.known_gap("odd sizes")
def test_open(): assert False
@pytest.mark.known_gap("even sizes")
def test_closed(): pass
@pytest.mark.known_gap("crashes")
def test_crash(): raise ValueError("not an assertion")
"""


def test_a_known_gap_must_fail_by_an_assertion(run):
    result = run(GAPS)
    result.assert_outcomes(xfailed=1, failed=2)
    result.stdout.fnmatch_lines(["XFAIL*known gap: odd sizes*"])
    result.stdout.fnmatch_lines(
        ["*XPASS(strict)*known gap: even sizes (when this passes, the gap is closed: remove*"]
    )
    assert "ValueError: not an assertion" in result.stdout.str()


def test_a_known_gap_needs_a_reason(run):
    result = run("import pytest\n@pytest.mark.known_gap\ndef test_x(): assert False\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*known_gap needs one reason*"])


@pytest.mark.exhaustive
def test_helpers_fail_at_the_line_of_the_test(run):
    result = run(
        """
        import torch
        from graft.testing import assert_fuses
        def test_it():
            assert_fuses(torch.sin, (torch.ones(2),), "fuse_swiglu")  # this line
        """,
        apart=True,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*# this line", "E*expected: fuse_swiglu matches sin at least once"])
    result.stdout.fnmatch_lines(["E*found:    it matched 0 times", "E*what to do: compare the pattern*"])
    assert "def assert_fuses" not in result.stdout.str()


@pytest.mark.exhaustive
def test_the_fixture_forgets_what_was_compiled(run):
    result = run(
        """
        import pytest, torch
        counts = []
        def compiled():
            made = []
            def backend(gm, inputs):
                made.append(1)
                return gm.forward
            f = torch.compile(lambda x: x.sin(), backend=backend)
            f(torch.ones(2)); f(torch.ones(2))
            return len(made)
        def test_one(fresh_compiler):
            assert compiled() == 1
            assert not torch._functorch.config.enable_autograd_cache
        def test_two(fresh_compiler): assert compiled() == 1
        """,
        apart=True,
    )
    result.assert_outcomes(passed=2)


def test_the_entry_point_has_the_modules_own_name():
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}


@pytest.mark.some(2)
@pytest.mark.parametrize("ways", [("installed",), ("installed", "-p"), ("installed", "conftest"), ("-p", "conftest")])
def test_it_is_registered_once_however_it_comes_in(pytester, ways, monkeypatch):
    """A stand-in for an installed graft: its metadata alone, beside the sources."""
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}:{pytester.path}")
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    if "installed" in ways:
        info = pytester.mkdir("graft_stand_in-0.0.0.dist-info")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graft-stand-in\nVersion: 0.0.0\n")
        (info / "entry_points.txt").write_text(f"[pytest11]\n{PLUGIN} = {PLUGIN}\n")
    if "conftest" in ways:
        pytester.makeconftest(f"pytest_plugins = ['{PLUGIN}']")
    pytester.makepyfile(
        f"""
        import pytest, sys
        def test_once(request):
            plugins = request.config.pluginmanager.list_name_plugin()
            named = [name for name, plugin in plugins if getattr(plugin, "__name__", "") == "{PLUGIN}"]
            assert named == ["{PLUGIN}"] and "torch" not in sys.modules
        """
    )
    command = [sys.executable, "-m", "pytest", "-q", *(["-p", PLUGIN] if "-p" in ways else [])]
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
