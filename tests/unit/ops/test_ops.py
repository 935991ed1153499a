"""Every op: reference against float64, kernels against the reference, schema, fake, and a wrong variant that fails.

Without a GPU the Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils import _pytree as pytree

import graft.ops
from graft.base.errors import KernelUnavailable, UsageError
from graft.ops import OPS, choose
from graft.ops.cases import tolerance
from graft.ops.selection import problem_of
from graft.testing.interpreter import widened
from marks import cross

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CASES = [(op, case) for op in OPS for case in importlib.import_module(f"graft.ops.{op}.cases").CASES]
IDS = [f"{op}: {case.name}" for op, case in CASES]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def every_case(*dtypes):
    """Op × case × dtype; in the short run all cases in the first dtype and one case of an op in all of them."""
    rows = cross([op for op, _ in CASES], CASES, dtypes)
    ids = [f"{name}-{str(dtype).removeprefix('torch.')}" for name in IDS for dtype in dtypes]
    return pytest.mark.parametrize(("name", "case", "dtype"), rows, ids=ids)


def make(case, dtype, device="cpu"):
    return case.make(device, dtype, torch.Generator().manual_seed(0))


def outputs(result):
    return result if isinstance(result, (tuple, list)) else (result,)


def copied(args):
    return pytree.tree_map(lambda a: a.clone() if isinstance(a, torch.Tensor) else a, list(args))


def wide(args):
    """The same values in float64."""
    return pytree.tree_map(
        lambda a: a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a, list(args)
    )


def close(left, right, dtype, reduction, scale=1.0):
    bound = scale * tolerance(dtype, reduction)
    return all(
        torch.allclose(a.double(), b.double(), rtol=bound, atol=bound)
        for a, b in zip(outputs(left), outputs(right), strict=True)
    )


def triton_kernel(name):
    try:
        module = importlib.import_module(f"graft.ops.{name}.triton")
    except ModuleNotFoundError:
        return None
    return by_measurement if name == "fused_linear" else getattr(module, f"{name}_triton")


def by_measurement(*args):
    spec = OPS["fused_linear"]
    return choose(spec, spec.call(*args)).run(*args)


def as_on_a_gpu(monkeypatch):
    """Ours are chosen where Triton's interpreter runs them, and torch's attention is not."""
    for op in ("fused_linear", "cached_attention"):
        monkeypatch.setattr(f"graft.ops.{op}.op.needs_triton", lambda *_: None)
    monkeypatch.setattr("graft.ops.cached_attention.op.counted_on_device", lambda *_: True)


def right_bfloat16(monkeypatch):
    """Triton's interpreter holds bfloat16 as whole numbers, and multiplies matrices and casts numbers as such."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product, cast = InterpreterBuilder.create_dot, InterpreterBuilder.create_si_to_fp

    def number(builder, source, target):
        if target.scalar != tl.bfloat16:
            return cast(builder, source, target)
        wide = TensorHandle(source.data.astype(np.float32), tl.float32)
        return builder.create_fp_trunc(wide, target)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda builder, a, b, *rest: product(builder, widened(a), widened(b), *rest)
    )
    monkeypatch.setattr(InterpreterBuilder, "create_si_to_fp", number)


@every_case(*DTYPES)
def test_reference_agrees_with_float64(name, case, dtype):
    """The 16-bit references round several times on the way (norm, product, sum), hence the factor."""
    args = make(case, dtype)
    exact = OPS[name].reference(*wide(copied(args)))
    assert close(OPS[name].reference(*copied(args)), exact, dtype, case.reduction, scale=4)


@pytest.mark.some(45)
@every_case(*DTYPES)
def test_triton_agrees_with_the_reference(name, case, dtype, monkeypatch):
    kernel = triton_kernel(name)
    if kernel is None:
        pytest.skip(f"graft::{name} runs on an existing kernel; it has no Triton kernel")
    if not CUDA:
        right_bfloat16(monkeypatch)
        as_on_a_gpu(monkeypatch)
    args = make(case, dtype, DEVICE)
    expected = OPS[name].reference(*copied(args))
    assert close(kernel(*args), expected, dtype, case.reduction, scale=4)


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_existing_kernels_agree_with_the_reference(name, case):
    args = make(case, torch.float32)
    for kernel in OPS[name].kernels:
        if kernel.kind == "existing" and problem_of(kernel, OPS[name].call(*args)) is None:
            assert close(kernel.run(*copied(args)), OPS[name].reference(*copied(args)), torch.float32, case.reduction)


