"""Which nodes, lines, writes and copies are told of which kernel, against code that is read by hand here.

Nothing is compiled by the C++ compiler: kernels are written as ever, and compute nothing.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from graft.stages.cudagraphs import SeenCudagraphs
from graft.stages.follow import follow, leaf_names
from graft.stages.kernels import kernels_of
from graft.stages.runtime import runtime_stage
from graft.stages.scheduling import stayed_apart
from graft.stages.story import Refusal, Story
from graft.stages.tell import tell_story
from graft.stages.trace import TraceCollector, TraceRow
from graft.workbench.stages.questions import what_copied, why_not_fused
from graft.workbench.stages.saved import save_story


def write(out, x):
    out.copy_(x)


LIB = torch.library.Library("stage_truth", "FRAGMENT")
LIB.define("put(Tensor(a!) out, Tensor x) -> ()")
LIB.impl("put", write, "CompositeExplicitAutograd")
torch.library.register_fake("stage_truth::put", lambda out, x: None, lib=LIB)
put = torch.ops.stage_truth.put


def branched(x, out):
    m = x * 5

    def yes(y):
        a = y.sin()
        return a * 2

    def no(y):
        b = y.cos()
        return b + 3

    r = torch.cond(x.sum() > 0, yes, no, (m,))
    own = torch.full((4,), 2.0)
    e, t = r.exp(), r.tanh()
    put(own, r)
    old = own.clone()
    put(own, e)
    put(out, t)
    return own + old, out.log()


def several(x, y):
    total, doubled, shares = x.sum(0), (y * 2).sum(1), x.softmax(1)
    return total, doubled, shares, (total[:, None] + shares).t().contiguous()


def told(function, *args, **settings) -> Story:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCompile, "cpp_pybinding", lambda *_args, **_kwargs: lambda *_given: None)
        story = tell_story(function, [args], whole=False, **settings)
    assert story.end is None
    return story


@pytest.fixture(scope="module")
def story() -> Story:
    return told(branched, torch.ones(4), torch.ones(4))


def line(text: str) -> str:
    lines, first = inspect.getsourcelines(branched)
    return f"test_kernel_truth.py:{first + [text in one for one in lines].index(True)}"


def kernels_with(story: Story, source: str) -> set[tuple[str, ...]]:
    """The lines of each kernel in whose code the text is."""
    return {one.lines for one in story.kernels.kernels if source in one.source}


def test_kernels_of_branches_have_the_lines_of_their_branch(story):
    assert kernels_with(story, "sin()") == {(line("y.sin()"), line("return a * 2"))}
    assert kernels_with(story, "cos()") == {(line("y.cos()"), line("return b + 3"))}
    (trail,) = follow(story, line("y.cos()"))
    assert trail.dynamo and trail.functional and len(trail.kernels) == 1 and not trail.gone


def test_a_call_is_not_in_the_kernel_of_its_argument_nor_that_in_the_call(story):
    (exp,) = kernels_with(story, "exp(")
    written = {place for one in story.kernels.kernels if one.source for place in one.lines}
    assert line("r.exp()") in exp and line("put(out") not in written and line("own, r)") not in written
    call = next(one for one in story.kernels.kernels if one.name.startswith("torch.ops.stage_truth.put"))
    assert set(call.lines) == {line("put(own, r)"), line("put(own, e)"), line("put(out")}
    assert call.launches == len(call.nodes) == 3 and all(node.startswith("put") for node in call.nodes)


def test_writes_of_custom_ops_are_told_with_what_became_of_them(story):
    found = {one.line: one for one in story.functional.mutations}
    assert {one.by for one in found.values()} == {"stage_truth.put"} and len(story.functional.mutations) == 3
    given = found[line("put(out")]
    assert given.written.startswith("arg") and "in place" in given.fate and given.copied_bytes == 0
    first, second = found[line("put(own, r)")], found[line("put(own, e)")]
    assert first.written == second.written and "in place" in first.fate and first.copied_bytes == 0
    assert "to a copy" in second.fate and second.copied_bytes == 16


def test_a_copy_that_a_pass_puts_in_is_not_the_program_s(story):
    (copy,) = story.scheduling.copies
    assert copy.bytes == 16 and copy.line == line("put(own, e)") and copy.reason.startswith("put in by a pass")


def test_pairs_that_are_fused_in_the_end_have_no_reason_against_it():
    story = told(several, torch.ones(8, 8), torch.ones(8, 8))
    group = {one.name: one.group for one in story.scheduling.nodes}
    assert len(set(group.values())) < len(group) and story.scheduling.refusals
    for one in story.scheduling.refusals:
        assert len({group[name] for side in (one.first, one.second) for name in leaf_names(side)}) > 1, one
    assert why_not_fused(story, "%amax", "%exp").answer.startswith("they did: both are in")
    apart = why_not_fused(story, "%sum_2", "%amax")
    assert not apart.answer.startswith("they did"), apart


def test_names_of_groups_are_those_of_their_nodes():
    assert leaf_names("op0_op12") == ["op0", "op12"]
    assert leaf_names("true_graph_0_op0_true_graph_0_op1") == ["true_graph_0_op0", "true_graph_0_op1"]
    together = {("0/0", "op0"): "op0_op1", ("0/0", "op1"): "op0_op1", ("0/0", "op2"): "op2"}
    assert not stayed_apart(Refusal("0/0", "op0", "op1", "no"), together)
    assert stayed_apart(Refusal("0/0", "op0_op1", "op2", "no"), together)


def cut(x, y):
    z = x * 2 + y
    return z.sum(0), z.view(-1)[: x.shape[0]]


def test_a_copy_of_a_result_is_not_that_of_an_argument():
    story = told(cut, torch.ones(6, 4), torch.ones(6, 4), dynamic=True)
    (copy,) = story.scheduling.copies
    assert copy.reason == "the result of aten.slice.Tensor is asked for in eager's layout"
    assert what_copied(story).answer == f"1 copy, {copy.bytes} bytes"  # an expression: not 0 bytes


def test_one_of_several_results_is_no_decomposition():
    story = told(lambda x: torch.sort(x.softmax(0))[0], torch.ones(4, 4))
    assert {one.op for one in story.functional.decompositions} == {"aten._softmax"}


CPP = """
from torch._inductor.codecache import CppWrapperCodeCache
cpp_wrapper_src = (
r'''
#include <torch/csrc/inductor/cpp_wrapper/cpu.h>
extern "C"  void  cpp_fused_add_0(const float* in_ptr0,
                       float* out_ptr0);
void inductor_entry_impl(
    AtenTensorHandle* input_handles) {
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, int_array_0, &buf0_handle));
    cpp_fused_add_0((const float*)(arg0_1.data_ptr()), (float*)(buf0.data_ptr()));
    auto buf1 = std::move(buf0);  // reuse
}
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  cpp_fused_add_0(const float* in_ptr0,
                       float* out_ptr0)
{
    {
        out_ptr0[0] = in_ptr0[0] + 1;
    }
}
'''
)
"""


def test_kernels_that_c_calls_are_read_from_its_code():
    """option cpp_wrapper: one text holds the wrapper and all kernels."""
    (kernel,) = kernels_of("0/0", CPP, {"cpp_fused_add_0": [("add",)]}, [])
    assert (kernel.language, kernel.nodes, kernel.launches) == ("cpp", ("add",), 1)
    assert kernel.source.startswith('extern "C"') and "in_ptr0[0] + 1" in kernel.source
    assert "C++ calls it" in kernel.not_timed
    collector = TraceCollector()
    collector.rows.append(TraceRow("inductor_output_code", "0/0", {}, CPP))
    stage = runtime_stage(SeenCudagraphs(), collector)
    assert (stage.allocations, stage.reused) == ({"0/0": 1}, {"0/0": 1})


def loops_and_calls(a, b):
    return (a @ b).relu().sum(1), (a + b).t().contiguous()


def test_nodes_of_the_ir_have_loops_layouts_and_buffers(tmp_path):
    story = tell_story(loops_and_calls, [(torch.ones(8, 8),) * 2])
    told = {node.kind: (node.loops, node.layout, node.reads[0], node.writes) for node in story.scheduling.nodes}
    assert told == {
        "ExternKernelOut": ("", "FixedLayout float32[8, 8] strides [8, 1]", "arg0_1", ("buf0",)),
        "Reduction": ("8, reducing 8", "FixedLayout float32[8] strides [1]", "buf0", ("buf1",)),
        "Pointwise": ("8 × 8", "FixedLayout float32[8, 8] strides [8, 1]", "arg0_1", ("buf2",)),
    }
    save_story(story, tmp_path)
    (text,) = (path.read_text() for path in (tmp_path / "graphs").glob("*_4_ir.txt"))
    assert "op1 Reduction over 8, reducing 8: buf0 → buf1, FixedLayout float32[8] strides [1]" in text


def fits_patterns(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / 4.0, -1) @ v, (q @ k.transpose(-2, -1)).reshape(-1, 16) + v[
        0, 0, 0
    ]


def test_patterns_that_matched_have_names():
    story = tell_story(fits_patterns, [(torch.ones(2, 4, 16, 16),) * 3])
    named = {name for one in story.post_grad.passes for name in one.matches}
    assert "pointless_view" in named and not any("→" in name for name in named)
    assert any(name.startswith(("_sfdp_pattern_", "a pattern of ")) for name in named)
