"""graft::gated_mlp: one op for two layers gives what the two give, to the bit.

Run on a GPU as well: there float8 tensor cores multiply.
"""

from __future__ import annotations

import pytest
import torch

import graft.ops.fused_linear.scaled as scaled
import graft.ops.gated_mlp.scaled as kernels
from graft.ops import OPS, choose
from graft.ops.fused_linear.triton import with_rows
from graft.ops.gated_mlp import op
from graft.ops.gated_mlp.cases import MlpCase, make
from graft.ops.gated_mlp.reference import gated_mlp
from graft.ops.selection import problem_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [
    MlpCase(9, 96, 576, norm="normed", fp8_from=2),
    MlpCase(3, 72, 208, norm="plain", bias=True, fp8_from=2),
    MlpCase(5, 64, 256, activation="gelu_tanh", norm="cast_last", residual=False, fp8_from=2),
]


def arguments(shape, dtype=torch.bfloat16, seed=0):
    return make(shape, DEVICE, dtype, torch.Generator().manual_seed(seed))


def two_layers(call):
    h = with_rows(
        scaled.launch_scaled, call.x, call.gate_up, call.gate_up_bias, call.gate_up_scale, call.norm, call.eps,
        call.offset, call.cast_last, call.activation, call.upcast, None, call.normed, call.fp8_from,
    )  # fmt: skip
    rest = (None, 0.0, 0.0, False, "none", False, call.residual, False, call.fp8_from)
    return with_rows(scaled.launch_scaled, h, call.down, call.down_bias, call.down_scale, *rest)


@pytest.mark.parametrize("few", [0, 512], ids=["scaled product", "scales after it"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.activation + (shape.norm and "-" + shape.norm))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_op_gives_the_bits_of_two(few, shape, dtype, monkeypatch):
    monkeypatch.setattr(scaled, "FEW_TOKENS", few)
    args = arguments(shape, dtype)
    expected = two_layers(OPS["gated_mlp"].call(*args))
    assert torch.equal(kernels.gated_mlp_scaled(*args), expected)
    assert expected.isfinite().all() and expected.std() > 0.1, "numbers that can differ"


@pytest.fixture(scope="module")
def right():
    """A call, and what two layers give for it."""
    call = OPS["gated_mlp"].call(*arguments(SHAPES[0]))
    return call, two_layers(call)


@pytest.mark.parametrize(
    "wrong",
    [
        {"upcast": True},
        {"gate_up_scale": lambda scale: scale.roll(1, 0)},
        {"down_scale": lambda scale: scale * 1.01},
        {"residual": lambda _: None},
        {"activation": "gelu"},
        {"eps": 0.1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_argument_changes_the_bits(wrong, right):
    call, expected = right
    ((name, change),) = wrong.items()
    other = call._replace(**{name: change(getattr(call, name)) if callable(change) else change})
    assert not torch.equal(kernels.gated_mlp_scaled(*other[:-1]), expected)


def test_the_reference_is_two_linear_layers():
    args = arguments(SHAPES[0], torch.float32)
    got, expected = kernels.gated_mlp_scaled(*args), gated_mlp(*args)
    assert (got - expected).norm() / expected.norm() < (2e-2 if DEVICE == "cuda" else 1e-5)


def test_which_kernel_runs():
    spec = OPS["gated_mlp"]
    call = spec.call(*arguments(SHAPES[0]))
    kernel = spec.kernel("scaled_mm")
    many = spec.call(*arguments(MlpCase(op.FEW + 1, 64, 64, norm="normed", fp8_from=2)))
    if DEVICE == "cuda":
        assert choose(spec, many).name == "scaled_mm" and choose(spec, call).name == "steps"
        assert "not to be rounded" in problem_of(kernel, many._replace(fp8_from=0))
        assert "float8 weights" in problem_of(kernel, many._replace(down=many.down.to(torch.int8)))
        assert "dtypes differ" in problem_of(kernel, many._replace(residual=many.residual.float()))
        assert torch.equal(spec.kernel("steps").run(*call[:-1]), kernels.gated_mlp_scaled(*call[:-1]))
    else:
        assert choose(spec, many).name == "reference"
        assert "run on a GPU" in problem_of(kernel, many)
    assert kernel.varies(many) is None and "9 tokens: as two layers" in kernel.varies(call)
    assert "not to be rounded" in kernel.varies(many._replace(fp8_from=op.FEW + 2))
