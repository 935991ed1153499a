"""Triton kernels on a real GPU, against the reference on the same device."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils import _pytree as pytree

from graft.ops import OPS, choose
from graft.ops.cases import tolerance
from graft.ops.selection import problem_of

CPU_ONLY = {"packed_embedding"}  # its tiles are the native backend's: no graph for a GPU has it
RANKS = {"all_reduce", "all_gather", "all_reduce_add_norm"}  # one process has no other rank to exchange with
# the first two are in captured graphs alone, where an engine has others in their place; prompts of the third are
# computed by the reference, and it is off on a GPU
REFERENCE = {"causal_conv", "latent_attention", "paged_latent_attention"}
CASES = [
    (op, case)
    for op in OPS
    if op not in CPU_ONLY | RANKS
    for case in importlib.import_module(f"graft.ops.{op}.cases").CASES
]
IDS = [f"{op}: {case.name}" for op, case in CASES]


def outputs(result):
    return result if isinstance(result, (tuple, list)) else (result,)


def copied(args):
    return pytree.tree_map(lambda a: a.clone() if isinstance(a, torch.Tensor) else a, list(args))


def close(left, right, bound):
    pairs = zip(outputs(left), outputs(right), strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=bound, atol=bound) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_every_kernel_agrees_with_the_reference(name, case, dtype):
    args = case.make("cuda", dtype, torch.Generator().manual_seed(0))
    expected = OPS[name].reference(*copied(args))
    ran = []
    for kernel in OPS[name].kernels:
        if problem_of(kernel, OPS[name].call(*args)) is None:
            ran.append(kernel.name)
            assert close(kernel.run(*copied(args)), expected, 4 * tolerance(dtype, case.reduction)), kernel.name
    assert ran or name in REFERENCE, "no kernel of the op runs this case on a GPU"


def test_the_gpu_kernel_is_chosen_for_16_bit():
    for name, case in CASES:
        if name in REFERENCE:
            continue
        args = case.make("cuda", torch.bfloat16, torch.Generator().manual_seed(0))
        assert choose(OPS[name], OPS[name].call(*args)).kernel.kind in ("triton", "existing")


def test_paged_attention_writes_the_cache_in_place():
    _, case = next((n, c) for n, c in CASES if n == "paged_attention" and c.name.startswith("mixed"))
    args = case.make("cuda", torch.bfloat16, torch.Generator().manual_seed(0))
    names = [argument.name for argument in torch.ops.graft.paged_attention.default._schema.arguments]
    k, k_cache, slots = (args[names.index(name)] for name in ("k", "k_cache", "slot_mapping"))
    pointer = k_cache.data_ptr()
    torch.ops.graft.paged_attention(*args)
    assert k_cache.data_ptr() == pointer
    assert torch.equal(k_cache.view(-1, *k_cache.shape[2:])[slots], k[0].transpose(0, 1))
