"""Products that are linear layers in another spelling, or nearly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Products(nn.Module):
    """mm and addmm with a weight that lies as [k, n], one that is computed, and what cannot be taken."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w, self.b = nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(40))

    def forward(self, x):
        if self.kind == "mm":
            return torch.mm(x, self.w)
        if self.kind == "addmm":
            return torch.addmm(self.b, x, self.w)
        if self.kind == "computed":
            return F.linear(x, (self.w * 2).t(), self.b)
        if self.kind == "beta":
            return torch.addmm(self.b, x, self.w, beta=0.5)
        return torch.addmm(self.b[None].expand(x.shape[0], 40), x, self.w)
