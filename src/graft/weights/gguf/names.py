"""What transformers makes of the tensors of a GGUF file: names, the order of rows, numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    rows: list[int]
    transposed: bool = False


class Names:
    """What transformers makes of a file's tensors: another name, other rows, other numbers."""

    def __init__(self, processor: Any, mapping: dict[str, str]) -> None:
        self.processor = processor
        self.mapping = mapping

    @staticmethod
    def of(reader: Any, model: torch.nn.Module, config: Any) -> Names:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        return Names(processor, get_gguf_hf_weights_map(model, processor))

    def processed(self, weights: np.ndarray, name: str, tensors: dict[str, Any]) -> Any:
        return self.processor.process(
            weights=weights, name=name, tensor_key_mapping=self.mapping, parsed_parameters={"tensors": tensors}
        )

    def target(self, name: str) -> str | None:
        return self.mapping.get(name)

    def order(self, tensor: Any) -> Order | None:
        """Where rows go, read off what happens to their numbers; None where more than rows would move."""
        count = int(tensor.data.shape[0])
        numbers, others = np.arange(count, dtype=np.float32)[:, None], {}
        try:
            found = self.processed(numbers, tensor.name, others)
        except (ValueError, IndexError, KeyError, AttributeError):
            return None  # it looks at the columns too
        if others or found.name != tensor.name:
            return None
        rows = np.asarray(found.weights)
        whole = sorted(rows.flatten().tolist()) == list(range(count))
        if rows.shape == (1, count) and whole and np.array_equal(rows[0], numbers[:, 0]):
            return Order([], transposed=True)
        return Order([int(row) for row in rows[:, 0]]) if rows.shape == (count, 1) and whole else None

    def dropped(self, reader: Any) -> list[str]:
        """Tensors of a file that become no part of the model, as their names and shapes tell."""
        lost = []
        for tensor in reader.tensors:
            if self.target(tensor.name) is None:
                others: dict[str, Any] = {}
                zeros = np.broadcast_to(np.float32(0), [int(size) for size in reversed(tensor.shape)])
                found = self.processed(zeros, tensor.name, others)
                if not others and self.target(found.name or "") is None:
                    lost.append(tensor.name)
        return lost

    def floats(self, tensor: Any) -> dict[str, Tensor]:
        """The tensor's numbers in float32, under Hugging Face's names."""
        from gguf import dequantize

        others: dict[str, Any] = {}
        found = self.processed(dequantize(tensor.data, tensor.tensor_type), tensor.name, others)
        name = self.target(found.name) if found.name else None
        if name is not None:
            others[name] = torch.from_numpy(np.copy(found.weights))
        return {name: torch.as_tensor(value).float() for name, value in others.items()}
