"""GGUF files: dequantised once into a safetensors folder in the cache, with checksums, whole or not at all.

Dequantised weights are float32, as the gguf package computes them, and are stored so. Where bfloat16 is asked for,
they are rounded, once, into a folder of their own, which is half as large.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from graft.base.errors import CheckpointError
from graft.base.files import Progress, atomic_folder, cache_dir, sha256
from graft.weights.checkpoint import check_folder, refusing
from graft.weights.gguf.header import read_gguf_header
from graft.weights.gguf.names import Names
from graft.weights.gguf.reader import one_reader
from graft.weights.gguf.support import check_shapes, check_supported, refuse_dropped

MANIFEST = "graft.json"


def stored_dtype(wanted: torch.dtype) -> torch.dtype:
    """What weights are stored in for a model in `wanted`: nothing is rounded that would not be rounded anyway."""
    return torch.bfloat16 if wanted is torch.bfloat16 else torch.float32


def converted_folder(name: str, stored: torch.dtype) -> Path:
    return cache_dir() / "models" / (name if stored is torch.bfloat16 else f"{name}-float32")


def convert_gguf(
    path: Path, progress: Progress | None = None, name: str | None = None, *, stored: torch.dtype = torch.float32
) -> Path:
    """The Hugging Face folder made from a GGUF file; made now if it is not in the cache yet."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    target = converted_folder(name or f"{path.stem}-{identity(path)}", stored)
    if (target / MANIFEST).is_file():
        check_folder(target)
        return target
    with one_reader(), atomic_folder(target) as folder, refusing(f"{path} cannot be read"):
        check_gguf(path)
        types = write_folder(path, folder, progress, stored)
        checksums = {p.name: sha256(p, progress) for p in sorted(folder.glob("*.safetensors"))}
        manifest = {"source": path.name, "source_sha256": sha256(path), "files": checksums, "types": types}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return target


def identity(path: Path) -> str:
    """Changes when the file is replaced; cheap for files of many gigabytes."""
    stat = path.stat()
    return hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]


def check_gguf(path: Path) -> None:
    """Raises CheckpointError unless the file is whole, and one that a decoder can be made of."""
    check_supported(path, read_gguf_header(path))


def converted_note(folder: Path, dtype: torch.dtype) -> str:
    """A line for the report: what the weights were in the file, and what was rounded on the way."""
    manifest = json.loads((folder / MANIFEST).read_text())
    types = ", ".join(f"{kind}: {count}" for kind, count in manifest.get("types", {}).items())
    rounded = "" if dtype in (torch.float32, torch.float64) else f", then rounded to {str(dtype).rpartition('.')[2]}"
    return f"weights: {manifest['source']} ({types or 'types not recorded'}) dequantised in float32{rounded}"


def write_folder(path: Path, folder: Path, progress: Progress | None, stored: torch.dtype) -> dict[str, int]:
    """Config, tokenizer and dequantised weights, in Hugging Face's names and layout; how many of each type."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config, model = write_front(path, folder, progress, stored)
    tell(progress, 2, "dequantising the weights")
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=stored)
    tell(progress, 3, "writing safetensors")
    reader = GGUFReader(path)
    refuse_dropped(path, Names.of(reader, model, config).dropped(reader))
    tensors = wanted(model, loaded["tensors"], stored)
    check_shapes(path, model, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tell(progress, 4, "done")
    return dict(Counter(tensor.tensor_type.name for tensor in reader.tensors))


def write_front(
    path: Path, folder: Path, progress: Progress | None, stored: torch.dtype = torch.bfloat16
) -> tuple[Any, torch.nn.Module]:
    """Writes tokenizer and config; the config, and the model on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tell(progress, 0, "reading the tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    tokenizer.clean_up_tokenization_spaces = False  # it would take spaces out of decoded text
    tokenizer.save_pretrained(folder)
    tell(progress, 1, "reading the config")
    config: Any = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    config.dtype = stored
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return config, model


def tell(progress: Progress | None, index: int, what: str) -> None:
    if progress:
        progress(what, index, 4)


def wanted(model: torch.nn.Module, tensors: dict[str, Any], stored: torch.dtype) -> dict[str, torch.Tensor]:
    """Each weight of the model once; one that is missing and not tied is an error."""
    found = {name: torch.as_tensor(t).to(stored).contiguous() for name, t in tensors.items()}
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    missing = [name for name, _ in model.named_parameters() if name not in found and name not in tied]
    if missing:
        raise CheckpointError(f"the GGUF file has no tensor for {missing[0]} ({len(missing)} are missing)")
    return found
