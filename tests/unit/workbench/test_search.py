"""graft search: lines of ops and functions in graphs, and kernels by what they compute, other packages' too."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from graft.base.errors import UsageError
from graft.cli.app import app
from graft.ir.trace import trace_function
from graft.workbench.discover.installed import installed_kernels
from graft.workbench.discover.known import look_by_value
from graft.workbench.search import kernels_for, read_pattern, search, search_graph
from graft.workbench.search.kernels import graph_of

FUNCTIONS = """import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def odd(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x).pow(3) - y * 0.125
"""


@pytest.fixture
def functions(tmp_path):
    file = tmp_path / "patterns.py"
    file.write_text(FUNCTIONS)
    return str(file)


@pytest.fixture(scope="module")
def graph():
    """relu² · y twice, once behind a view, and gelu² · y."""

    def program(x, y):
        a = torch.relu(x).pow(2) * y
        b = (torch.relu(y).pow(2).reshape(6, 4) * x.reshape(6, 4)).reshape(2, 3, 4)
        return a + b, torch.sigmoid(x).pow(2) * y

    return trace_function(program, (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))).graph


def test_a_line_of_ops_is_found_through_views(graph):
    found = search_graph(read_pattern("relu -> pow, mul"), graph, "g")
    assert (found.exact, found.near) == (2, 1)
    assert found.nearly == (("sigmoid in place of relu", 1),)
    assert search_graph(read_pattern("relu mul"), graph, "g").exact == 0
    assert search_graph(read_pattern("mul pow relu"), graph, "g").exact == 0


def test_a_function_is_found_in_a_model(functions):
    found = search(read_pattern(f"{functions}:gated"), ["tiny-llama"], "float32")
    assert found.graphs[0].exact == 2 and found.graphs[0].sites == (("model.layers.*.mlp", 2),)
    assert [kernel.symbol for kernel in found.kernels] == ["graft::swiglu"]
    data = json.loads(json.dumps(found.to_dict()))
    assert data["exact"] == 2 and data["kernels"][0]["file"] == "graft/ops/swiglu/op.py"


def test_an_op_of_another_package_is_found_by_what_it_computes(functions):
    pattern = read_pattern(f"{functions}:odd")
    assert kernels_for(pattern) == ((), "")
    with torch.library._scoped_library("othersops", "DEF") as library:
        library.define("odd(Tensor y, Tensor x) -> Tensor")
        library.define("nearly(Tensor y, Tensor x) -> Tensor")
        library.define("odd_out(Tensor(a!) out, Tensor x, Tensor y) -> ()")
        library.impl("odd", lambda y, x: torch.tanh(x).pow(3) - y * 0.125, "CompositeExplicitAutograd")
        library.impl("nearly", lambda y, x: torch.tanh(x).pow(3) - y * 0.12501, "CompositeExplicitAutograd")
        library.impl("odd_out", only_float32, "CPU")
        found, _ = kernels_for(pattern)
        assert [kernel.symbol for kernel in found] == ["othersops::odd", "othersops::odd_out"]
        assert all(kernel.where == "installed" for kernel in found) and "writes its first" in found[1].note
        values, why = look_by_value(graph_of(pattern), installed_kernels())
        assert len(values) == 2 and why.reason == ""


def only_float32(out, x, y):
    if x.dtype is not torch.float32:
        raise RuntimeError("float32 only")
    out.copy_(torch.tanh(x).pow(3) - y * 0.125)


@pytest.mark.parametrize(
    ("text", "shapes", "told"),
    [
        ("relo mul", None, "did you mean 'relu'"),
        ("relu nosuchop", None, r"no op is named 'nosuchop'\. Ops are named"),
        (" , ", None, "the pattern is empty"),
        ("relu mul", "x: b s", "--shapes belongs to"),
        ("nowhere.py:f", None, "cannot be read"),
    ],
)
def test_bad_patterns(text, shapes, told):
    with pytest.raises(UsageError, match=told):
        read_pattern(text, shapes)


def test_the_command(functions):
    done = CliRunner().invoke(app, ["search", f"{functions}:gated", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["kernels"][0]["symbol"] == "graft::swiglu"
    done = CliRunner().invoke(app, ["search", "relu pow"])
    assert done.exit_code == 2 and "name models or folders of dumps" in done.output
    done = CliRunner().invoke(app, ["search", "silu mul", "tiny-lama"])
    assert done.exit_code == 2 and "did you mean 'tiny-llama'" in done.output
