"""Kernels compiled for a GPU where there is none, in one process, which takes seconds until it has imported torch.

It begins from nothing: one that has imported Triton for its interpreter compiles no kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from marks import FULL

FLASH = """
import re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from graft.ops.cached_attention.flash.gluon import STAGES, flash_kernel, tile_of

tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

def compiled(d, name, dtype, windowed):
    tile = tile_of(d)
    layout = gl.NVMMASharedLayout.get_default_for([tile, d], dtype)
    desc = f"tensordesc<{name}[{tile}, {d}],{layout!r}>"
    signature = dict(q=f"*{name}", k_desc=desc, v_desc=desc, out=f"*{name}")
    signature |= dict.fromkeys(("cu_seqlens", "starts", "seq_lens"), "*i64")
    signature |= dict.fromkeys(("sq_t", "sq_h", "heads"), "i32") | dict(factor="fp32", window="i32", n="i32")
    fixed = dict(GROUP=4, GROUP_PAD=4, TILE=tile, D=d, STAGES=STAGES, HAS_WINDOW=windowed)
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 3, 5, 7, 8)}
    source = GluonASTSource(flash_kernel, signature | dict.fromkeys(fixed, "constexpr"), fixed, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

for kind in ((256, "bf16", gl.bfloat16, True), (128, "bf16", gl.bfloat16, False))[: int(sys.argv[1])]:
    made = compiled(*kind)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = re.search(r"STACK:(\\d+).*LOCAL:(\\d+)", said)
    flying = len(re.findall(r"wgmma.wait_group.sync.aligned\\s+1;", made.asm["ptx"]))
    print(kind[0], "spilled", spilled[1], spilled[2], "in flight", flying, "shared", made.metadata.shared)
"""

ROTATIONS = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from graft.ops.cached_attention.decode_call import Turn
from graft.ops.cached_attention.newest.triton import rotate
from graft.ops.rope.triton import rotate_pairs

TURN = tl.constexpr(Turn(True, True, 128))

@triton.jit
def pairs(x, cos, sin, out, dtype: tl.constexpr):
    i = tl.arange(0, 64)
    first, second = tl.load(x + i).to(tl.float32), tl.load(x + 64 + i).to(tl.float32)
    a, b = rotate_pairs(first, second, cos, sin, i, i + 64, i < 64, dtype, True)
    tl.store(out + i, a.to(dtype))
    tl.store(out + 64 + i, b.to(dtype))

@triton.jit
def newest(x, cos, sin, out, dtype: tl.constexpr):
    i = tl.arange(0, 128)
    head = (tl.load(x + i), tl.load(x + (i + 64) % 128), tl.load(cos + i), tl.load(sin + i))
    tl.store(out + i, rotate(head, i, 0.0, 0.0, 128, dtype, TURN, False))

@triton.jit
def plain(x, cos, sin, out, dtype: tl.constexpr):
    i = tl.arange(0, 128)
    a, b = tl.load(x + i).to(tl.float32), tl.load(x + (i + 64) % 128).to(tl.float32)
    a, b = a * tl.load(cos + i).to(tl.float32), b * tl.load(sin + i).to(tl.float32)
    tl.store(out + i, (a.to(dtype).to(tl.float32) + b.to(dtype).to(tl.float32)).to(dtype))

for kernel in (pairs, newest, plain):
    for name, dtype in (("bf16", tl.bfloat16), ("fp16", tl.float16))[: int(sys.argv[1])]:
        signature = dict.fromkeys(("x", "cos", "sin", "out"), "*" + name) | {"dtype": "constexpr"}
        source = ASTSource(kernel, signature, {(4,): dtype})
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
        print(kernel.__name__, name, "fma" if "fma.rn" in code else "rounds")
"""

MIXED = """
import re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from graft.ops.fused_linear.mixed_gemm import mixed_gemm_kernel
from graft.ops.fused_linear.mixed_sizes import sizes_for

tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

def described(name, dtype, rows, columns):
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return f"tensordesc<{name}[{rows}, {columns}],{layout!r}>"

def widened(kind, tokens, sums):
    how = sizes_for(tokens, kind)
    out = described("bf16", gl.bfloat16, how.tokens, how.rows // 2)
    signature = dict(w_desc=described("i16", gl.int16, how.rows // 2, 32), scale="*bf16", bias="*bf16")
    signature |= dict(x_desc=described("bf16", gl.bfloat16, how.tokens, 32), r_desc=out, out_desc=out)
    signature |= dict(parts="*fp32", arrived="*i32", alpha="fp32")
    signature |= dict.fromkeys(("n", "units", "groups", "spread", "whole", "splits"), "i32")
    fixed = dict(ROWS=how.rows, TOKENS=how.tokens, AHEAD=how.ahead, STAGES=how.stages, KIND=kind)
    fixed |= dict(BIAS=sums, RESIDUAL=sums, PDL=True)
    names = mixed_gemm_kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("scale", "bias", "parts", "arrived", "n")}
    signature = {name: signature.get(name, "constexpr") for name in names}
    source = GluonASTSource(mixed_gemm_kernel, signature, fixed, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

KINDS = (("int4", 256, True), ("int8", 64, False), ("int8", 128, True), ("int8", 256, True), ("int4", 128, False))
for kind in KINDS if sys.argv[1] == "2" else KINDS[:1]:
    made = widened(*kind)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said, code = (
            subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("--dump-resource-usage", "--dump-sass")
        )
    spilled = re.search(r"STACK:(\\d+).*LOCAL:(\\d+)", said)
    products, waits = len(re.findall("HGMMA", code)), len(re.findall("WARPGROUP.DEPBAR", code))
    found = (*kind[:2], "spilled", spilled[1], spilled[2], "waits", waits, "of", products)
    print("widened", *found, "shared", made.metadata.shared)
"""

PEERS = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from graft.ops.all_reduce_add_norm.triton import all_reduce_add_norm_kernel as kernel
from graft.ops.peers import LANES, flags_at

fixed = dict(WORLD=2, WIDTH=8192, FLAGS=flags_at(8192), CAST_LAST=False, WIDE=False, LANES=LANES, BLOCK=4096)
signature = dict.fromkeys(("x", "residual", "weight", "out", "total"), "*bf16") | dict(eps="fp32", offset="fp32")
signature |= dict(bases="*i64", epochs="*i64") | dict.fromkeys(fixed, "constexpr")
signature = {name: signature.get(name, "i32") for name in kernel.arg_names}
aligned = [name for name in signature if signature[name][0] == "*" or name in ("stride_x", "stride_r", "d")]
at = kernel.arg_names.index
places = {(at(name),): [["tt.divisibility", 16]] for name in aligned}
source = ASTSource(kernel, signature, {(at(name),): value for name, value in fixed.items()}, places)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "debug": True})
found = re.findall(r"(?:ld|atom)[.](?:volatile|global[.]sys)[.\\w]*", made.asm["ptx"])
print("peers", *sorted(set(found)), "asserts" if "__assertfail" in made.asm["ptx"] else "")
"""


@cache
def compiled(full: bool = FULL) -> subprocess.CompletedProcess[str]:
    """What is said of them; full: attention for both sizes of heads, rotations in both dtypes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with TemporaryDirectory() as folder:
        program = Path(folder, "kernels.py")  # Triton reads the source of its functions
        program.write_text(ROTATIONS + FLASH + MIXED + PEERS)
        command = [sys.executable, str(program), "2" if full else "1"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
