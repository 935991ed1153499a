"""At load: decode steps against one full pass over the same tokens, through the engine as any request runs.

    prompt ─▶ prefill ─▶ decode ─▶ decode        keys and values of every layer, the next token
    prompt + the tokens that came ─▶ prefill     the same, of all tokens at once

Whatever decoding loses between steps (a state, a position, a mask) makes the two differ, and the first layer whose
keys or values do is told. On a GPU the decode steps are replays of the captures that requests use.
The tokens fill less than a block, so nothing is stored, found or told by events; afterwards the block is zero again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.base.errors import DecodeMismatch
from graft.engine.core import Request, Stats
from graft.engine.decode.loop import Counts
from graft.engine.engine import Engine
from graft.engine.kv.tensors import CachedTensor
from graft.engine.params import MOST_LOGPROBS, SamplingParams
from graft.engine.pooling import PoolingEngine
from graft.models.loaded import LoadedModel
from graft.ops.paged_cache import raw, read
from graft.weights.quantize import FP8

PROMPT, STEPS = 5, 2
QUANTIZED = 0.1  # times the root of the layer, counted from 1
STEP = 2.0**-3  # from one float8 number to the next, in it
ROUTED = 0.12  # times the root of the layer, counted from 1, where roundings choose experts
FEW_ROUNDINGS = 1e-3  # in float32 no router was seen to choose otherwise
FLOAT8 = 0.03  # times the root of the layer, counted from 0: the first reads no cache


@dataclass(frozen=True)
class Seen:
    """What a request left: the keys and values of its tokens, and the token that comes next."""

    tokens: list[int]  # those in the cache
    cache: list[Tensor]  # [tokens, kv_heads, head_dim], of each layer in turn
    chosen: int
    logprobs: dict[int, float] | None
    states: list[Tensor]  # of recurrent layers


def self_check(
    engine: Engine,
    model: LoadedModel,
    tensors: Sequence[CachedTensor],
    recurrences: Sequence[str] = (),
    *,
    quantized: bool = False,
    routed: bool = False,
    wanted: bool = True,
) -> str:
    """A line for the report; raises DecodeMismatch. tensors: what those of the engine hold. recurrences: the names of
    the modules with a recurrent state. routed: tokens are routed to experts."""
    if not wanted:
        return "self-check: turned off (self_check=False)"
    if isinstance(engine, PoolingEngine):
        return check_chunks(
            engine, model, tolerance(model.module.dtype, quantized, 1 + tensors[-1].layer, False, routed)
        )
    started = time.perf_counter()
    most = min(engine.manager.block_size, model.context) - 2, engine.scheduler.max_num_batched_tokens
    length = min(PROMPT, *(limit - STEPS for limit in most))
    if length < 1:
        return f"self-check: not run, because a pass of {STEPS + 1} tokens does not fit into a block or a step"
    prompt = some_tokens(model, length)
    manager, clock = engine.manager, engine.scheduler.clock
    counts = manager.asked_tokens, manager.reused_tokens
    try:
        decoded = play(engine, prompt, 1 + STEPS)
        whole = None if decoded is None else play(engine, decoded.tokens, 1)
    finally:
        manager.asked_tokens, manager.reused_tokens = counts
        engine.scheduler.clock, engine.stats = clock, Stats()
        if engine.loop is not None:
            engine.loop.counts = Counts()
    if decoded is None or whole is None:
        return "self-check: nothing to compare, because the logits of random tokens are not finite"
    rounds = engine.tensors[0].dtype is FP8
    limits = [tolerance(model.module.dtype, quantized, one.layer, rounds, routed) for one in tensors]
    compare_states(decoded, whole, model.name, recurrences, max(limits))
    largest, allowed = compare(decoded, whole, length, model.name, tensors, limits)
    milliseconds = (time.perf_counter() - started) * 1000
    states = f" and {len(whole.states)} recurrent states" if whole.states else ""
    return (
        f"self-check: {STEPS} decode steps agree with a full pass over the same {len(whole.tokens)} tokens, keys and"
        f" values{states} to {largest:.1e} (allowed: {allowed:.1e}), {milliseconds:.0f} ms"
    )


@torch.inference_mode()
def check_chunks(engine: PoolingEngine, model: LoadedModel, allowed: float) -> str:
    """Of an engine that embeds: a prompt in chunks, which read each other's keys and values, against one pass."""
    started, scheduler, manager = time.perf_counter(), engine.scheduler, engine.manager
    prompt = some_tokens(model, min(PROMPT + STEPS, model.context, manager.block_size - 1))
    kept = scheduler.max_num_batched_tokens, scheduler.clock, manager.asked_tokens, manager.reused_tokens
    found = []
    try:
        for tokens in (STEPS, len(prompt)):
            scheduler.max_num_batched_tokens = min(tokens, kept[0])
            request = engine.embed(prompt, model.context)
            engine.enter(request)
            while request.finish_reason is None:
                engine.step()
            found.append(request.embedding)
    finally:
        scheduler.max_num_batched_tokens, scheduler.clock, manager.asked_tokens, manager.reused_tokens = kept
        engine.stats = Stats()
    chunked, whole = found
    if chunked is None or whole is None:
        return "self-check: nothing to compare, because the hidden states of random tokens are not finite"
    apart = distance(torch.tensor(chunked), torch.tensor(whole)).item()
    if not apart <= allowed:
        raise DecodeMismatch(
            f"{model.name} embeds wrong: fed {STEPS} tokens at a time a prompt's vector differs by {apart:.1e} from"
            f" that of one pass, and {allowed:.1e} is allowed. Something that the model keeps from step to step is"
            " lost, or a transform is wrong for few tokens: graft check --model says which. Use transformers for this"
            " model and report it, or, to run it all the same, self_check=False"
        )
    milliseconds = (time.perf_counter() - started) * 1000
    return (
        f"self-check: {len(prompt)} tokens, {STEPS} a step, give the vector of one pass to {apart:.1e} (allowed:"
        f" {allowed:.1e}), {milliseconds:.0f} ms"
    )


