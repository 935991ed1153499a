"""Mixtures of experts as people write them: one block a spelling, all of them [1, n, D] → [1, n, D]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, H, E, K = 16, 24, 3, 2  # width, width of an expert, experts, experts a token


def softmax_topk(logits: Tensor, k: int = K) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float), k, dim=-1)
    return (values / values.sum(-1, keepdim=True)).to(logits.dtype), ids


def topk_softmax(logits: Tensor, k: int = K) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(logits, k, dim=-1)
    return torch.softmax(values, dim=1, dtype=values.dtype), ids


def topk_sigmoid(logits: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(logits, k, dim=1)
    return torch.sigmoid(values.float()).to(logits.dtype), ids


class Block(nn.Module):
    """Routes tokens with `route`, and has weights from a fixed seed."""

    route = staticmethod(softmax_topk)

    def __init__(self, e: int = E, **options: object) -> None:
        super().__init__()
        self.e, self.options = e, options
        self.gate = nn.Linear(D, e, bias=False)
        self.build()
        self.eval().requires_grad_(False)
        g = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.3)

    def build(self) -> None:
        raise NotImplementedError

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.reshape(-1, D)
        return self.mix(x, *self.route(self.gate(x))).reshape(hidden.shape)


class Expert(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(D, H, bias), nn.Linear(D, H, bias), nn.Linear(H, D, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtralLoop(Block):
    """Mixtral as it was in transformers 4: every expert takes the tokens that chose it."""

    def build(self) -> None:
        self.experts = nn.ModuleList([Expert(bool(self.options.get("bias"))) for _ in range(self.e)])

    def expert(self, index: int, x: Tensor) -> Tensor:
        return self.experts[index](x)

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        mask = F.one_hot(ids, num_classes=self.e).permute(2, 1, 0)
        for index in range(self.e):
            k, token = torch.where(mask[index])
            rows = self.expert(index, x[None, token].reshape(-1, D)) * weights[token, k, None]
            out.index_add_(0, token, rows.to(x.dtype))
        return out


class ListLoop(MixtralLoop):
    """The same over parameter lists, and products written as `@`."""

    def build(self) -> None:
        for name, shape in (("w1", (H, D)), ("w3", (H, D)), ("w2", (D, H))):
            setattr(self, name, nn.ParameterList([torch.empty(shape) for _ in range(self.e)]))

    def expert(self, index: int, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.w1[index])) * F.linear(x, self.w3[index]), self.w2[index])


class StackedLoop(MixtralLoop):
    """The same over stacked weights, gate and up in one."""

    def build(self) -> None:
        self.gate_up, self.down = nn.Parameter(torch.empty(self.e, 2 * H, D)), nn.Parameter(torch.empty(self.e, D, H))

    def expert(self, index: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up[index]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[index])


class TransposedLoop(MixtralLoop):
    """The same over stacked weights that lie as [in, out]."""

    def build(self) -> None:
        self.gate_up, self.down = nn.Parameter(torch.empty(self.e, D, 2 * H)), nn.Parameter(torch.empty(self.e, H, D))

    def expert(self, index: int, x: Tensor) -> Tensor:
        gate, up = (x @ self.gate_up[index]).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.down[index]


class ShareLoop(MixtralLoop):
    """Every expert computes every token; those that did not choose it count nothing."""

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in range(self.e):
            share = (weights * (ids == index)).sum(dim=-1, keepdim=True)
            out = out + self.expert(index, x) * share
        return out


class ScatterLoop(MixtralLoop):
    """The same with one column of shares for each expert."""

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        shares = torch.zeros(x.shape[0], self.e, dtype=weights.dtype).scatter_(1, ids, weights)
        out = self.expert(0, x) * shares[:, 0].unsqueeze(-1)
        for index in range(1, self.e):
            out = out + self.expert(index, x) * shares[:, index].unsqueeze(-1)
        return out


class GptOssDense(Block):
    """gpt-oss as it was in transformers 4: all experts in one product, weighed and summed."""

    route = staticmethod(topk_softmax)
    alpha, limit = 1.702, 7.0

    def build(self) -> None:
        self.gate_up, self.down = nn.Parameter(torch.empty(self.e, D, 2 * H)), nn.Parameter(torch.empty(self.e, H, D))
        self.gate_up_bias = nn.Parameter(torch.empty(self.e, 2 * H))
        self.down_bias = nn.Parameter(torch.empty(self.e, D))

    def activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(min=None, max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        shares = torch.zeros(x.shape[0], self.e, dtype=weights.dtype).scatter_(1, ids, weights)
        rows = x.repeat(self.e, 1).view(self.e, -1, D)
        gate_up = torch.bmm(rows, self.gate_up) + self.gate_up_bias[..., None, :]
        out = torch.bmm(self.activate(gate_up), self.down) + self.down_bias[..., None, :]
        out = out.view(self.e, 1, -1, D)
        out = out * shares.transpose(0, 1).view(self.e, 1, -1)[..., None]
        return out.sum(dim=0).view(-1, D)


class Llama4Dense(Block):
    """Llama 4: the sigmoid of the chosen logit multiplies what goes into the expert."""

    def build(self) -> None:
        self.gate_up, self.down = nn.Parameter(torch.empty(self.e, D, 2 * H)), nn.Parameter(torch.empty(self.e, H, D))

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.reshape(-1, D)
        logits = self.gate(x)
        values, ids = torch.topk(logits, self.options.get("k", 1), dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, values)
        scores = torch.sigmoid(scores.float()).to(scores.dtype)
        rows = x.repeat(self.e, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(self.e, -1, D), self.gate_up).chunk(2, dim=-1)
        out = torch.bmm(up * F.silu(gate), self.down).view(-1, D)
        return out.reshape(self.e, -1, D).sum(dim=0).reshape(hidden.shape)


class SigmoidLoop(MixtralLoop):
    """Top-1 of the sigmoid, in a loop."""

    route = staticmethod(topk_sigmoid)


class Einsum(Block):
    """All experts by einsum."""

    def build(self) -> None:
        self.gate_up, self.down = nn.Parameter(torch.empty(self.e, 2 * H, D)), nn.Parameter(torch.empty(self.e, D, H))

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        shares = torch.zeros(x.shape[0], self.e, dtype=weights.dtype).scatter_(1, ids, weights)
        gate, up = torch.einsum("nd,efd->enf", x, self.gate_up).chunk(2, dim=-1)
        rows = torch.einsum("enf,edf->end", F.silu(gate) * up, self.down)
        return torch.einsum("end,ne->nd", rows, shares)


SPELLINGS = {
    "mixtral loop": MixtralLoop, "parameter lists": ListLoop, "stacked weights": StackedLoop,
    "transposed weights": TransposedLoop, "shares by comparison": ShareLoop, "shares by scatter": ScatterLoop,
    "gpt-oss dense": GptOssDense, "llama 4": Llama4Dense, "sigmoid top-1": SigmoidLoop, "einsum": Einsum,
}  # fmt: skip
