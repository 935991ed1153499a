"""graft::elementwise: the language of its programs, and every kernel against plain torch."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.errors import ProgramError, UsageError
from graft.ops import OPS, choose
from graft.ops.cases import UNIT
from graft.ops.elementwise.codegen import COMPARISONS, triton_problem, triton_source
from graft.ops.elementwise.inductor import elementwise_inductor, inductor_problem, python_source
from graft.ops.elementwise.layout import loop_of
from graft.ops.elementwise.program import DTYPES, SIGNATURES, Call, Program, Ref, parse
from graft.ops.elementwise.reference import elementwise, kinds_of
from graft.ops.elementwise.triton import elementwise_triton

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SOFT_CAP = "t0 = div(i0, 30.0); t1 = tanh(t0); t2 = mul(t1, 30.0); return t2"
MADD = "t0 = mul(i0, i1); t1 = add(t0, 0.5); return t1, t0"


@pytest.fixture(autouse=True)
def right_rounding(monkeypatch):
    """Triton's interpreter cuts float32 to bfloat16 where hardware rounds; here it rounds too."""
    old = interpreter._convert_float

    def convert(given, source, target, mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = torch.from_numpy(given.copy()).to(torch.bfloat16).view(torch.int16)
            return bits.numpy().view("uint16").reshape(given.shape)
        return old(given, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


# ── the language ────────────────────────────────────────────────────────────────────────────────────────────────

numbers = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=True))


@st.composite
def programs(draw):
    """Any program: arguments of the right kind, inputs named in the order in which they are first read."""
    calls, inputs = [], 0
    for index in range(draw(st.integers(1, 6))):
        op = draw(st.sampled_from(sorted(SIGNATURES)))
        args = []
        for place, kind in enumerate(SIGNATURES[op]):
            if kind == "d":
                args.append(draw(st.sampled_from(list(DTYPES.values()))))
            elif kind == "n" or (kind == "s" and place != 1 and draw(st.booleans())):
                args.append(draw(numbers))
            else:
                value = draw(st.integers(0, index + inputs))
                args.append(Ref("t", value) if value < index else Ref("i", value - index))
                inputs = max(inputs, value - index + 1)
        calls.append(Call(op, tuple(args)))
    if not inputs:
        calls = [Call("exp", (Ref("i", 0),))]
    returns = draw(st.lists(st.integers(0, len(calls) - 1), min_size=1, unique=True))
    return Program(tuple(calls), tuple(returns))


@given(programs())
@settings(max_examples=200, deadline=None)
def test_a_program_reads_back_as_itself_r20(program):
    again = parse(program.text)
    assert again.text == program.text
    assert repr(again) == repr(program)  # also the type of every number: 1 is not 1.0, nor True


