"""The experts of a few tokens as GEMVs, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from test_ops import close, right_bfloat16

from graft.ops import OPS, choose
from graft.ops.moe_experts.cases import GPT_OSS, make, make_gpt_oss, make_llama4, make_packed
from graft.ops.moe_experts.gemv import Sizes, moe_experts_gemv, sizes_for
from graft.ops.moe_experts.op import gemv_problem, many_tokens, measured
from graft.ops.moe_experts.triton import moe_experts_triton
from graft.ops.selection import problem_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = OPS["moe_experts"]
# (e, f, d): a program's rows and depths do not divide them
MADE = {
    "one token": lambda *a: make(1, 2, (4, 40, 72), "silu", False, "random", *a),
    "weights in the working dtype, three experts": lambda *a: make(
        2, 3, (5, 17, 24), "gelu_tanh", True, "random", *a
    ),
    "the same experts twice": lambda *a: make(2, 2, (6, 16, 24), "gelu", False, "one", *a),
    "transposed, biases, gate and up in turns": lambda *a: make_gpt_oss(2, 4, (8, 36, 40), *a),
    "weighs what goes in": lambda *a: make_llama4(2, (4, 24, 32), *a),
    "int8": lambda *a: make_packed(2, 2, (3, 17, 72), "int8", {}, *a),
    "int4, biases": lambda *a: make_packed(1, 2, (3, 24, 136), "int4", GPT_OSS, *a),
    "fp8, weighs what goes in": lambda *a: make_packed(2, 1, (4, 40, 72), "fp8", {"weigh_input": True}, *a),
}


def arguments(name, dtype):
    return MADE[name](DEVICE, dtype, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_it_agrees_with_the_reference_and_a_wrong_variant_does_not(name, dtype, monkeypatch):
    if DEVICE == "cpu":
        right_bfloat16(monkeypatch)
    args = arguments(name, dtype)
    reduction, found = max(args[0].shape[1], args[3].shape[1] // 2), moe_experts_gemv(*args)
    assert close(found, SPEC.reference(*args), dtype, reduction, scale=4)
    x, weights, ids, *rest = args
    assert not close(found, SPEC.reference(x, weights * 1.5, ids, *rest), dtype, reduction, scale=4)
    assert not close(
        found, SPEC.reference(x, weights, (ids + 1) % rest[0].shape[0], *rest), dtype, reduction, scale=4
    )


@pytest.mark.parametrize("name", ["int8", "int4, biases", "fp8, weighs what goes in"])
@pytest.mark.parametrize("run", [moe_experts_gemv, moe_experts_triton])
def test_packed_experts_are_read_with_their_own_scales(name, run):
    args = list(arguments(name, torch.float32))
    right, found = SPEC.reference(*args), run(*args)
    assert close(found, right, torch.float32, 200, scale=4)
    for place in (10, 11):
        wrong = list(args)
        wrong[place] = args[place].roll(1, 0)  # the neighbouring expert's
        assert not close(found, SPEC.reference(*wrong), torch.float32, 200, scale=4)


def test_packed_experts_may_have_other_sizes():
    args = arguments("int4, biases", torch.float32)
    found = moe_experts_gemv(*args, up_sizes=Sizes(8, 32, 1), down_sizes=Sizes(32, 64, 1))
    assert close(found, SPEC.reference(*args), torch.float32, 200, scale=4)


def test_who_takes_packed_experts(monkeypatch):
    """The reference without a GPU, gemv for few tokens and triton for many on one; never kernels of floats."""
    call = SPEC.call(*arguments("int8", torch.float32))
    assert [problem_of(SPEC.by_name[name], call) for name in ("aten", "grouped_mm")] == ["the experts are packed"] * 2
    if DEVICE == "cpu":
        assert choose(SPEC, call).name == "reference" and "run on a GPU" in problem_of(SPEC.by_name["triton"], call)
        monkeypatch.setattr("graft.ops.moe_experts.op.needs_triton", lambda *_: None)
    assert choose(SPEC, call._replace(ids=call.ids[:1])).name == "gemv" and choose(SPEC, call).name == "triton"
    turns, tiles = call._replace(interleaved=True), call._replace(gate_up=call.gate_up.view(torch.uint8))
    assert "take turns" in problem_of(SPEC.by_name["triton"], turns)
    assert "packed for another backend" in problem_of(SPEC.by_name["gemv"], tiles)


PROGRAM = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from graft.ops.fused_linear.widen import PARTS, TOO_MUCH
from graft.ops.moe_experts.gemv_packed import down_packed_gemv, gate_up_packed_gemv
from graft.ops.moe_experts.grouped_packed import down_packed_kernel, gate_up_packed_kernel

FIXED = dict(ACTIVATION="silu", BIAS=True, WEIGH=False, NARROW=True, K=8, UNROLL=2, STEPS=2, PDL=True)
FIXED |= dict(E=128, UPCAST=False, COLS=64)
EVEN = ("width", "stride_x", "d", "f")
LONG, WORDS = ("ids", "order", "ends"), ("gate_up", "down")
for kernel in (gate_up_packed_gemv, down_packed_gemv, gate_up_packed_kernel, down_packed_kernel):
    for kind in sys.argv[1:]:
        fixed = FIXED | dict(KIND=kind, PARTS=PARTS[kind], FAST=True, TOO_MUCH=TOO_MUCH.get(kind, 0.0))
        gemv = "gemv" in kernel.__name__
        fixed |= dict(ROWS=1, DEPTH=256 if "down" in kernel.__name__ else 1024) if gemv else dict(ROWS=16, DEPTH=64)
        signature, constants = {}, {}
        for place, name in enumerate(kernel.arg_names):
            if name.isupper():
                signature[name], constants[(place,)] = "constexpr", fixed[name]
            elif name in LONG:
                signature[name] = "*i64"
            elif name in WORDS:
                signature[name] = "*i16"
            elif name in ("x", "bias", "weights", "hidden", "out"):
                signature[name] = "*bf16"
            elif name == "scale":
                signature[name] = "*bf16" if kind == "int4" else "*fp32"
            else:
                signature[name] = "i32"
        even = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
                if signature[name].startswith("*") or name in EVEN}
        source = ASTSource(kernel, signature, constants, even)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        code = made.asm["ptx"]
        wide = "wide" if "ld.global" in code and ".v4.b32" in code or "cp.async" in code else "narrow"
        print(kernel.__name__, kind, "tensor cores" if "mma" in code else "lanes", wide, made.metadata.shared)
"""


