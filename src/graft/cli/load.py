"""From the options of a command to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graft.base.files import Progress
    from graft.engine.llm import LLM
    from graft.engine.params import SamplingParams
    from graft.models.loaded import LoadedModel


def sampling_params(stop: Sequence[str] | None, **options: Any) -> SamplingParams:
    from graft.engine.params import SamplingParams

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
    tensor_parallel_size: int = 1,
    **options: Any,
) -> LLM:
    """The model's own settings lie between the defaults and what the user gave. `options` go to LLM, and so do those
    that `options_for` gives for the loaded model.

    keep_weights: the Hugging Face module is used as well, so quantizing must leave it its weights.
    """
    if tensor_parallel_size != 1:
        return load_on_ranks(
            model, progress, tensor_parallel_size, config, sets, plugins, dtype=dtype, device=device,
            quantize=quantize, keep_weights=keep_weights or None, trust_remote_code=trust_remote_code, **options,
        )  # fmt: skip
    from graft.cli.show import tell_notes
    from graft.engine.artifact.format import is_engine
    from graft.engine.llm import LLM, engine_options
    from graft.engine.options import EngineOptions

    if is_engine(model):
        from graft.engine.artifact.load import loaded_model

        more = options_for(loaded_model(model)) if options_for else {}
        return LLM(
            model, dtype=dtype, device=device, config=config or dict.fromkeys(sets or ()) or None,
            progress=progress, quantize=quantize, keep_weights=keep_weights, **options, **more,
        )  # fmt: skip
    from graft.engine.stages import load_decoder, settings_for
    from graft.passes.config import load_config, quantize_sets

    given = {"sets": tuple(sets or ()), "plugins": tuple(plugins or ())}
    # a wrong key or size is told before the model is loaded
    load_config(config, sets=(*given["sets"], *quantize_sets(quantize)), plugins=given["plugins"])
    engine_options({name: value for name, value in options.items() if name in EngineOptions.__dataclass_fields__})
    loaded = load_decoder(
        model, dtype=dtype, device=device, backend=options.get("backend", "auto"), quantize=quantize,
        kv_cache_dtype=options.get("kv_cache_dtype", "auto"), trust_remote_code=trust_remote_code, progress=progress,
    )  # fmt: skip
    tell_notes(loaded.notes)
    settings = settings_for(loaded, config, quantize, **given)
    more = options_for(loaded) if options_for else {}
    return LLM(loaded, config=settings, progress=progress, keep_weights=keep_weights, **options, **more)


def load_on_ranks(
    model: str,
    progress: Progress,
    size: int,
    config: str | None,
    sets: Sequence[str] | None,
    plugins: Sequence[str] | None,
    **options: Any,
) -> LLM:
    """Every rank loads its part by itself: what the user gave goes to each as one mapping."""
    from graft.base.errors import UsageError
    from graft.engine.llm import LLM
    from graft.passes.config import load_config, nested, quantize_sets

    if plugins:
        raise UsageError("--tensor-parallel: --plugin is not handed to the other ranks; install the plugin's package")
    load_config(config, sets=(*(sets or ()), *quantize_sets(options["quantize"])))  # told before anything starts
    return LLM(model, progress=progress, config=nested(config, sets or ()), tensor_parallel_size=size, **options)
