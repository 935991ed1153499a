"""Products are rounded before they are added, in the code that a GPU runs too."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from marks import FULL

PROGRAM = """
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


def test_no_rotation_is_contracted_into_multiply_adds(tmp_path):
    """`plain` rounds without `rounded`: it shows what would be lost, and that this test finds it. The process begins
    from nothing: one that has imported Triton for its interpreter compiles no kernel."""
    program = tmp_path / "kernels.py"  # Triton reads the source of its functions
    program.write_text(PROGRAM)
    dtypes = ("bf16", "fp16") if FULL else ("bf16",)  # a kernel takes a core-second to compile
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(program), str(len(dtypes))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = dict(re.findall(r"^(\w+ \w+) (fma|rounds)$", done.stdout, re.MULTILINE))
    rounds = {"pairs": "rounds", "newest": "rounds", "plain": "fma"}
    assert found == {f"{kernel} {dtype}": how for kernel, how in rounds.items() for dtype in dtypes}, done.stderr
