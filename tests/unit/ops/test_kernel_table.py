"""One kernel table an op: its last entry takes every call, a named kernel runs or raises, the report's reasons are
the table's, and native kernels are its entries."""

from __future__ import annotations

import importlib
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graft.backends.native.ops  # noqa: F401
from graft.api.compile import compile as graft_compile
from graft.backends.native.plan import LOWERINGS
from graft.base.errors import KernelUnavailable
from graft.ops import OPS, Kernel, OpSpec, bind, choose
from graft.ops.call import Asker
from graft.ops.fused_linear import op as linear_op
from graft.ops.fused_linear.cases import LinearCase, make
from graft.ops.fused_linear.choice import overridden
from graft.ops.fused_linear.kinds import Gemm, LinearShape, Matvec
from graft.ops.fused_linear.tables import TunedEntry
from graft.ops.ran import OpKernels, Ran, gathered
from graft.ops.selection import problem_of
from graft.passes.report import Report
from marks import examples

KINDS = ["existing", "triton", "native", "reference"]


def calls_of(name, dtype=torch.float32):
    cases = importlib.import_module(f"graft.ops.{name}.cases").CASES
    return [OPS[name].call(*case.make("cpu", dtype, torch.Generator().manual_seed(0))) for case in cases]


@pytest.mark.parametrize("name", OPS)
def test_the_last_entry_takes_every_call_and_reasons_are_given_for_those_before(name):
    spec = OPS[name]
    assert len(spec.by_name) == len(spec.table) and spec.table[-1].name == "reference"
    assert all(kernel.kind in KINDS for kernel in spec.table)
    for call in calls_of(name):
        assert problem_of(spec.table[-1], call) is None
        chosen = choose(spec, call)
        tried = dict(chosen.skipped)
        assert problem_of(chosen.kernel, call) is None
        for kernel in spec.table[: spec.table.index(chosen.kernel)]:
            assert tried[kernel.name] == problem_of(kernel, call)


@pytest.mark.parametrize("name", OPS)
def test_a_named_kernel_runs_or_raises_with_its_reason(name):
    spec = OPS[name]
    for call in calls_of(name)[:2]:
        for kernel in spec.table:
            problem = problem_of(kernel, call)
            if problem is None:
                assert choose(spec, call, kernel.name).kernel is kernel
            else:
                with pytest.raises(KernelUnavailable) as told:
                    choose(spec, call, kernel.name)
                assert str(told.value).endswith(problem) and f"graft::{name}" in str(told.value)


def test_native_kernels_are_entries_of_the_tables_and_each_has_its_steps():
    lowered = {target.__name__.removesuffix(".default") for target in LOWERINGS if "graft" in str(target)}
    assert lowered == {name for name, spec in OPS.items() if "native" in spec.by_name}
    for name in lowered:
        call = calls_of(name)[0]
        native = OPS[name].kernel("native")
        assert "backend='native'" in native.problem(call)
        told = OPS[name].kernel("native").problem(call.by(Asker("native", lambda: "rows lie apart")))
        assert told is not None  # what the table says, or the planner
        if native.problem(call.by(Asker("native"))) is None:
            assert told == "rows lie apart"
            assert choose(OPS[name], call.by(Asker("native"))).kernel is native
        with pytest.raises(KernelUnavailable, match="compiled step"):
            native.run()


def test_what_a_native_kernel_does_not_take_its_table_says():
    native = Asker("native")
    route, experts = calls_of("moe_route")[0].by(native), calls_of("moe_experts")[0].by(native)
    linear = calls_of("fused_linear")[0].by(native)
    bias = torch.zeros(1)
    for op, call, reason in (
        ("moe_route", route._replace(scoring="sigmoid", select_first=True), "chosen first and weighed by sigmoid"),
        ("moe_route", route._replace(groups=4, group_best=3), "groups are chosen by their 3 best experts"),
        ("moe_experts", experts._replace(gate_up_bias=bias), "experts with gate_up_bias"),
        ("moe_experts", experts._replace(gate_up_bias=None, activation="relu"), "experts with relu"),
        ("fused_linear", linear._replace(fp8_from=4), "rows of x are rounded to float8"),
        ("fused_linear", linear._replace(scale=bias), "quantized for a GPU"),
    ):
        assert reason in OPS[op].kernel("native").problem(call), reason


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        one = torch.ops.graft.rms_norm(x, self.weight, 1e-5)
        two = torch.ops.graft.rms_norm(one, self.weight, 1e-5, 1.0)  # torch's own has no offset
        return torch.ops.graft.rms_norm(two, self.weight, 1e-5)


