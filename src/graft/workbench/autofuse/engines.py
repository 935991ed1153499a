"""The graph that an engine runs, and an engine with the fusion and one without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graft.bench.bench import cache_need
from graft.bench.plan import BenchPlan
from graft.engine.llm import LLM
from graft.engine.setup.stages import capture, load_decoder, settings_for, target_of, transform
from graft.workbench.autofuse.answers import NEW
from graft.workbench.discover import Discovery, discover
from graft.workbench.discover.gemms import mergeable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graft.base.files import Progress
    from graft.workbench.autofuse.request import AutofuseRequest
    from graft.workbench.autofuse.trial import TrialOrder


def candidates_of(request: AutofuseRequest, progress: Progress | None = None) -> Discovery:
    """What is left to fuse in the graph as it is transformed for the device and the backend that are measured."""
    loaded = load_decoder(
        request.model, dtype=request.dtype, device=request.device, backend=request.backend,
        trust_remote_code=request.trust_remote_code, progress=progress,
    )  # fmt: skip
    settings = settings_for(loaded, request.config, None, sets=request.sets, plugins=request.plugins)
    target = target_of(loaded, settings, request.backend)
    captured = capture(loaded, progress)
    together = mergeable(captured.graph_module)
    made = transform(loaded, captured, settings, target, keep_weights=True, progress=progress)
    return discover(
        made.graph_module, model=loaded.name, config=settings, progress=progress,
        other_devices=loaded.module.device.type == "cuda", together=together,
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
