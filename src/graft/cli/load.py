"""From the options of a command to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graft.files import Progress
    from graft.models.load import LoadedModel
    from graft.runtime.llm import LLM
    from graft.runtime.params import SamplingParams


def sampling_params(stop: Sequence[str] | None, **options: Any) -> SamplingParams:
    from graft.runtime.params import SamplingParams

    return SamplingParams(stop=tuple(stop or ()), **options)


def load_llm(
    model: str,
    progress: Progress,
    *,
    dtype: str = "auto",
    device: str = "auto",
    config: str | None = None,
    sets: Sequence[str] | None = None,
    plugins: Sequence[str] | None = None,
    quantize: str | None = None,
    keep_weights: bool = False,
    trust_remote_code: bool = False,
    options_for: Callable[[LoadedModel], Mapping[str, Any]] | None = None,
    **options: Any,
) -> LLM:
    """The model's own settings lie between the defaults and what the user gave. `options` go to LLM, and so do those
    that `options_for` gives for the loaded model.

    keep_weights: the Hugging Face module is used as well, so quantizing must leave it its weights.
    """
    from graft.cli.show import tell_notes
    from graft.models.load import load_model
    from graft.runtime.llm import LLM, engine_options, in_blocks, overlay
    from graft.runtime.options import EngineOptions
    from graft.transforms.config import load_config, quantize_sets

    given = {"sets": (*(sets or ()), *quantize_sets(quantize)), "plugins": tuple(plugins or ())}
    load_config(config, **given)  # a wrong key or size is told before the model is loaded
    engine_options({name: value for name, value in options.items() if name in EngineOptions.__dataclass_fields__})
    blocks = in_blocks(options.get("backend", "auto"), quantize, dtype, device)
    loaded = load_model(
        model, dtype=dtype, device=device, progress=progress, in_blocks=blocks, trust_remote_code=trust_remote_code
    )
    tell_notes(loaded.notes)
    settings = load_config(config, model=overlay(loaded), **given)
    more = options_for(loaded) if options_for else {}
    return LLM(loaded, config=settings, progress=progress, keep_weights=keep_weights, **options, **more)