@pytest.mark.exhaustive  # the short run has them in the interpreter
def test_packed_kernels_compile_for_a_gpu(tmp_path):
    """16 bytes at a time; the grouped ones multiply on tensor cores. In a process of its own: one that has imported
    Triton for its interpreter compiles no kernel."""
    program = tmp_path / "kernels.py"  # Triton reads the source of its functions
    program.write_text(PROGRAM)
    kinds = ("int8", "int4", "fp8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program), *kinds], env=environment, capture_output=True, text=True, check=False
    )
    found = re.findall(r"^(\w+) (\w+) (tensor cores|lanes) (wide|narrow) (\d+)$", done.stdout, re.MULTILINE)
    assert len(found) == 4 * len(kinds), done.stderr[-2000:]
    for name, kind, how, loads, shared in found:
        assert how == ("lanes" if "gemv" in name else "tensor cores"), (name, kind)
        assert loads == "wide" and int(shared) <= 227 * 1024, (name, kind)


def test_any_sizes_give_the_same():
    args = arguments("weights in the working dtype, three experts", torch.float32)
    expected = SPEC.reference(*args)
    for up, down in ((Sizes(1, 8, 1), Sizes(8, 8, 1)), (Sizes(16, 32, 2), Sizes(1, 64, 2))):
        assert close(moe_experts_gemv(*args, up_sizes=up, down_sizes=down), expected, torch.float32, 24, scale=4)


def test_tokens_and_tables_may_be_parts_of_wider_tensors():
    x, weights, ids, *rest = arguments("the same experts twice", torch.float32)
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]], torch.stack([ids, ids], -1)[..., 0]
    assert not wide[0].is_contiguous() and not wide[1].is_contiguous()
    assert close(moe_experts_gemv(wide[0], weights, wide[1], *rest), SPEC.reference(x, weights, ids, *rest),
                 torch.float32, 24, scale=4)  # fmt: skip


def test_which_calls_it_takes():
    """One token always; more while most of their experts are different ones."""

    def asked(n, k, e):
        ids = torch.zeros(n, k, dtype=torch.int64)
        return many_tokens(
            SPEC.call(torch.zeros(n, 8), ids.float(), ids, torch.zeros(e, 16, 8), torch.zeros(e, 8, 8))
        )

    assert [asked(*sizes) for sizes in ((1, 8, 8), (8, 8, 128), (2, 2, 8), (4, 4, 32))] == [None] * 4
    for sizes in ((9, 8, 128), (3, 2, 8), (2, 8, 8)):
        assert f"{sizes[0]} tokens with {sizes[1]} experts each" in asked(*sizes)


def test_few_tokens_take_the_kernels_that_were_measured_to_be_faster(monkeypatch):
    """One token gemv, a few triton, many torch's; on a CPU and for weights of another layout it says why not."""
    call = SPEC.call(*arguments("one token", torch.float32))
    if DEVICE == "cpu":
        assert choose(SPEC, call).name == "aten" and "run on a GPU" in problem_of(SPEC.by_name["gemv"], call)
        monkeypatch.setattr("graft.ops.moe_experts.op.needs_triton", lambda *_: None)
        monkeypatch.setattr("graft.ops.moe_experts.op.aten_problem", lambda *_: "not here")
    assert gemv_problem(call) is None
    assert "neither as" in gemv_problem(call._replace(down=call.down.repeat(1, 2, 2)[:, ::2, ::2]))
    assert "x is torch.float16" in gemv_problem(call._replace(x=call.x.half()))
    assert choose(SPEC, call, "gemv").name == "gemv"
    gpu = call._replace(x=SimpleNamespace(device=torch.device("cuda")))
    assert [name for name, _ in measured(gpu)] == ["gemv", "triton"]
    assert [name for name, _ in measured(gpu._replace(down=call.down.mT.contiguous().mT))] == ["triton"]
    assert measured(gpu._replace(ids=call.ids.expand(65, -1))) == []


def test_sizes_follow_the_layout():
    rows, columns = torch.empty(2, 64, 4096), torch.empty(2, 4096, 64).transpose(1, 2)
    assert sizes_for(rows, 4096) == Sizes(4, 1024, 4) and sizes_for(rows, 40).depth == 64
    assert sizes_for(columns, 4096).rows > sizes_for(rows, 4096).rows
    assert sizes_for(rows, 4096, 8) == Sizes(4, 256, 4) and sizes_for(rows, 4096, 2) == Sizes(4, 1024, 4)
