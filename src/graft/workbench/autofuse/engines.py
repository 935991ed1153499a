"""The graph that an engine runs, an engine with the fusion and one without it, and whether they say the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from graft.bench.bench import cache_need
from graft.bench.plan import BenchPlan
from graft.engine.llm import LLM
from graft.engine.params import MOST_LOGPROBS, SamplingParams
from graft.engine.setup.self_check import tolerance
from graft.engine.setup.stages import capture, load_decoder, settings_for, target_of, transform
from graft.workbench.discover import Discovery, discover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graft.base.files import Progress
    from graft.workbench.autofuse.request import AutofuseRequest
    from graft.workbench.autofuse.trial import TrialOrder

NEW = 6  # tokens behind the prompt that are compared


def candidates_of(request: AutofuseRequest, progress: Progress | None = None) -> Discovery:
    """What is left to fuse in the graph as it is transformed for the device and the backend that are measured."""
    loaded = load_decoder(
        request.model, dtype=request.dtype, device=request.device, backend=request.backend,
        trust_remote_code=request.trust_remote_code, progress=progress,
    )  # fmt: skip
    settings = settings_for(loaded, request.config, None, sets=request.sets, plugins=request.plugins)
    target = target_of(loaded, settings, request.backend)
    made = transform(loaded, capture(loaded, progress), settings, target, keep_weights=True, progress=progress)
    return discover(
        made.graph_module, model=loaded.name, config=settings, progress=progress,
        other_devices=loaded.module.device.type == "cuda",
    )  # fmt: skip


def make_engine(order: TrialOrder, plugins: Sequence[str], *, on: bool) -> LLM:
    loaded = load_decoder(
        order.model, dtype=order.dtype, device=order.device, backend=order.backend,
        trust_remote_code=order.trust_remote_code,
    )  # fmt: skip
    sets = (*order.sets, f"transforms.{order.transform}.enabled={str(on).lower()}")
    settings = settings_for(loaded, order.config, None, sets=sets, plugins=plugins)
    # two engines share the device: by default the first one's cache would take all memory that is free on a GPU
    plan = BenchPlan(batches=(2,), prompts=(order.prompt,), new=order.new + NEW)
    memory = cache_need(loaded, plan)
    return LLM(loaded, config=settings, backend=order.backend, max_num_seqs=2, kv_cache_memory=memory)


def differences(before: LLM, after: LLM, prompt: int) -> tuple[str, str]:
    """What differs, or '' and how near they are: log probabilities of every token of a prompt, and of those behind
    it, which are fed to both alike."""
    source = random.Random("autofuse")
    vocabulary = before.model.module.config.get_text_config().vocab_size
    tokens = [source.randrange(vocabulary) for _ in range(prompt)]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    (made,) = before.generate([tokens], params)
    asked = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=MOST_LOGPROBS)
    whole = [*tokens, *made.token_ids]
    ours, theirs = (llm.generate([whole], asked)[0].prompt_logprobs for llm in (after, before))
    (again,) = after.generate([tokens], params)
    limit = 2 * tolerance(before.model.module.dtype)
    worst = 0.0
    for at, (mine, wanted) in enumerate(zip(ours or (), theirs or (), strict=True)):
        if mine is None or wanted is None:
            continue
        scale = max(1.0, *(abs(one.logprob) for one in wanted.values()))
        both = mine.keys() & wanted.keys()
        apart = max((abs(mine[token].logprob - wanted[token].logprob) / scale for token in both), default=1.0)
        if not apart <= limit or len(both) < len(wanted) // 2:
            return f"log probabilities of token {at} differ by {apart:.1e} of the largest, {limit:.1e} is allowed", ""
        worst = max(worst, apart)
    decoded = sum(a == b for a, b in zip(made.token_ids, again.token_ids, strict=True))
    if decoded == 0 and worst > limit / 100:
        return f"none of {NEW} decoded tokens is the same", ""
    return (
        "",
        f"{len(whole)} tokens, log probabilities to {worst:.1e} (allowed {limit:.1e}), {decoded} of {NEW} decoded",
    )
