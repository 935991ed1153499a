"""graft.LLM: a model by name, folder or file, ready to generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.backends import lower
from graft.capture.decoder import capture_decoder
from graft.errors import EmptyPrompt, PromptTooLong, TokenizerMissing, UsageError
from graft.files import Progress
from graft.kvcache.blocks import KVCache, LayerShape, memory_limit
from graft.models.load import LoadedModel, load_model
from graft.runtime.core import Output, Request, Stats
from graft.runtime.detokenize import Detokenizer
from graft.runtime.engine import Engine
from graft.runtime.params import SamplingParams
from graft.transforms.base import Context
from graft.transforms.config import Layer, PipelineConfig, flatten, load_config
from graft.transforms.pipeline import run_pipeline
from graft.transforms.report import Report

Prompt = str | Sequence[int]


class LLM:
    """Loads, captures, transforms and lowers a decoder, and generates with it."""

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        dtype: str = "auto",
        device: str = "auto",
        config: str | Path | Mapping[str, Any] | PipelineConfig | None = None,
        backend: str = "auto",
        dump_dir: str | Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        given = model if isinstance(model, LoadedModel) else None
        self.model = given or load_model(model, dtype=dtype, device=device, progress=progress)  # pyrefly: ignore
        settings = config if isinstance(config, PipelineConfig) else load_config(config, model=overlay(self.model))
        require_cache(settings)
        if progress:
            progress("capturing the graph", 0, 1)
        self.graph_module = capture_decoder(self.model.module)
        context = Context(route="decoder")
        report = run_pipeline(
            self.graph_module,
            settings,
            context,
            model=self.model.name,
            dump_dir=dump_dir,
            progress=transform_progress(progress),
        )
        lowered = lower(self.graph_module, backend, settings.kernels)
        self.backend = lowered.backend
        self.report: Report = replace(report, kernels=lowered.kernels, notes=(*report.notes, *lowered.notes))
        self.tokenizer = self.model.tokenizer
        device_ = next(self.model.module.parameters()).device
        layers = [LayerShape(c.kv_heads, c.head_dim, c.dtype) for c in context.outputs["kv_cache"]]
        cache = KVCache(layers, context.block_size, device_, memory_limit(device_))
        self.engine = Engine(lowered.call, cache, stop_tokens(self.model))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Completes every prompt; they run together. `params` is one for all, or one each."""
        ids = [self.encode(prompt) for prompt in as_list(prompts)]
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(ids)
        if len(each) != len(ids):
            raise UsageError(f"{len(ids)} prompts but {len(each)} sampling parameters; give one for all, or one each")
        requests = self.submit(ids, each)
        try:
            while any(request.finish_reason is None for request in requests):
                self.engine.step()
        finally:
            self.engine.abort(requests)
        return [self.output(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yields pieces of text as they come."""
        if self.tokenizer is None:
            raise TokenizerMissing(self.model.name)
        ids = self.encode(prompt)
        (request,) = self.submit([ids], [params or SamplingParams()])
        text = Detokenizer(self.tokenizer, ids)
        fed = 0
        try:
            while request.finish_reason is None:
                self.engine.step()
                for token in request.new_tokens[fed:]:  # another caller's step may have added some
                    fed += 1
                    yield text.feed(token)
            for token in request.new_tokens[fed:]:
                yield text.feed(token)
            yield text.rest()
        finally:
            self.engine.abort([request])

    @property
    def stats(self) -> Stats:
        """Times and counts of the last generate or stream call."""
        return self.engine.stats

    def submit(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Request]:
        for ids, each in zip(prompts, params, strict=True):
            if not ids:
                raise EmptyPrompt
            if len(ids) + each.max_tokens > self.model.context:
                raise PromptTooLong(len(ids), each.max_tokens, self.model.context)
        self.engine.stats = Stats()
        return self.engine.add(prompts, params)

    def encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            vocabulary = self.model.module.config.vocab_size
            wrong = next((t for t in prompt if not 0 <= t < vocabulary), None)
            if wrong is not None:
                raise UsageError(f"token id {wrong} is outside the vocabulary of {vocabulary}")
            return list(prompt)
        if self.tokenizer is None:
            raise TokenizerMissing(self.model.name)
        return list(self.tokenizer(prompt)["input_ids"])

    def output(self, request: Request) -> Output:
        text = self.tokenizer.decode(request.new_tokens, skip_special_tokens=True) if self.tokenizer else ""
        return Output(text, request.new_tokens, request.finish_reason or "length")


def overlay(model: LoadedModel) -> Layer | None:
    """The family's settings as a configuration layer."""
    if not model.transforms or model.family is None:
        return None
    name = f"registry/{model.family.name}.yaml"
    return Layer(name, flatten({"transforms": model.transforms}, name))


def require_cache(config: PipelineConfig) -> None:
    for name in ("last_token_logits", "insert_kv_cache"):
        if name not in config.transforms or not config.transforms[name].enabled:
            raise UsageError(
                f"the engine needs the transform {name}; enable it, or use graft.compile without an engine"
            )


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A string, a list of token ids, or a list of either."""
    if isinstance(prompts, str):
        return [prompts]
    return [list(prompts)] if prompts and isinstance(prompts[0], int) else list(prompts)  # pyrefly: ignore


def transform_progress(progress: Progress | None) -> Progress | None:
    if progress is None:
        return None
    return lambda name, done, total: progress(f"transform {name}" if name else "transforms done", done, total)


def stop_tokens(model: LoadedModel) -> frozenset[int]:
    """The model's end-of-text tokens, from its generation config or its config."""
    for config in (getattr(model.module, "generation_config", None), model.module.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset()
