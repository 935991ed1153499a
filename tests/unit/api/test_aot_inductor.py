"""graft's fusions in AOTInductor are those in torch.compile, although exported graphs restate every dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft
from graft.backends.inductor import FUSION_PASS, CachedPass, without_caches
from inductor_cases import compilations


class Norms(nn.Module):
    """RMSNorm with casts, as Hugging Face writes it, then a gated MLP and a layer norm."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.rand(8, dtype=dtype))
        self.gate, self.up = nn.Linear(8, 16, dtype=dtype), nn.Linear(8, 16, dtype=dtype)
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.register_buffer("seen", torch.zeros(3, dtype=dtype))

    def forward(self, x):
        h = x.float()
        h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.w
        self.seen.add_(1)
        return self.norm(F.silu(self.gate(h)) * self.up(h)) + self.seen[0]


class Stopped(Exception):
    """Raised where Inductor would go on to generate code, which takes half a minute."""


def fused(compile_with):
    """How often each transform matched in a compilation that ends behind graft's pass."""
    options = graft.passes_for_inductor()
    own = options[FUSION_PASS]

    def run(graph):
        own(graph)
        assert "_assert_tensor_metadata" not in str(graph)
        graph.lint()
        raise Stopped

    before = len(compilations())
    with torch.no_grad(), without_caches(), pytest.raises(Exception, match="Stopped"):
        compile_with({**options, FUSION_PASS: CachedPass("stops", run)})
    report = compilations()[before]
    return {name: len(record.matches) for name, record in report.transforms.items() if record.matches}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aot_inductor_fuses_what_torch_compile_fuses(dtype):
    module, x = Norms(dtype).requires_grad_(False), torch.randn(4, 8, dtype=dtype)
    program = torch.export.export(module, (x,))
    aot = fused(lambda options: torch._inductor.aoti_compile_and_package(program, inductor_configs=options))
    torch._dynamo.reset()
    jit = fused(lambda options: torch.compile(module, options=options)(x))
    assert aot == jit and aot["fuse_rms_norm"] == 1
