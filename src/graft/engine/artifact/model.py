"""The model of a compiled engine: its configuration and dtype. The Hugging Face module is not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from graft.base.errors import UsageError


class StoredConfig:
    """The values of a configuration, as the model's own had them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def to_json_string(self) -> str:
        return json.dumps(self.__dict__, indent=2, sort_keys=True) + "\n"


class StoredModule(torch.nn.Module):
    """Stands where a Hugging Face module does, for those who ask it for its configuration."""

    def __init__(self, config: StoredConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "a compiled engine holds no Hugging Face module; load the model itself for what needs one (--compare)"
        )