WRONG = {
    "rms_norm": lambda args: (args[0], args[1], args[2] + 0.05, *args[3:]),
    "layer_norm": lambda args: (*args[:3], args[3] + 0.05, *args[4:]),
    "add_rms_norm": lambda args: (args[0], args[1] * 1.05, *args[2:]),
    "swiglu": lambda args: (args[0], args[1], "gelu" if args[2] != "gelu" else "gelu_tanh", *args[3:]),
    "rope": lambda args: (args[0], args[1], -args[2], *args[3:]),
    "advance_rows": lambda args: (*args[:6], args[6] + 1000, args[7] + 1),
    "argmax_rows": lambda args: (-args[0],),
    "deliver_rows": lambda args: (args[0], args[1] + 1, args[2]),
    "attention": lambda args: (*args[:4], args[4] * 1.05, *args[5:]),
    "fused_linear": lambda args: (*args[:10], (args[10] if args[10] is not None else 0) + 0.05, *args[11:]),
    "gated_mlp": lambda args: (*args[:2], args[2] * 1.05, *args[3:]),
    "linear": lambda args: (args[0] * 1.05, *args[1:]),
    "moe_route": lambda args: (args[0] * 2, *args[1:]),
    "moe_experts": lambda args: (args[0], args[1] * 1.05, *args[2:]),
    "paged_attention": lambda args: (*args[:11], args[11] * 1.05, *args[12:]),
    "cached_attention": lambda args: (*args[:8], args[8] * 1.05, *args[9:]),
    "rope_kv_write": lambda args: (*args[:4], -args[4], *args[5:]),
    "rope_attention": lambda args: (*args[:4], -args[4], *args[5:]),
    "latent_attention": lambda args: (*args[:4], args[4] * 1.05),
    "paged_latent_attention": lambda args: (*args[:11], args[11] * 1.05),
    "packed_embedding": lambda args: (*args[:2], (args[2] + 1) % args[1].shape[0], *args[3:]),
}


@every_case(torch.float32, torch.float16)
def test_a_wrong_variant_is_caught(name, case, dtype):
    """The tolerance of the tests above rejects a slightly wrong op (another eps, scale, sign or activation)."""
    if "one token" in case.name:
        pytest.skip("one key has weight 1 whatever the scale")
    if name == "swiglu" and case.make.args[1].startswith("gelu") and dtype is torch.float16:
        pytest.skip("float16 cannot tell the tanh form of gelu from the erf form")
    args = make(case, dtype)
    expected = OPS[name].reference(*copied(args))
    vary = WRONG.get(name) or importlib.import_module(f"graft.ops.{name}.cases").wrong
    wrong = OPS[name].reference(*vary(copied(args)))
    assert not close(wrong, expected, dtype, case.reduction, scale=4)


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_schema_and_fake_are_right(name, case):
    args = tuple(make(case, torch.float32))
    op = getattr(torch.ops.graft, name).default
    # torch's check of the schema compares inputs before and after, which it cannot do for 8-bit floats
    eight_bit = any(isinstance(a, torch.Tensor) and a.dtype is torch.float8_e4m3fn for a in args)
    checks = ("test_faketensor",) if eight_bit else ("test_schema", "test_faketensor")
    torch.library.opcheck(op, args, test_utils=checks)


def test_paged_attention_equals_attention_over_whole_sequences():
    """Feeding a sequence in chunks through the cache gives what attention over the whole gives."""
    g = torch.Generator().manual_seed(1)
    h, kv, d, n, block = 4, 2, 16, 29, 8
    q, k, v = (torch.randn(1, heads, n, d, generator=g) for heads in (h, kv, kv))
    table = torch.tensor([[5, 1, 3, 0]])
    for window in (None, 7):
        whole = torch.ops.graft.attention(q, k, v, None, d**-0.5, True, window)
        caches = [torch.zeros(6, block, kv, d) for _ in range(2)]
        parts, first = [], 0
        for last in (11, 12, 13, 20, n):
            places = torch.arange(first, last)
            slots = table[0, places // block] * block + places % block
            lens_cpu = torch.tensor([[last - first, last]])
            layout = (slots, slots * 0, table, torch.tensor([0, last - first]), torch.tensor([last]), lens_cpu)
            chunk = (t[:, :, first:last] for t in (q, k, v))
            parts.append(torch.ops.graft.paged_attention(*chunk, *caches, *layout, d**-0.5, window))
            first = last
        torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_named_kernel_runs_or_raises():
    spec = OPS["rms_norm"]
    call = spec.call(torch.randn(2, 8), torch.randn(8), 1e-5)
    assert choose(spec, call, "reference").kernel.kind == "reference"
    assert choose(spec, call).name == "aten"
    assert choose(spec, call._replace(x=call.x.half(), weight=call.weight.half())).name == "reference"
    with pytest.raises(KernelUnavailable, match="run on a GPU"):
        choose(spec, call, "triton")
    with pytest.raises(KernelUnavailable, match="compiled step of backend='native'"):
        choose(spec, call, "native")
    with pytest.raises(UsageError, match="did you mean 'triton'"):
        choose(spec, call, "tritn")


def test_ops_carry_no_backend_in_their_names():
    assert not any(word in name for name in graft.ops.OPS for word in ("triton", "torch", "cuda", "cpu"))