BAD = {
    "": (0, "expected 'name', found 'the end'"),
    "return t0": (0, "at least one value"),
    "t0 = exp(i0)": (12, "expected ';'"),
    "t0 = exp(i0); return t1": (21, "t1 is read before"),
    "t0 = exp(t0); return t0": (9, "t0 is read before"),
    "t1 = exp(i0); return t1": (0, "the next value is t0"),
    "t0 = exp(i1); return t0": (23, "i0 is never read"),
    "t0 = erfinv(i0); return t0": (5, "'erfinv' is not an op; known are abs, add"),
    "t0 = exp(i0, i1); return t0": (11, "expected ')'"),
    "t0 = mul(i0); return t0": (11, "expected ','"),
    "t0 = exp(2.0); return t0": (9, "expected a tensor, found '2.0'"),
    "t0 = to(i0, complex64); return t0": (12, "expected a dtype"),
    "t0 = clamp(i0, i1, 2.0); return t0": (15, "expected a number"),
    "t0 = where(i0, 1.0, 2.0); return t0": (5, "where needs a tensor"),
    "t0 = exp(i0); return i0": (21, "is an input"),
    "t0 = exp(i0); return t0, t0": (25, "returned already"),
    "t0 = exp(i0); return t0;": (23, "expected ','"),
    "t0 = exp(i0) ; return t0": (12, "is spelled"),
    "t0 = mul(i0, 1.50); return t0": (16, "is spelled"),
    "t0 = mul(i0, 1e400); return t0": (13, "is spelled"),
    "t0 = mul(i0, $); return t0": (13, "not part of the language"),
    "t0 = mul(i0, 1.0x); return t0": (13, "not part of the language"),
    "t0 = exp(i01); return t0": (9, "neither an input"),
    "t0 = exp(__import__); return t0": (9, "not part of the language"),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_programs_are_errors_with_their_position_r20(text):
    position, message = BAD[text]
    with pytest.raises(ProgramError) as error:
        parse(text)
    assert f"at position {position}: " in str(error.value) and message in str(error.value)


@given(st.text(alphabet="it0=mulexpadd(), ;.5return", max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_other_text_is_refused_and_nothing_else_happens(text):
    try:
        program = parse(text)
    except ProgramError:
        return
    assert program.text == text


# ── every op in the generated kernel ────────────────────────────────────────────────────────────────────────────

POSITIVE = {"log", "sqrt", "rsqrt"}
EXACT = {"add", "sub", "rsub", "mul", "neg", "abs", "relu", "minimum", "maximum", "clamp", "clamp_min", "clamp_max"}
EXACT |= {*COMPARISONS, "where", "to", "logical_and", "logical_or", "logical_not", "div", "reciprocal"}


def single(op, dtype):
    """A program of one op, with literals that 16 bits cannot hold."""
    low = "-0.25" if op == "rsub" else "-0.3"  # ATen rounds the number of rsub on a CPU and does not on a GPU
    names = {"t": ["i0", "i1"], "s": ["i1", "i1"], "n": [low, "0.7"], "d": ["float32", "float32"]}
    counts = dict.fromkeys(names, 0)
    args = []
    for kind in SIGNATURES[op]:
        args.append(names[kind][counts[kind]])
        counts[kind] += 1
    if op == "where":
        return "t0 = gt(i0, 0.1); t1 = where(t0, i1, 0.3); return t1"
    return f"t0 = {op}({', '.join(args)}); return t0"


def values(dtype, seed, positive=False):
    x = torch.randn(1500, generator=torch.Generator().manual_seed(seed)) * 3
    x = x.abs() + 0.01 if positive else x
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-3, 50.0])
    special = special if positive else torch.cat((special, torch.tensor([float("-inf"), -50.0, -1e-3])))
    return torch.cat((x, special)).to(DEVICE, dtype)


def close(got, wanted, dtype, units):
    return torch.allclose(got.double(), wanted.double(), rtol=units * UNIT[dtype], atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", [op for op in SIGNATURES if not op.startswith("bitwise")])
def test_every_op_is_generated_as_eager_computes_it_r20(op, dtype):
    program = single(op, dtype)
    inputs = [values(dtype, seed, op in POSITIVE) for seed in range(parse(program).inputs)]
    (got,), (wanted,) = elementwise_triton(inputs, program), elementwise(inputs, program)
    assert got.dtype == wanted.dtype
    if op in EXACT:
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(got.isnan(), wanted.isnan())
    if op == "gelu":  # ATen's own kernels disagree about infinity
        finite = inputs[0].isfinite()
        got, wanted = got[finite], wanted[finite]
    assert close(got, wanted, wanted.dtype if wanted.is_floating_point() else torch.float32, 8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", [*COMPARISONS, "mul", "add", "sub"])
def test_numbers_are_rounded_as_eager_rounds_them_r20(op, dtype):
    """Comparisons against a number see it in the tensor's dtype, products in float32."""
    number = 0.25 if op in ("add", "sub") and not CUDA else 0.3  # a CPU rounds the number of a sum
    inputs = [torch.cat((values(dtype, 0), torch.full((4,), number, dtype=dtype, device=DEVICE)))]
    program = f"t0 = {op}(i0, {number}); return t0"
    (got,), (wanted,) = elementwise_triton(inputs, program), elementwise(inputs, program)
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_wrong_op_is_caught(dtype):
    """The check above tells an op from its nearest neighbour, and a literal from one that is 10 % off."""
    x = [values(dtype, 0)]
    for right, wrong in (("gelu", "silu"), ("tanh", "erf"), ("softplus", "relu"), ("sigmoid", "gelu")):
        (got,) = elementwise_triton(x, f"t0 = {wrong}(i0); return t0")
        assert not close(got, elementwise(x, f"t0 = {right}(i0); return t0")[0], dtype, 8)
    (got,) = elementwise_triton(x, SOFT_CAP.replace("mul(t1, 30.0)", "mul(t1, 33.0)"))
    assert not close(got, elementwise(x, SOFT_CAP)[0], dtype, 8)


LITERALS = (
    "t0 = add(i0, 0.3); t1 = mul(t0, 0.7); t2 = sub(t1, 1.1); t3 = div(t2, 0.3); t4 = rsub(t3, 0.9); t5 = tanh(t4);"
    " t6 = mul(t5, i1); t7 = clamp(t6, -0.3, 0.7); t8 = le(t7, -0.3); t9 = where(t8, t1, 0.1); t10 = mul(t9, 3);"
    " t11 = clamp_min(t10, 0.1); t12 = ge(t11, 0.1); t13 = to(t12, float32); t14 = mul(t13, t11); return t14, t6"
)
MASKS = [
    "t0 = le(i0, i1); t1 = gt(i0, 3); t2 = bitwise_and(t0, t1); t3 = bitwise_not(t2); t4 = logical_not(i2);"
    " t5 = bitwise_or(t3, t4); return t5, t0",
    "t0 = sub(i0, i1); t1 = mul(t0, 3); t2 = maximum(t1, i0); t3 = abs(t2); t4 = neg(t3); t5 = clamp(t4, -9, 4);"
    " return t5, t2",
    "t0 = add(i0, 0.5); t1 = div(i0, i1); t2 = to(i2, float32); t3 = mul(t0, t2); t4 = lt(i0, 2.5);"
    " t5 = where(t4, t3, t1); t6 = to(t5, int64); t7 = to(i0, bool); t8 = exp(i0); return t5, t6, t7, t8",
    "t0 = eq(i2, True); t1 = lt(i2, t0); t2 = logical_or(t0, i0); t3 = to(t1, int32); t4 = ne(i1, 2.0);"
    " return t0, t1, t2, t3, t4",
    "t0 = gt(i0, i1); t1 = where(i2, t0, False); t2 = bitwise_not(t1); t3 = logical_not(t2); return t1, t2, t3",
    "t0 = relu(i0); t1 = rsub(t0, 2); t2 = minimum(t1, i1); t3 = logical_and(t2, i2); return t0, t1, t2, t3",
]


@pytest.mark.parametrize("program", MASKS)
def test_integers_and_masks_are_exact_r20(program):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-5, 8, (3, 50), generator=g) for _ in range(2))
    b = torch.where(b == 0, 1, b)
    inputs = [t.to(DEVICE) for t in (a, b, torch.rand(3, 50, generator=g) < 0.5)][: parse(program).inputs]
    for got, wanted in zip(elementwise_triton(inputs, program), elementwise(inputs, program), strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


CHAINS = [
    "t0 = mul(i0, i1); t1 = add(t0, i0); t2 = mul(t1, 0.044715); t3 = sub(t2, i1); t4 = rsub(t3, 1.0); return t4",
    "t0 = add(i0, 1.0); t1 = to(t0, float32); t2 = mul(t1, t1); t3 = to(t2, bfloat16); t4 = add(t3, i1); return t4",
    "t0 = to(i0, float16); t1 = mul(t0, 1.1); t2 = to(i1, bfloat16); t3 = add(t1, t2); return t3",
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("program", CHAINS)
def test_chains_round_between_ops_as_eager_does_r20(program, dtype):
    """Bit for bit where no function beyond + - × is involved; rounding once at the end would show."""
    inputs = [torch.randn(2000, generator=torch.Generator().manual_seed(s)).to(DEVICE, dtype) for s in range(2)]
    for got, wanted in zip(elementwise_triton(inputs, program), elementwise(inputs, program), strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    once = elementwise([t.float() for t in inputs], CHAINS[0])[0].to(dtype)
    assert torch.equal(once, elementwise(inputs, CHAINS[0])[0]) == (dtype is torch.float32)


# ── layouts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def layouts(dtype=torch.float32):
    """Pairs of inputs that walk memory in every way there is."""
    g = torch.Generator().manual_seed(3)

    def r(*shape):
        return torch.randn(shape, generator=g).to(DEVICE, dtype)

    return {
        "contiguous": (r(2, 3, 8), r(2, 3, 8)),
        "vector over rows": (r(2, 3, 8), r(8)),
        "column": (r(2, 3, 8), r(2, 3, 1)),
        "middle": (r(2, 3, 8), r(2, 1, 8)),
        "outer": (r(4, 1), r(1, 5)),
        "transposed": (r(8, 3).t(), r(3, 8)),
        "both transposed": (r(8, 3).t(), r(8, 3).t()),
        "permuted": (r(2, 3, 4, 5).permute(0, 2, 1, 3), r(2, 4, 3, 5)),
        "slice of a wider row": (r(4, 16)[:, 3:11], r(4, 16)[:, 8:]),
        "every second": (r(20)[::2], r(10)),
        "expanded": (r(1, 6).expand(5, 6), r(5, 6)),
        "expanded scalar": (r(1, 1).expand(5, 6), r(1).expand(5, 6)),
        "0-d and rows": (r(5, 6), r()),
        "both 0-d": (r(), r()),
        "one element": (r(1, 1), r(1)),
        "one element and 0-d": (r(1), r()),
        "empty": (r(0, 4), r(4)),
        "empty last": (r(3, 0), r(3, 1)),
        "lower rank first": (r(8), r(2, 3, 8)),
        "more than a block": (r(3, 700), r(700)),
    }


@pytest.mark.parametrize("name", layouts())
def test_any_strides_give_eager_s_result_contiguous_r20(name):
    inputs = layouts()[name]
    a, b = inputs
    expected = [a * b + 0.5, a * b]
    abstract = OPS["elementwise"].fake([t.to("meta") for t in inputs], MADD)
    for results in (elementwise_triton(inputs, MADD), elementwise(inputs, MADD), abstract):
        for got, wanted in zip(results, expected, strict=True):
            assert got.shape == wanted.shape and got.is_contiguous()
            if not got.is_meta:
                assert torch.equal(got, wanted)


def test_the_loop_merges_what_all_walk_alike():
    def sizes(*tensors):
        return loop_of(tensors).sizes

    x = torch.empty(2, 5, 64)
    assert sizes(x, x) == (640,)
    assert sizes(x, torch.empty(64)) == (10, 64)
    assert sizes(x, torch.empty(2, 5, 1)) == (10, 64)
    assert sizes(x, torch.empty(2, 1, 64)) == (2, 5, 64)
    assert sizes(x, x.transpose(0, 1).contiguous().transpose(0, 1)) == (2, 5, 64)
    assert sizes(x, torch.empty(())) == (640,)
    assert sizes(torch.empty(1, 1), torch.empty(())) == (1,)
    assert sizes(torch.empty(())) == ()
    assert loop_of((x, torch.empty(64))).strides == ((64, 1), (0, 1))


def test_offsets_beyond_32_bits_are_counted_wide():
    far = torch.empty(1, device="meta").as_strided((2, 3), (2**31, 1))
    assert loop_of((far,)).reach == 2**31 + 2


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(CUDA, reason="Inductor's kernel is for a CPU")
def test_inductor_compiles_once_for_all_sizes_and_rounds_as_eager_does_r20():
    """In bfloat16, where rounding only at the end would show, with numbers that 16 bits cannot hold."""
    from torch._dynamo.utils import counters

    program = LITERALS
    problem = inductor_problem([torch.ones(1).bfloat16()], program)
    if problem:
        pytest.skip(problem)
    counters.clear()
    for shape in ((4, 4), (2, 3, 8), (7, 64), (5, 1, 3), (9, 33)):
        inputs = [torch.randn(shape).bfloat16(), torch.randn(shape[-1]).bfloat16()]
        for got, wanted in zip(elementwise_inductor(inputs, program), elementwise(inputs, program), strict=True):
            assert got.is_contiguous()
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)  # far below a rounding to bfloat16
    assert counters["stats"]["unique_graphs"] <= 2  # the square one may have tied its two sizes
    assert elementwise_inductor([torch.empty(0, 4).bfloat16(), torch.ones(4).bfloat16()], program)[0].shape == (0, 4)


@pytest.mark.skipif(CUDA, reason="Inductor's kernel is for a CPU")
def test_inductor_takes_any_strides_r20():
    for name in ("transposed", "slice of a wider row", "both 0-d"):
        inputs = layouts()[name]
        for got, wanted in zip(elementwise_inductor(inputs, MADD), elementwise(inputs, MADD), strict=True):
            assert torch.equal(got, wanted) and got.is_contiguous()


def test_what_is_generated_can_be_read_r20():
    x = torch.empty(4, 8)
    source = triton_source(SOFT_CAP, kinds_of([x]), loop_of([x]).pattern)
    assert source.startswith(f"# {SOFT_CAP}\n@triton.jit\ndef elementwise_kernel(")
    assert "t1 = tanh(t0)" in source and ".to(tl.bfloat16)" not in source
    assert ".to(tl.bfloat16)" in triton_source(SOFT_CAP, kinds_of([x.bfloat16()]), loop_of([x]).pattern)
    assert python_source(SOFT_CAP, kinds_of([x])) == (
        "def elementwise(i0):\n    t0 = div(i0, 30.0)\n    t1 = tanh(t0)\n    t2 = mul(t1, 30.0)\n"
        "    return [t2.contiguous()]\n"
    )


def test_kernels_say_what_they_cannot_do_r25():
    spec, x = OPS["elementwise"], torch.randn(3)
    assert choose(spec, spec.call([x], SOFT_CAP)).name == "inductor"
    assert "on a GPU" in spec.kernel("triton").problem(spec.call([x], SOFT_CAP))
    assert "float64" in triton_problem(SOFT_CAP, kinds_of([x.double()]))
    assert "add of booleans" in triton_problem("t0 = add(i0, i0); return t0", kinds_of([x > 0]))
    assert "cpu" in spec.kernel("inductor").problem(spec.call([x.to("meta")], SOFT_CAP)).lower()
    for kernel in (elementwise, elementwise_inductor, elementwise_triton, torch.ops.graft.elementwise):
        with pytest.raises(UsageError, match="got 2 inputs, but its program reads 1"):
            kernel([x, x], SOFT_CAP)


def test_results_are_the_op_s_own():
    """Also where a cast changes nothing: a custom op may not give its input back."""
    x = torch.randn(4)
    (same,) = elementwise([x], "t0 = to(i0, float32); return t0")
    assert same.data_ptr() != x.data_ptr() and torch.equal(same, x)
