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
    use_cache: bool = True,
    recompile: bool = False,
    options_for: Callable[[LoadedModel], Mapping[str, Any]] | None = None,
    tensor_parallel_size: int | None = None,
    **options: Any,
) -> LLM:
    """The model's own settings lie between the defaults and what the user gave. `options` go to LLM, and so do those
    that `options_for` gives for the loaded model.

    keep_weights: the Hugging Face module is used as well, so quantizing must leave it its weights. use_cache: see
    LLM.
    """
    from graft.cli.show import tell_notes
    from graft.engine.artifact.request import EngineRequest, Starter
    from graft.engine.llm import LLM, engine_options
    from graft.engine.options import EngineOptions
    from graft.engine.start import start_engine

    sizes = {name: value for name, value in options.items() if name in EngineOptions.__dataclass_fields__}
    rest = {name: value for name, value in options.items() if name not in sizes}
    request = EngineRequest(
        model, engine_options(sizes), dtype, device, config, quantize=quantize, keep_weights=keep_weights,
        trust_remote_code=trust_remote_code, sets=tuple(sets or ()), plugins=tuple(plugins or ()),
        use_cache=use_cache, recompile=recompile, tensor_parallel_size=tensor_parallel_size, **rest,
    )  # fmt: skip
    return LLM.of(start_engine(request, Starter(options_for, tell_notes, progress)))
