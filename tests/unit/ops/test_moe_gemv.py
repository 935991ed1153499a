"""The experts of a few tokens as GEMVs, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_ops import close, right_bfloat16

from graft.ops import OPS, choose
from graft.ops.moe_experts.cases import make, make_gpt_oss, make_llama4
from graft.ops.moe_experts.gemv import Sizes, moe_experts_gemv, sizes_for
from graft.ops.moe_experts.op import gemv_problem, many_tokens, measured
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
}


def arguments(name, dtype):
    return MADE[name](DEVICE, dtype, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_it_agrees_with_the_reference_and_a_wrong_variant_does_not(name, dtype, monkeypatch):
    if DEVICE == "cpu":
        right_bfloat16(monkeypatch)
    args = arguments(name, dtype)
    reduction, found = max(args[3].shape[2], args[4].shape[2]), moe_experts_gemv(*args)
    assert close(found, SPEC.reference(*args), dtype, reduction, scale=4)
    x, weights, ids, *rest = args
    assert not close(found, SPEC.reference(x, weights * 1.5, ids, *rest), dtype, reduction, scale=4)
    assert not close(
        found, SPEC.reference(x, weights, (ids + 1) % rest[0].shape[0], *rest), dtype, reduction, scale=4
    )


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
