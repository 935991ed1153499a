"""What this machine can do, measured: bytes read a second and a large GEMM.

A decode step cannot be faster than its bytes at the one rate, a prompt not faster than its GEMMs at the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graft.base.device_memory import free_memory
from graft.base.errors import CannotLoad, CompilerFailed, DiskFull, NoCompiler
from graft.base.timers import call_seconds, cpu_seconds, graph_seconds
from graft.bench.limits.read_native import Reader, last_level_cache

GPU_BYTES, CPU_BYTES = 4 << 30, 1 << 28  # read in one go: far more than the caches hold
GPU_SIDE = 8192  # of the square matrices multiplied
CPU_SIDE = {torch.float32: 1024, torch.float64: 1024}
SLOW_SIDE = 256  # of 16-bit matrices on a CPU, which may have no instructions for them
REPEATS, IN_A_ROW = 7, 5


@dataclass(frozen=True)
class Roofline:
    read_gb_per_s: float
    matrix_tflops: float
    read_how: str
    matrix_how: str


@torch.inference_mode()
def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Medians of a few runs; about a second."""
    if device.type == "cuda":
        read, read_how = gpu_read(device)
        side = GPU_SIDE
    else:
        read, read_how = cpu_read()
        side = CPU_SIDE.get(dtype, SLOW_SIDE)
    rate = matrix_rate(device, dtype, side)
    if device.type != "cuda" and dtype.itemsize == 2:
        # a CPU without 16-bit instructions widens: torch's GEMM may then be a hundred times slower than in float32
        plain = CPU_SIDE.get(torch.float32, SLOW_SIDE)
        if (wide := matrix_rate(device, torch.float32, plain)) > rate:
            rate, side, dtype = wide, plain, torch.float32
    name = str(dtype).removeprefix("torch.")
    return Roofline(read / 1e9, rate / 1e12, read_how, f"{side}³ in {name}")


def gpu_read(device: torch.device) -> tuple[float, str]:
    """Bytes a second of a Triton kernel that only reads, a few launches in one CUDA graph."""
    from graft.bench.limits.read_kernel import make_buffers, read_all

    x, sums = make_buffers(min(GPU_BYTES, free_memory(device) // 2), device)
    seconds = graph_seconds(lambda: read_all(x, sums), device, REPEATS, in_a_row=IN_A_ROW)
    return x.nbytes / seconds, f"a Triton kernel over {x.nbytes / 1e9:.1f} GB"


def cpu_read() -> tuple[float, str]:
    """Bytes a second of a kernel that only reads, with as many threads as torch has; without a compiler of a sum."""
    x = torch.ones(cpu_buffer() // 4, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        reader = Reader(threads)
    except (NoCompiler, CompilerFailed, CannotLoad, DiskFull) as error:
        seconds = cpu_seconds(lambda: x.sum(), REPEATS)
        return x.nbytes / seconds, f"a sum over {x.nbytes / 1e9:.2f} GB, threads: {threads}; {type(error).__name__}"
    try:
        seconds = cpu_seconds(lambda: reader.read(x), REPEATS)
    finally:
        reader.close()
    return x.nbytes / seconds, f"a C++ kernel over {x.nbytes / 1e9:.2f} GB, threads: {threads}"


def cpu_buffer() -> int:
    """Bytes to read: more than four times the LLC (last-level cache), as far as half of the free memory has room for
    it."""
    wanted = max(CPU_BYTES, 5 * last_level_cache())
    return min(wanted, free_memory(torch.device("cpu")) // 2) // 4096 * 4096


def matrix_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Floating point operations a second of a square GEMM."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    seconds = call_seconds(multiply, device, REPEATS, in_a_row=IN_A_ROW if device.type == "cuda" else 1)
    return 2 * side**3 / seconds


def float8_rate(device: torch.device) -> float:
    """The same of float8 matrices with a scale a row, as fp8 weights are multiplied with."""
    a, b = (torch.ones(GPU_SIDE, GPU_SIDE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones(GPU_SIDE, 1, device=device)

    def multiply() -> None:
        torch._scaled_mm(a, b.t(), scales, scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * GPU_SIDE**3 / call_seconds(multiply, device, REPEATS, in_a_row=IN_A_ROW)
