"""Runs for the tests of reports: a small stack with a layer that differs and nearly matches, and a deep decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from graft.capture.decoder import capture_decoder
from graft.ir.trace import export_graph
from graft.models.load import build_random
from graft.models.registry import entries
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline

HOSTILE = "</script><script>document.title='owned'</script> \"'&<!-- ünïcode \ud800"


class Norm(nn.Module):
    def __init__(self, size: int, leaks: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.leaks = leaks

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * inner, inner if self.leaks else x


class Layer(nn.Module):
    """leaks: the norm's inner value is read outside it, so that the norm cannot become one op."""

    def __init__(self, size: int, leaks: bool) -> None:
        super().__init__()
        self.norm, self.proj = Norm(size, leaks), nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        y, inner = self.norm(x)
        return self.proj(y) + inner + shift


class Stack(nn.Module):
    def __init__(self, layers: int = 10, odd: int = 7, size: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size, index == odd) for index in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = x.sin()
        for layer in self.layers:
            x = layer(x, shift)
        return x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).relu()


def dump_stack(folder: Path, model: str = "stack", layers: int = 10, odd: int = 7) -> Path:
    """Ten layers, of which the seventh nearly matches fuse_rms_norm; `shift` is read by all of them."""
    gm = export_graph(Stack(layers, odd).eval(), (torch.randn(2, 8),))
    run_pipeline(gm, load_config(), Context(), model=model, dump_dir=folder)
    return folder


def dump_plain(folder: Path) -> Path:
    """One linear layer: nothing is numbered, and no transform finds anything."""
    gm = export_graph(Plain().eval(), (torch.randn(2, 4),))
    run_pipeline(gm, load_config(), Context(), model="plain", dump_dir=folder)
    return folder


def dump_deep(folder: Path, layers: int = 32) -> Path:
    """The architecture of llama-3.1-8b with that many layers, on the meta device."""
    entry = entries()["llama-3.1-8b"]
    deep = replace(entry, name=f"llama × {layers}", settings={**entry.settings, "num_hidden_layers": layers})
    model = build_random(deep, torch.bfloat16, torch.device("meta"))
    gm = capture_decoder(model.module)
    context = Context(route="decoder", context_length=model.context)
    run_pipeline(gm, load_config(), context, model=model.name, dump_dir=folder)
    return folder