def some_tokens(model: LoadedModel, count: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(model.module.config.vocab_size) for _ in range(count)]


@torch.inference_mode()
def play(engine: Engine, prompt: Sequence[int], steps: int) -> Seen | None:
    """Moves a greedy request on by that many tokens and gives it up. None: it has no token to give.

    Captured steps are greedy, without log probabilities: asking for them would make a capture of its own. The last is
    looked at before it is known: a step more, ahead of the host, would be in the states of recurrent layers.
    """
    wanted = MOST_LOGPROBS if engine.loop is None or steps == 1 else None
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True, seed=0, logprobs=wanted)
    request = engine.add(prompt, params)
    try:
        while request.length < len(prompt) + steps and request.finish_reason is None:
            engine.step()
        return None if request.finish_reason is not None else look(engine, request)
    finally:
        blocks = [] if request.table is None else list(request.table.blocks)
        slots = [] if request.state_slot is None else [request.state_slot]
        engine.abort([request])
        for state in () if engine.states is None else engine.states.tensors:
            state[slots] = 0
        for tensor in map(raw, engine.tensors):
            tensor[blocks] = 0


def look(engine: Engine, request: Request) -> Seen | None:
    """None: it has no token to give."""
    assert request.table is not None
    block, count = request.table.blocks[0], request.fed
    where = torch.tensor([block], device=engine.tensors[0].device)
    cache = [read(tensor, where, torch.float32)[0, :count].clone() for tensor in engine.tensors]
    states = [] if engine.states is None else [state[request.state_slot].clone() for state in engine.states.tensors]
    while len(request.tokens) <= count and request.finish_reason is None:
        engine.step()
    if len(request.tokens) <= count:
        return None
    likely = request.logprobs[-1] if request.logprobs else None
    found = None if likely is None else {token: each.logprob for token, each in likely.items()}
    return Seen(request.tokens[:count], cache, request.tokens[count], found, states)


