"""GGUF files whose blocks stay in the file: a folder in the cache has the rest, and says where each weight lies.

    config, tokenizer    in Hugging Face's form, as of a converted file
    rest.safetensors     what is stored as floats or is no matrix, in float32; and, as Q8_0, weights in a type that
                         has no packed form (Q5_K, Q6_K, …)
    blocks.json          the file, and for each of its other weights: type, offset, rows and their order

The folder takes seconds to make, and the next start reads no metadata of the GGUF file at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from graft.base.errors import CheckpointError
from graft.base.files import Progress, atomic_folder, cache_dir
from graft.weights.checkpoint import check_folder, refusing
from graft.weights.file_rows import FileRows
from graft.weights.gguf.convert import check_gguf, identity, write_front
from graft.weights.gguf.names import Names
from graft.weights.gguf.reader import one_reader
from graft.weights.gguf.support import check_shapes, refuse_dropped
from graft.weights.lazy import LazyWeights, untouched
from graft.weights.native_tiles import GGUF_BYTES
from graft.weights.recorded import recorded_tensors
from graft.weights.sources import WeightFile

INDEX, REST = "blocks.json", "rest.safetensors"
FLOATS = ("F32", "F16", "BF16", "F64")
SPARE = "Q8_0"  # what weights without a packed form are rounded to


def blocks_folder(path: Path, progress: Progress | None = None, name: str | None = None) -> Path:
    """The folder of a GGUF file; made now if it is not in the cache yet."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    target = cache_dir() / "models" / f"{name or path.stem}-{identity(path)}-blocks"
    if not (target / INDEX).is_file():
        with one_reader(), atomic_folder(target) as folder, refusing(f"{path} cannot be read"):
            check_gguf(path)
            write_blocks(path, folder, progress)
    check_folder(target)
    return target


def write_blocks(path: Path, folder: Path, progress: Progress | None) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file

    config, model = write_front(path, folder, progress)
    reader = GGUFReader(path)
    named = Names.of(reader, model, config)
    refuse_dropped(path, named.dropped(reader))
    blocks: dict[str, Any] = {}
    rest: dict[str, Tensor] = {}
    orders: list[list[int]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in reader.tensors:
        if progress:
            progress("finding the weights", len(blocks) + len(rest), len(reader.tensors))
        kind, name = tensor.tensor_type.name, named.target(tensor.name)
        order = None if kind in FLOATS or tensor.data.ndim != 2 else named.order(tensor)
        if order is None or (kind not in GGUF_BYTES and int(tensor.shape[0]) % 32):
            floats = named.floats(tensor)
            rest |= floats
            shapes |= {name: tuple(value.shape) for name, value in floats.items()}
            continue
        if name is None:
            continue
        entry: dict[str, Any] = {"quant": kind, "offset": int(tensor.data_offset), "rows": int(tensor.data.shape[0])}
        columns, rows = (int(size) for size in tensor.shape)
        shapes[name] = (columns, rows) if order.transposed else (rows, columns)
        if order.transposed:
            entry["transposed"] = True
        elif order.rows != list(range(len(order.rows))):
            orders = orders if order.rows in orders else [*orders, order.rows]
            entry["order"] = orders.index(order.rows)
        if kind not in GGUF_BYTES:
            entry |= {"quant": SPARE, "source": kind}
            rest[name] = torch.from_numpy(requantized(tensor))
        blocks[name] = entry | {"bytes": int(tensor.data.shape[1])}
    check_shapes(path, model, shapes)
    save_file({name: tensor.contiguous() for name, tensor in rest.items()}, folder / REST)
    index = {"file": str(path.resolve()), "size": path.stat().st_size, "orders": orders, "tensors": blocks}
    (folder / INDEX).write_text(json.dumps(index))


def requantized(tensor: Any) -> np.ndarray:
    """uint8 [rows, bytes], in Q8_0."""
    from gguf import GGMLQuantizationType, dequantize
    from gguf.quants import quantize

    return quantize(dequantize(tensor.data, tensor.tensor_type), GGMLQuantizationType[SPARE])


class NoInit(TorchFunctionMode):
    """Modules are made without random numbers, in memory that is not touched: it takes none of the machine's."""

    SKIPPED = frozenset({"uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in self.SKIPPED:
            return args[0] if args else given["tensor"]
        if func is torch.empty and given.get("device") in (None, "cpu", torch.device("cpu")):
            like = torch.empty(*args, **(given | {"device": "meta"}))  # pyrefly: ignore
            return untouched(like.shape, like.dtype)
        return func(*args, **given)


def lazy_model(
    folder: Path, dtype: torch.dtype, attention: str | None, *, sliced: bool = False
) -> tuple[Any, LazyWeights]:
    """The module, with numbers where it has floats of the file, and what stands behind its other parameters. sliced:
    those floats are not read either."""
    from safetensors.torch import load_file

    index = json.loads((folder / INDEX).read_text())
    rest, rows = load_file(folder / REST), dict(file_rows(folder, index))
    with NoInit():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    lazy = LazyWeights(files=(WeightFile.open(folder / REST),) if sliced else ())
    floats = recorded_tensors(list(lazy.files))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if name in rows:
            part = rows[name]
            lazy.put(parameter, part if part.raw.numel() else replace(part, raw=rest[name]))
        elif name in floats:
            lazy.put_source(parameter, floats[name].source)
        elif name in rest:
            parameter.copy_(rest[name])
        else:
            raise CheckpointError(f"the GGUF file has no tensor for {name}")
    return model.eval(), lazy


def float_model(folder: Path, dtype: torch.dtype, attention: str | None) -> Any:
    """The module with all its weights, dequantised."""
    model, lazy = lazy_model(folder, dtype, attention)
    lazy.fill_all(model.parameters())
    return model


def file_rows(folder: Path, index: dict[str, Any]) -> Iterator[tuple[str, FileRows]]:
    path = Path(index["file"])
    if not path.is_file() or path.stat().st_size != index["size"]:
        raise CheckpointError(
            f"{path} is gone or is another file than {folder} was made from; run again with the file"
        )
    content = torch.from_numpy(np.memmap(path, mode="c"))  # pages of the file, read when they are needed
    orders = [torch.tensor(order) for order in index["orders"]]
    for name, entry in index["tensors"].items():
        size = entry["rows"] * entry["bytes"]
        raw = content[entry["offset"] : entry["offset"] + size].view(entry["rows"], entry["bytes"])
        if "source" in entry:
            raw = raw[:0]  # in the rest
        order = orders[entry["order"]] if "order" in entry else None
        yield name, FileRows(entry["quant"], raw, order, entry.get("transposed", False), entry.get("source", ""))
