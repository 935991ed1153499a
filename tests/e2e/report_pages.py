"""Reports and a browser for the tests of the report page."""

from __future__ import annotations

import pytest
from browser import browser

from graft.workbench.report import write_report
from report_cases import HOSTILE, dump_deep, dump_stack


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """The report of 32 layers."""
    folder = tmp_path_factory.mktemp("deep")
    file = folder / "report.html"
    write_report(dump_deep(folder / "run"), file)
    return file


@pytest.fixture(scope="session")
def decoder(tmp_path_factory):
    """The same with 6 layers, which is there in a fifth of the time."""
    folder = tmp_path_factory.mktemp("decoder")
    file = folder / "report.html"
    run = dump_deep(folder / "run", 6)
    (run / "native.cpp").write_text(
        "// One step\n  // 0: %swiglu_default_1  model.layers.1.mlp\n  {\n    swiglu(a);\n  }\n"
    )
    (run / "inductor.py").write_text("# Topologically Sorted Source Nodes: [swiglu_default_1]\ntriton_poi_0.run()\n")
    write_report(run, file)
    return file


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    file = folder / "report.html"
    write_report(dump_stack(folder / "run", HOSTILE), file)
    return file


@pytest.fixture(scope="session")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(window):
    """A page of its own in the one browser, with the theme as the system says."""
    yield window
    window.evaluate("localStorage.clear()")
    window.close()
