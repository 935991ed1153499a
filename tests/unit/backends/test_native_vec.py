"""The vector layer: every operation against numpy or float64, on every instruction set that runs here."""

from __future__ import annotations

import platform
import shutil
import subprocess

import numpy as np
import pytest
import torch

from marks import left_out
from native_build import AVX2, AVX512, INCLUDE, compiled, every_target, targets

SOURCE = """
#include "vec.h"
using namespace graft;

// arrays: a, b, c, out; numbers: operation, count (a multiple of 16)
extern "C" void arithmetic(void** arrays, const int64_t* number) {
  float* const* all = reinterpret_cast<float**>(arrays);
  const float *a = all[0], *b = all[1], *c = all[2];
  float* out = all[3];
  for (int64_t i = 0; i < number[1]; i += 16) {
    const F x = load(a + i), y = load(b + i), z = load(c + i);
    F r = set(0.0f);
    switch (number[0]) {
      case 0: r = x + y; break;
      case 1: r = x - y; break;
      case 2: r = x * y; break;
      case 3: r = x / y; break;
      case 4: r = fma(x, y, z); break;
      case 5: r = max(x, y); break;
      case 6: r = min(x, y); break;
      case 7: r = exp(x); break;
      case 8: r = abs(x); break;
      case 9: r = set(sum(x)); break;
      case 10: r = set(largest(x)); break;
      case 11: r = fma_at<0>(x, four(b + i), fma_at<1>(x, four(b + i + 4), fma_at<2>(x, four(b + i + 8),
                   fma_at<3>(x, four(b + i + 12), z)))); break;
      case 12: r = tanh(x); break;
    }
    store(out + i, r);
  }
}

template <class T>
static void convert(void** arrays, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    store(static_cast<T*>(arrays[1]) + i, load(static_cast<float*>(arrays[0]) + i));
    store(static_cast<float*>(arrays[2]) + i, load(static_cast<T*>(arrays[1]) + i));
  }
}
// arrays: float32, 16-bit out, float32 of that; numbers: 0 bf16, 1 f16; count
extern "C" void conversions(void** arrays, const int64_t* number) {
  number[0] ? convert<f16>(arrays, number[1]) : convert<bf16>(arrays, number[1]);
}

template <class T>
static void some(void** arrays, int n) {
  store(static_cast<T*>(arrays[2]), load(static_cast<float*>(arrays[0]), n), n);
  store(static_cast<float*>(arrays[1]), load(static_cast<T*>(arrays[2]), n));
}
// arrays: float32 [16], float32 out [16], T out [16]; numbers: 0 float, 1 bf16, 2 f16; n
extern "C" void first(void** arrays, const int64_t* number) {
  const int n = int(number[1]);
  number[0] == 0 ? some<float>(arrays, n) : number[0] == 1 ? some<bf16>(arrays, n) : some<f16>(arrays, n);
}

extern "C" void pairs(void** arrays, const int64_t*) {
  F even, odd;
  load_pairs(static_cast<bf16*>(arrays[0]), even, odd);
  store(static_cast<float*>(arrays[1]), even), store(static_cast<float*>(arrays[1]) + 16, odd);
}

// arrays: 64 bytes w, 16 int8 x, out [3, 16] (bytes, low nibbles, high nibbles), 16 float32, 16 int8 of them, sum
extern "C" void dots(void** arrays, const int64_t*) {
  const Bytes w = load_bytes(arrays[0]);
  const int8_t* x = static_cast<int8_t*>(arrays[1]);
  float* out = static_cast<float*>(arrays[2]);
  int total = 0;
  for (int i = 0; i < 16; i++) total += x[i];
  I bytes = ints(-kByteOffset * total + 5), low = ints(-3), high = ints(0);
  unroll<4>([&](auto at) {
    bytes = dot_bytes<at>(bytes, w, sixteen(x));
    low = dot_nibbles<at>(low, low_nibbles(w), sixteen(x));
    high = dot_nibbles<at>(high, high_nibbles(w), sixteen(x));
  });
  store(out, to_float(bytes)), store(out + 16, to_float(low)), store(out + 32, to_float(high + ints(0)));
  const F x16 = load(static_cast<float*>(arrays[3]));
  *static_cast<int32_t*>(arrays[5]) = store_bytes(static_cast<int8_t*>(arrays[4]), x16);
}
"""
ENTRIES = ("arithmetic", "conversions", "first", "pairs", "dots")
SPECIAL = [
    0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 6.1e-5, 3.4e38, 65504, 65519.9, 65520, 1 + 2**-8,
    1 + 3 * 2**-9, 2**-24, 2**-25, 3 * 2**-25, 1.5 * 2**-24, 6.0e-8, 1e30,
]  # fmt: skip


