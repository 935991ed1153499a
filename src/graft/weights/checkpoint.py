"""Checks that a checkpoint is complete, before anything else reads it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from graft.base.errors import CheckpointError, GraftError
from graft.base.files import is_disk_full

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
LONGEST = 240  # characters of somebody else's message that an error of ours repeats


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever a library raises here means that the checkpoint is unusable: one line instead of its traceback.

    transformers, tokenizers, gguf and safetensors raise some twenty kinds of exceptions for damaged files.
    """
    try:
        yield
    except (GraftError, MemoryError):
        raise
    except Exception as error:
        if is_disk_full(error):
            raise
        raise CheckpointError(f"{what}: {told(error)}") from error


def told(error: BaseException) -> str:
    """An exception of another library in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= LONGEST else text[:LONGEST] + '…'}"


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} where an object {{…}} belongs; copy it again")
    return content


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, it is not JSON: {told(error)}; copy it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def check_safetensors(path: Path) -> None:
    """Raises CheckpointError unless every tensor of the header lies in the file, on bytes of its own."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link to {path.readlink()}, which is not there; copy the file itself")
    if not path.is_file():
        raise CheckpointError(f"{path} is {'a folder, ' if path.is_dir() else ''}not a file; copy it again")
    header, room = read_header(path)
    words = header.get("__metadata__", {})
    if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
        raise CheckpointError(f"{path} is damaged: its __metadata__ does not map words to words; copy it again")
    spans = sorted(span(path, name, entry) for name, entry in header.items() if name != "__metadata__")
    end, last = 0, "the header"
    for start, stop, name in spans:
        if start != end:
            problem = "overlap" if start < end else "have a hole between them"
            raise CheckpointError(f"{path} is damaged: {last} and {name} {problem} at byte {start}; copy it again")
        end, last = stop, name
    if end != room:
        raise CheckpointError(
            f"{path} is truncated or damaged: {room} bytes of tensors instead of {end}; copy the file again"
        )


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and how many bytes follow it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise CheckpointError(
                    f"{path} is truncated: its header should have {length} bytes; copy the file again"
                )
            header = json.loads(file.read(length))
    except (struct.error, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {told(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is a {type(header).__name__}")
    return header, size - 8 - length


def span(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    """Where a tensor lies: from, to, name; an entry that says it in another way than the format is damage."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (is_counts(shape) and is_counts(offsets) and len(offsets) == 2 and isinstance(dtype, str)):
        raise CheckpointError(
            f"{path} is damaged: the header says {shortened(entry)} of {name}, not its dtype, shape and data_offsets;"
            " copy it again"
        )
    if dtype not in BITS:
        raise CheckpointError(f"{path}: {name} has the unknown dtype {shortened(dtype)}; known are {', '.join(BITS)}")
    bits = prod(shape) * BITS[dtype]
    if (offsets[1] - offsets[0]) * 8 != bits:
        raise CheckpointError(
            f"{path} is damaged: {name}, {dtype} {shape}, takes {-(-bits // 8)} bytes, but has"
            f" {offsets[1] - offsets[0]}; copy it again"
        )
    return offsets[0], offsets[1], name


def is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def check_folder(folder: Path) -> None:
    """Raises CheckpointError unless the folder holds a config and whole weight files."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    read_object(folder / "config.json")
    if (folder / "generation_config.json").exists():  # transformers skips one that it cannot read, end tokens and all
        read_object(folder / "generation_config.json")
    check_index(folder, folder / "model.safetensors.index.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files and not list(folder.glob("*.bin")):
        raise CheckpointError(f"{folder} has no weights (*.safetensors)")
    for path in files:
        check_safetensors(path)


def check_index(folder: Path, index: Path) -> None:
    """Every shard that the index names is there."""
    if not index.exists():
        return
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{index} is damaged: its weight_map does not map tensors to files; copy it again")
    for name in sorted(set(shards.values())):
        if not (folder / name).is_file() and not (folder / name).is_symlink():
            raise CheckpointError(f"{folder} lacks the shard {name} that its index names; copy it again")
