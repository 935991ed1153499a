"""Latent attention: absorbed and expanded are one thing, kernels over its cache, and which of them a call takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from graft.ops import OPS, choose
from graft.ops.latent_attention.cases import make as make_latent
from graft.ops.latent_attention.reference import LatentSizes, sizes_of
from graft.ops.paged_latent_attention import reference
from graft.ops.paged_latent_attention.cases import LITE, TINY, make
from native_cases import NORMS, WEIGHTS, compile_all, graph_of, needs_compiler, poisoned, results

NAME = "paged_latent_attention"


def generator():
    return torch.Generator().manual_seed(0)


def copied(args):
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize("sizes", [TINY, (3, 16, 8, 24, 40)])
def test_absorbed_and_expanded_are_the_same_and_need_all_of_the_row(sizes):
    q, latent, rope, weight, scale = make_latent(1, 9, sizes, "cpu", torch.float64, generator())
    own = sizes_of(q, rope, weight)
    assert own == LatentSizes(*sizes)
    rows = torch.cat((latent, rope), dim=-1)
    expanded = OPS["latent_attention"].reference(q, latent, rope, weight, scale)
    assert torch.allclose(reference.attend_absorbed(q, rows, weight, scale, own), expanded)
    assert torch.allclose(reference.attend_expanded(q, rows, weight, scale, own), expanded)
    without = torch.cat((latent, torch.zeros_like(rope)), dim=-1)
    assert not torch.allclose(reference.attend_absorbed(q, without, weight, scale, own), expanded, atol=1e-3)


def test_the_way_with_fewer_multiplications_is_taken():
    own = LatentSizes(16, 128, 64, 128, 512)
    assert reference.absorbs(1, 2, own) and reference.absorbs(1, 4096, own)
    assert reference.absorbs(100, 4096, own) and not reference.absorbs(200, 4096, own)
    assert not any(reference.absorbs(tokens, tokens, own) for tokens in (2, 16, 2048)), "whole prompts"


@pytest.mark.parametrize("splits", [1, 8, 32])
def test_a_context_in_any_number_of_parts(splits):
    """More parts than there are tiles: some see nothing."""
    from graft.ops.paged_latent_attention.triton import paged_latent_attention_triton

    args = make((1, 2, 1), (100, 40, 0), (3, 16, 8, 24, 40), "cpu", torch.float32, generator())
    expected = OPS[NAME].reference(*copied(args))
    found = paged_latent_attention_triton(*copied(args), splits=splits)
    assert torch.allclose(found, expected, atol=2e-5)
    *others, scale = copied(args)
    assert not torch.allclose(found, OPS[NAME].reference(*others, scale * 1.05), atol=2e-4)


def test_prompts_expand_and_other_dtypes_are_refused(monkeypatch):
    monkeypatch.setattr(f"graft.ops.{NAME}.op.needs_triton", lambda *_: None)
    spec = OPS[NAME]

    def chosen(new, dtype=torch.float32):
        return choose(spec, spec.call(*make(new, (5,) * len(new), TINY, "cpu", dtype, generator()))).name

    assert chosen((1, 1)) == "triton" and chosen((1, 3)) == "reference"
    assert chosen((1,), torch.float64) == "reference"


PROGRAM = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from graft.ops.paged_latent_attention.triton import latent_join_kernel, latent_part_kernel

def compiled(kernel, kinds, constants, warps):
    names = kernel.arg_names
    signature = {name: kinds.get(name, "constexpr" if name in constants else "i64") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": warps, "num_stages": 2}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, "tensor" if "wgmma" in made.asm["ptx"] or "mma.sync" in made.asm["ptx"] else "plain",
          made.metadata.shared)

layout = dict.fromkeys(("token_to_seq", "block_tables", "cu_seqlens", "seq_lens"), "*i64")
part = {"q": "*bf16", "cache": "*bf16", "partial": "*fp32", "stats": "*fp32", "scale": "fp32", **layout}
for heads, warps in ((16, 4), (64, 8)):
    sizes = {"rank": 512, "rope": 64, "HEADS": heads, "RANK": 512, "ROPE": 64, "BLOCK": 16, "TILE": 32, "SPLITS": 8}
    compiled(latent_part_kernel, part, sizes, warps)
join = {"partial": "*fp32", "stats": "*fp32", "out": "*bf16"}
compiled(latent_join_kernel, join, {"rank": 512, "RANK": 512, "SPLITS": 8}, 4)
"""


@pytest.mark.exhaustive  # some core-seconds; test_a_context_in_any_number_of_parts runs the kernels
def test_the_kernels_compile_for_hopper_and_fit_its_shared_memory(tmp_path):
    program = tmp_path / "kernels.py"  # Triton reads the source of its functions
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False
    )
    found = re.findall(r"^(\w+) (tensor|plain) (\d+)$", done.stdout, re.MULTILINE)
    assert [(name, how) for name, how, _ in found] == [
        ("latent_part_kernel", "tensor"), ("latent_part_kernel", "tensor"), ("latent_join_kernel", "plain")
    ], done.stderr  # fmt: skip
    assert all(int(shared) <= 227 << 10 for *_, shared in found)


@needs_compiler
@pytest.mark.exhaustive  # a compiler run; test_native_attention has the cases of every op
def test_native_kernels_take_many_tokens_and_long_prompts(monkeypatch):
    """More tokens than a round has, more queries than a chunk, a context in parts, chunks behind a context."""
    monkeypatch.setattr("graft.backends.native.call.fresh", poisoned)
    batches = [
        ((1,) * 70, tuple(range(70)), TINY), ((1100,), (0,), (2, 8, 4, 8, 12)),
        ((30, 1), (40, 700), (3, 16, 8, 24, 40)), ((9, 33, 1), (600, 0, 5), (4, 20, 6, 10, 64)), ((1,), (500,), LITE),
    ]  # fmt: skip
    given = [make(*batch, "cpu", torch.float32, generator()) for batch in batches]
    op = getattr(torch.ops.graft, NAME).default
    built, _ = compile_all([graph_of(op, args, WEIGHTS.get(NAME, NORMS)) for args in given], [None] * 5, 5)
    for args, each in zip(given, built, strict=True):
        wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in copied(args)]
        assert torch.allclose(results(NAME, each, args)[0].double(), OPS[NAME].reference(*wide), atol=2e-4)