def call(target, entry, arrays, numbers=()):
    compiled(SOURCE, ENTRIES, target).call(entry, arrays, list(numbers))


def values(seed: int, count: int = 4096) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(count) * 10).astype(np.float32)


def arithmetic(target, operation: int, a, b=None, c=None) -> np.ndarray:
    out = np.full_like(a, np.nan)
    call(target, "arithmetic", [a, a if b is None else b, a if c is None else c, out], [operation, len(a)])
    return out


@pytest.mark.some(1)
@pytest.mark.parametrize("target", every_target())
def test_arithmetic(target):
    a, b, c = values(0), values(1), values(2)
    for operation, want in enumerate([a + b, a - b, a * b, a / b]):
        assert np.array_equal(arithmetic(target, operation, a, b), want)
    exact = a.astype(np.float64) * b + c
    assert (abs(arithmetic(target, 4, a, b, c) - exact) <= 2.0**-23 * (abs(exact) + abs(a * b))).all()
    assert np.array_equal(arithmetic(target, 5, a, b), np.maximum(a, b))
    assert np.array_equal(arithmetic(target, 6, a, b), np.minimum(a, b))
    assert np.array_equal(arithmetic(target, 8, a), abs(a))
    rows = a.reshape(-1, 16)
    assert (abs(arithmetic(target, 9, a).reshape(-1, 16) - rows.sum(1, dtype=np.float64)[:, None]) < 1e-4).all()
    assert np.array_equal(arithmetic(target, 10, a).reshape(-1, 16), np.repeat(rows.max(1)[:, None], 16, 1))
    by = b.reshape(-1, 16)[:, [0, 5, 10, 15]].astype(np.float64).sum(1, keepdims=True)
    assert (abs(arithmetic(target, 11, a, b, c).reshape(-1, 16) - (rows * by + c.reshape(-1, 16))) < 2e-3).all()


@pytest.mark.parametrize("target", every_target())
def test_exp(target):
    x = np.concatenate([np.linspace(-110, 95, 60000), np.linspace(-1e-3, 1e-3, 2000), values(3, 2000) * 3]).astype(
        np.float32
    )
    found = arithmetic(target, 7, x).astype(np.float64)
    want = np.exp(x.astype(np.float64))
    unit = np.spacing(np.minimum(want, 3e38).astype(np.float32)).astype(np.float64)
    finite = want < 3.4028234e38
    assert (abs(found - want)[finite] <= 2 * unit[finite]).all()
    assert np.isinf(found[x > 88.73]).all() and (found[x < -104] == 0).all()
    assert not (abs(found * (1 + 1e-6) - want)[finite] <= 2 * unit[finite]).all()  # the bound notices a millionth
    special = np.array([np.nan, -np.inf, np.inf, 0] * 4, np.float32)
    assert np.array_equal(arithmetic(target, 7, special), np.array([np.nan, 0, np.inf, 1] * 4), equal_nan=True)


@pytest.mark.parametrize("target", every_target())
def test_tanh(target):
    """Near 0 too, where 1 - 2 / (1 + e^2x) would lose every digit."""
    x = np.concatenate([np.linspace(-12, 12, 60000), np.linspace(-1e-3, 1e-3, 2000), values(3, 2000) * 1e-6]).astype(
        np.float32
    )
    found, want = arithmetic(target, 12, x).astype(np.float64), np.tanh(x.astype(np.float64))
    unit = np.spacing(abs(want).astype(np.float32)).astype(np.float64)
    assert (abs(found - want) <= 4 * unit).all()
    lossy = (1 - 2 / (1 + np.exp(2 * x, dtype=np.float32))).astype(np.float64)
    assert not (abs(lossy - want) <= 4 * unit).all()
    special = np.array([np.nan, -np.inf, np.inf, 0] * 4, np.float32)
    assert np.array_equal(arithmetic(target, 12, special), np.array([np.nan, -1, 1, 0] * 4), equal_nan=True)