def compare(
    decoded: Seen, whole: Seen, start: int, model: str, tensors: Sequence[CachedTensor], allowed: Sequence[float]
) -> tuple[float, float]:
    """The largest difference of what the cache holds of the tokens from `start` on, and what is allowed there."""
    pairs = zip(decoded.cache, whole.cache, strict=True)
    found = torch.stack([distance(a[start:], b[start:]) for a, b in pairs]).tolist()
    for index, (value, limit) in enumerate(zip(found, allowed, strict=True)):
        if not value <= limit:
            wrong = sum(not v <= limit for v in found)
            raise mismatch(
                model, tensors[index].what, value, limit, f"{wrong} of {len(found)} keys and values differ"
            )
    check_choice(decoded, whole, model, allowed[-1])
    worst = max(range(len(found)), key=lambda index: found[index] / allowed[index])
    return found[worst], allowed[worst]


def compare_states(decoded: Seen, whole: Seen, model: str, recurrences: Sequence[str], allowed: float) -> None:
    """What recurrent layers have after the last token."""
    for name, ours, right in zip(recurrences, decoded.states, whole.states, strict=True):
        apart = float(distance(ours, right))
        if not apart <= allowed:
            raise mismatch(
                model, f"the recurrent states of {name}", apart, allowed, "keys and values were not looked at"
            )


def check_choice(decoded: Seen, whole: Seen, model: str, limit: float) -> None:
    """Both see about the same probabilities for the next token. Where those of the decode step are not known, its
    token is about as likely as any in the full pass."""
    assert whole.logprobs is not None
    scale = max(abs(value) for value in whole.logprobs.values())
    if decoded.logprobs is not None:
        both = decoded.logprobs.keys() & whole.logprobs.keys()
        apart = max((abs(decoded.logprobs[token] - whole.logprobs[token]) for token in both), default=scale)
    else:
        least = min(whole.logprobs.values())
        apart = whole.logprobs[whole.chosen] - whole.logprobs.get(decoded.chosen, least)
    if apart > 2 * limit * max(scale, 1.0):
        found = apart / max(scale, 1.0)
        raise mismatch(model, "log probabilities", found, 2 * limit, "keys and values of all layers agree")


def mismatch(model: str, what: str, found: float, allowed: float, detail: str) -> DecodeMismatch:
    return DecodeMismatch(
        f"{model} decodes wrong: after {STEPS} decode steps {what} differ by {found:.1e} from those of one pass over"
        f" the same tokens, and {allowed:.1e} is allowed ({detail}). Something that the model keeps from step to step"
        " is lost before that place, or a transform is wrong for one token: graft check --model says which. Use"
        " transformers for this model and report it, or, to run it all the same, self_check=False"
    )


def distance(left: Tensor, right: Tensor) -> Tensor:
    """The root mean square of the difference, in that of the values."""
    wide = torch.float64 if right.device.type == "cpu" else torch.float32
    left, right = left.to(wide), right.to(wide)
    return (left - right).norm() / right.norm().clamp_min(torch.finfo(torch.float32).tiny)


def tolerance(
    dtype: torch.dtype, quantized: bool = False, layer: int = 0, float8_cache: bool = False, routed: bool = False
) -> float:
    """Half of the digits: 3e-4 in float32, 3e-2 in float16, 9e-2 in bfloat16. SmolLM2 in float32 differs by 3e-6,
    as sums run in another order; a lost state makes 1e-2 and more.

    Kernels of quantized weights round activations to 8 bits, some of them by the number of tokens; such errors add up
    as the root of the layers: 4e-2 over SmolLM2's 30 on a CPU, 0.25 at layer 27 of an 8B model in fp8 on a GPU.

    A float8 cache makes more of a difference: two numbers that differ by n before they are rounded go to neighbours,
    STEP apart, with a chance of n / STEP, so that the mean square is n * STEP. It goes on through the layers that
    read them: 2e-2 at layer 4 and 5.5e-2 at layer 28 of SmolLM2 in bfloat16.

    A router whose experts are about even chooses another of them for a rounding, and its token goes on with that: of
    Moonlight in bfloat16 2e-2 until then, 8e-2 behind it and 0.44 at layer 26, where float32 stays at 3e-6 (H200).
    """
    own = torch.finfo(dtype).eps ** 0.5
    if float8_cache:
        own = max((own * STEP) ** 0.5, FLOAT8 * layer**0.5)
    if routed and own > FEW_ROUNDINGS:
        own = max(own, ROUTED * (1 + layer) ** 0.5)
    return max(own, QUANTIZED * (1 + layer) ** 0.5 if quantized else 0.0)
