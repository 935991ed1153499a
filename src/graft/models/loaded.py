"""A model in memory, as the engine takes it. Transformers is not needed to hold one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.models.registry import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from graft.weights.lazy import LazyWeights


@dataclass(frozen=True)
class LoadedModel:
    name: str
    module: PreTrainedModel  # from an artifact: a StoredModule, which has the configuration alone
    tokenizer: Any
    family: Family | None
    context: int  # how many tokens fit
    lazy: LazyWeights | None = None  # weights that still lie in their file: the module has shapes alone
    floats: Callable[[], PreTrainedModel] | None = None  # of a model with such weights: a module that has them
    folder: Path | None = None  # the checkpoint that its weights were read from, if it is the user's own
    notes: tuple[str, ...] = ()  # for the report: what of its folder is not used, and how weights were read

    @property
    def layers(self) -> int:
        return self.module.config.num_hidden_layers

    @property
    def transforms(self) -> Mapping[str, Any]:
        return self.family.transforms if self.family else {}