@pytest.mark.parametrize("target", every_target())
@pytest.mark.parametrize(("number", "dtype"), [(0, torch.bfloat16), (1, torch.float16)])
def test_conversions_round_as_torch_does(target, number, dtype):
    bits = np.random.default_rng(4).integers(0, 2**32, 2**15, dtype=np.uint32).view(np.float32)
    x = np.concatenate(
        [np.array(SPECIAL + [0.0] * (-len(SPECIAL) % 16), np.float32), bits, values(5) * 1e-6, values(6)]
    )
    narrow, wide = np.zeros(len(x), np.int16), np.zeros(len(x), np.float32)
    call(target, "conversions", [x, narrow, wide], [number, len(x)])
    want = torch.from_numpy(x).to(dtype)
    found = torch.from_numpy(narrow).view(dtype)
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found[~want.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))
    assert np.array_equal(wide, want.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("target", every_target())
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_first_lanes(target, number):
    for n in (0, 1, 7, 15, 16):
        x = np.full(16, np.nan, np.float32)
        x[:n] = np.arange(1, n + 1)
        out, to = np.full(16, np.nan, np.float32), np.full(16, -1, np.int32 if number == 0 else np.int16)
        call(target, "first", [x, out, to], [number, n])
        assert out[:n].tolist() == list(range(1, n + 1)) and (out[n:] == 0).all()
        assert (to[n:] == -1).all()


@pytest.mark.parametrize("target", every_target())
def test_pairs(target):
    x = torch.randn(32).to(torch.bfloat16)
    out = np.zeros(32, np.float32)
    call(target, "pairs", [x.view(torch.int16).numpy(), out])
    assert np.array_equal(out, torch.cat([x[0::2], x[1::2]]).float().numpy())


@pytest.mark.parametrize("target", every_target())
def test_dots_of_bytes(target):
    g = np.random.default_rng(7)
    for low, high in ((-128, 128), (-128, -127), (127, 128)):
        w, x = (
            g.integers(low, high, 64).astype(np.int8),
            g.integers(max(low, -127), max(high, -126), 16).astype(np.int8),
        )
        floats = np.array([0.5, 1.5, -0.5, -1.5, 2.4, -2.6, 126.6, -127.0, 127.0, 0, 1, 2, 3, 4, 5, 6], np.float32)
        out, narrow, total = np.zeros((3, 16), np.float32), np.zeros(16, np.int8), np.zeros(1, np.int32)
        call(target, "dots", [w, x, out, floats, narrow, total])
        sums = [w, w.view(np.uint8) & 15, w.view(np.uint8) >> 4]
        want = [a.astype(int).reshape(16, 4) @ x.astype(int).reshape(4, 4).sum(0) for a in sums]
        assert np.array_equal(out, np.stack(want) + np.array([[5], [-3], [0]]))
        assert narrow.tolist() == np.rint(floats).astype(int).tolist() and total[0] == narrow.sum(dtype=int)


COMPILERS = [
    ("g++", ["-march=armv8-a", "-DGRAFT_ISA_NEON"], "aarch64"),  # without sdot
    *[(name, flags, machine)
      for name, machine in (("g++", "x86_64"), ("x86_64-linux-gnu-g++", ""))
      for flags in (AVX2, [*AVX2, "-mavxvnni"], AVX512)],
]  # fmt: skip
RUN_HERE = {"avx2": AVX2, "avx512": AVX512}  # the short run has them compiled and run by the other tests
RUN_HERE = [flags for isa, flags in RUN_HERE.items() if isa in {target.isa for target in targets()}]
COMPILERS = [left_out(case) if case[1] in RUN_HERE else case for case in COMPILERS]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("compiler", "flags", "machine"),
    [left_out(c) if c[1] in RUN_HERE else c for c in COMPILERS],
    ids=lambda v: v if isinstance(v, str) else v[-1],
)
def test_instruction_sets_of_other_machines_compile(compiler, flags, machine, tmp_path):
    if shutil.which(compiler) is None or machine not in ("", platform.machine()):
        pytest.skip(f"no {compiler} for {machine or 'x86_64'} here")
    product = "template void linear<WeightQ8>(Team&, int, std::atomic<int64_t>&, const LinearArgs&, float*);"
    (tmp_path / "all.cpp").write_text(f'{SOURCE}\n#include "native.h"\nnamespace graft {{ {product} }}\n')
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
        "-Werror",
        *flags,
        *INCLUDE,
        "-c",
    ]
    subprocess.run([*command, "all.cpp", "-o", "all.o"], cwd=tmp_path, check=True)
