"""Checks that a checkpoint is complete."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from graft.errors import CheckpointError


def check_safetensors(path: Path) -> None:
    """Raises CheckpointError unless the file is as long as its header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise CheckpointError(
                    f"{path} is truncated: its header should have {length} bytes; copy the file again"
                )
            header = json.loads(file.read(length))
    except (struct.error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise CheckpointError(f"{path} is truncated: {size} bytes instead of {expected}; copy the file again")


def check_folder(folder: Path) -> None:
    """Raises CheckpointError unless the folder holds a config and whole weight files."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    try:
        json.loads((folder / "config.json").read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} is not JSON: {error}") from error
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
            raise CheckpointError(f"{index} is damaged: {type(error).__name__}: {error}; copy it again") from error
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks the shard {missing[0]} that its index names; copy it again")
    files = sorted(folder.glob("*.safetensors"))
    if not files and not list(folder.glob("*.bin")):
        raise CheckpointError(f"{folder} has no weights (*.safetensors)")
    for path in files:
        check_safetensors(path)