@torch.no_grad()
def test_the_report_has_every_place_and_the_reasons_of_the_table():
    x = torch.randn(2, 8)
    report = graft_compile(Norms(), (x,)).report
    plain, offset = report.kernels["graft::rms_norm"].ran
    assert (plain.kernels, plain.kind, plain.sites, plain.skipped) == (("aten",), "existing", 2, ())
    spec = OPS["rms_norm"]
    call = spec.call(x, torch.ones(8), 1e-5, 1.0)
    assert offset.kernels == ("reference",) and offset.sites == 1
    assert offset.skipped == tuple((kernel.name, kernel.problem(call)) for kernel in spec.kernels)
    assert str(report.kernels["graft::rms_norm"]).startswith("at 2 sites aten (existing); at 1 site reference (not")
    assert Report.from_json(report.to_json()).kernels == report.kernels


def test_measured_kernels_go_first_and_what_does_not_fit_is_passed_over():
    """On the same path as on a GPU: what was measured for the tokens of a call, then the default, then the table."""
    args = make(LinearCase(1, 64, 256), "cpu", torch.float32, torch.Generator().manual_seed(0))
    spec, shape = OPS["fused_linear"], LinearShape(64, 256, "plain", False, False)
    table = {shape: {1: TunedEntry(Matvec(4, 8), 1.0, "cpu"), 8: TunedEntry(Gemm(rows=32), 1.0, "cpu")}}
    with mock.patch.object(linear_op, "needs_triton", lambda *_: None), overridden(table):
        call = spec.call(*args)
        more = call._replace(x=call.x.expand(1, 5, 256))
        assert choose(spec, call)[:2] == (spec.kernel("matvec"), Matvec(4, 8))
        assert choose(spec, more)[:2] == (spec.kernel("gemm"), Gemm(rows=32))
        bound = bind(spec, call)
        said = "by call, as measured: matvec, balanced_gemm, gemm, library, reference (not scaled_mm"
        assert str(bound.ran).startswith(said)
        seen = []
        stand_in = {"side_effect": lambda _, how: seen.append(how) or torch.zeros(64)}
        ours = linear_op.launches()
        with mock.patch.object(ours, "launch_matvec", **stand_in), mock.patch.object(ours, "launch_gemm", **stand_in):
            bound.run(*call[:-1])
            with pytest.raises(RuntimeError):  # five rows are not what the stand-in gives
                bound.run(*more[:-1])
        assert seen == [Matvec(4, 8), Gemm(rows=32)]


TABLES = st.lists(
    st.tuples(st.sampled_from(["", "static"]), st.sampled_from(["", "varies", None])), min_size=0, max_size=5
)


@settings(max_examples=examples(60), deadline=None)
@given(entries=TABLES, order=st.permutations(range(5)), measured=st.booleans())
def test_binding_and_choosing_agree_for_any_table(entries, order, measured):
    """What a graph calls once it is bound is what `choose` gives a call that is asked about from the start."""
    spec = OPS["l2_norm"]
    kernels = tuple(
        Kernel(
            f"k{i}", "triton", lambda _, p=problem: p or None, lambda *_, how=None, i=i: i,
            None if varies is None else lambda _, v=varies: v or None,
        )
        for i, (problem, varies) in enumerate(entries)
    )  # fmt: skip
    picks = [(f"k{i}", None) for i in order if i < len(kernels)] if measured else None
    made = OpSpec("l2_norm", spec.schema, lambda *_: -1, spec.fake, kernels, (lambda _: picks) if measured else None)
    call = made.call(torch.ones(2, 2), 1e-6)
    chosen, bound = choose(made, call), bind(made, call)
    assert chosen.run(*call[:-1]) == bound.run(*call[:-1])
    assert chosen.name in bound.ran.kernels
    statically = {f"k{i}" for i, (problem, _) in enumerate(entries) if problem}
    assert {name for name, _ in bound.ran.skipped} <= statically and not statically & set(bound.ran.kernels)


def test_equal_places_are_counted_and_read_back():
    one, other = Ran(("native",), "native"), Ran(("reference",), "reference", (("native", "it is int64"),))
    found = gathered([("graft::rope", one), ("graft::rope", other), ("graft::rope", one), ("graft::swiglu", one)])
    assert str(found["graft::swiglu"]) == "native" and found["graft::swiglu"].names == ("native",)
    assert str(found["graft::rope"]) == "at 2 sites native; at 1 site reference (not native: it is int64)"
    assert isinstance(found["graft::rope"], OpKernels)
