"""What formats and kernels do to a model's predictions: perplexity, divergence, agreement, error of the logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graft.backends import lower
from graft.engine.llm import LLM
from graft.ir.edit import second_module
from graft.ops.layout import HostBatch, pack
from graft.passes.config import load_config
from graft.passes.pipeline import order_transforms, run_pipeline


@dataclass(frozen=True)
class Quality:
    """perplexity: of the text. divergence: mean KL of the original's predictions from these, in nats a token.
    agreement: the share of tokens for which both think the same successor the likeliest."""

    perplexity: float
    divergence: float = 0.0
    agreement: float = 1.0


def with_transforms(gm: GraphModule, transforms: Mapping[str, Mapping[str, Any]]) -> GraphModule:
    """A second graph over the same weights, with these transforms run over it and no others."""
    config = load_config()
    off: dict[str, dict[str, Any]] = {name: {"enabled": False} for name in order_transforms(config)}
    twin = second_module(gm)
    run_pipeline(twin, load_config({"transforms": off | {k: {"enabled": True, **v} for k, v in transforms.items()}}))
    return twin


@torch.no_grad()
def logits_of(gm: GraphModule, ids: Sequence[int], device: torch.device) -> Tensor:
    """Float32 logits [tokens, vocabulary] of a captured decoder for one sequence."""
    row = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device)[None]
    (logits,) = lower(gm, "eager").call(row, positions)
    return logits[0].float()


def quality(logits: Tensor, ids: Sequence[int], original: Tensor | None = None) -> Quality:
    """Both logits are [tokens, vocabulary]; the last token has no successor."""
    ours = logits[:-1].log_softmax(-1)
    following = torch.tensor(ids[1:], device=logits.device)[:, None]
    perplexity = float(ours.gather(-1, following).mean().neg().exp())
    if original is None:
        return Quality(perplexity)
    theirs = original[:-1].log_softmax(-1)
    divergence = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    agreement = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    return Quality(perplexity, divergence, agreement)


@torch.no_grad()
def engine_logits(
    llm: LLM, ids: Sequence[int], graph: Callable[..., Any] | None = None, *, decoded: int = 0
) -> Tensor:
    """Float32 logits [tokens, vocabulary] of an engine's graph, or of another one with its inputs, for one sequence
    in a cache of its own. decoded: so many tokens at the end are fed one by one, as decode steps do."""
    run, rows = graph or llm.engine.graph, []
    for inputs in engine_steps(llm, ids, decoded):
        (logits,) = run(*inputs)
        rows.append(logits.view(-1, logits.shape[-1]).float())
    return torch.cat(rows)


def engine_steps(llm: LLM, ids: Sequence[int], decoded: int) -> Iterator[list[Tensor]]:
    """The inputs of an engine's graph for one sequence in caches of its own, which the steps write: first a prompt,
    then the last `decoded` tokens one by one. All rows of logits are asked for."""
    count, block = len(ids), llm.engine.manager.block_size
    blocks = list(range(-(-count // block)))
    caches = [t.new_zeros((len(blocks), *t.shape[1:])) for t in llm.engine.tensors]
    states = () if llm.engine.states is None else llm.engine.states.aside(1)
    prompt = count - decoded
    for first, last in ((0, prompt), *((at, at + 1) for at in range(prompt, count))):
        host = HostBatch()
        host.add(ids[first:last], first, blocks, block)
        host.logits_indices = list(range(last - first))
        yield [*pack(host, llm.device).inputs(), *caches, *states]


def logits_error(found: Tensor, exact: Tensor) -> float:
    """How far logits are from others, relative to the norm of these."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def float64_twin(module: Any) -> Any:
    """A copy of a Hugging Face module with float64 weights."""
    second = copy.deepcopy(module).double()
    second.set_experts_implementation("eager")  # grouped GEMMs of experts refuse float64
    return second
