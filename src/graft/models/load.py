"""From a name, a folder or a GGUF file to a model in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from graft.base.caches import note_use
from graft.base.device_memory import free_memory, is_out_of_memory, size_text
from graft.base.errors import OutOfMemory
from graft.base.files import Progress
from graft.models.embedded import embedded_folder, embedded_gguf
from graft.models.loaded import LoadedModel
from graft.models.names import check_name
from graft.models.places import resolve_device, resolve_dtype
from graft.models.promises import check_promises, read_context, share_head
from graft.models.registry import RegistryEntry, entries, family_of
from graft.models.requests import (
    asking_for_code,
    check_requests,
    code_notes,
    refuse_differences,
    refuse_foreign_tensors,
    sampling_notes,
    unused_notes,
)
from graft.models.sliced import sliced_model, slices_problem
from graft.weights.checkpoint import check_folder, refusing
from graft.weights.gguf.blocks import blocks_folder, float_model, lazy_model
from graft.weights.gguf.convert import convert_gguf, converted_note, stored_dtype

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_model(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    in_blocks: bool = False,
    trust_remote_code: bool = False,
    headless: bool = False,
    ranks: int = 1,
) -> LoadedModel:
    """Loads for inference. `device="meta"` builds registry models without weights.

    in_blocks: the quantised weights of a GGUF file stay in it, for the native backend to pack (LoadedModel.lazy).
    trust_remote_code: Python code that a folder brings may run. headless: nobody reads logits, so a folder may have
    no weights for the output projection. ranks: as many share the weights, and this one reads its part when it knows
    which that is (LoadedModel.lazy).
    """
    check_name(name)
    target = resolve_device(device)
    # a wrong dtype is told before anything is converted
    path, stored = Path(name), stored_dtype(resolve_dtype(dtype, target, torch.bfloat16))
    if str(name) in entries():
        entry = entries()[str(name)]
        if entry.kind == "random":
            return build_random(entry, resolve_dtype(dtype, target, torch.bfloat16), target)
        if in_blocks and target.type == "cpu":
            file = embedded_gguf(entry.name, entry.settings, progress)
            return load_blocks(blocks_folder(file, progress, entry.name), entry.name, dtype, ranks)
        folder = embedded_folder(entry.name, entry.settings, progress, stored=stored)
        return load_converted(folder, entry.name, dtype, target, ranks)
    if path.is_dir():
        return load_folder(path, path.resolve().name, dtype, target, trust_remote_code, headless, ranks)
    if in_blocks and target.type == "cpu":
        return load_blocks(blocks_folder(path, progress), path.stem, dtype, ranks)
    return load_converted(convert_gguf(path, progress, stored=stored), path.stem, dtype, target, ranks)


def build_random(entry: RegistryEntry, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """The real architecture with random weights, the same on every run."""
    config = AutoConfig.for_model(entry.family.model_type, **entry.settings)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=entry.family.reference_attention, trust_remote_code=False
        )
    return LoadedModel(entry.name, model.eval(), None, entry.family, config.max_position_embeddings)


def load_folder(
    folder: Path,
    name: str,
    dtype: str,
    device: torch.device,
    trust_remote_code: bool = False,
    headless: bool = False,
    ranks: int = 1,
) -> LoadedModel:
    """A Hugging Face folder. Tensors are read one after another, straight into the model; of several ranks each
    reads its part of them later, where the files can be read in parts."""
    check_folder(folder)
    check_requests(folder)
    with asking_for_code(folder, str(folder), trust_remote_code):
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        context, family = read_context(folder, config), family_of(config.model_type, name)
        # said here because a config.json may name a kernel of the Hub, whose code transformers fetches and runs
        config._attn_implementation = family.reference_attention if family else None
        wanted = resolve_dtype(dtype, device, config.dtype or torch.float32)
        head = share_head(folder, config, trust_remote_code) if headless else ()
        problem = slices_problem(folder) if ranks > 1 else None
        check_promises(folder, config, wanted, trust_remote_code, 1 if problem else ranks)
        lazy = None
        if ranks > 1 and problem is None:
            model, info, lazy = sliced_model(folder, config, wanted, device)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=wanted,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                trust_remote_code=trust_remote_code,
            )
    refuse_differences(folder, info)
    refuse_foreign_tensors(folder, model)
    tokenizer = load_tokenizer(folder, trust_remote_code)
    notes = (*head, *code_notes(folder, trust_remote_code), *unused_notes(folder, model), *sampling_notes(model))
    if problem is not None:
        notes = (*notes, f"every rank read all of {folder}, because {problem}")
    on = on_device(model.eval(), device) if lazy is None else model.eval()
    return LoadedModel(name, on, tokenizer, family, context, lazy, folder=folder.resolve(), notes=notes)


def load_converted(folder: Path, name: str, dtype: str, device: torch.device, ranks: int) -> LoadedModel:
    """A folder that was made from a GGUF file."""
    note_use(folder)
    model = load_folder(folder, name, dtype, device, ranks=ranks)
    return replace(model, folder=None, notes=(*model.notes, converted_note(folder, model.module.dtype)))


def load_blocks(folder: Path, name: str, dtype: str, ranks: int) -> LoadedModel:
    """A GGUF file on the CPU, its quantised weights left where they are."""
    note_use(folder)
    target = torch.device("cpu")
    number = resolve_dtype(dtype, target, torch.float32)
    with refusing(f"{folder} cannot be loaded"):
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        family = family_of(config.model_type, name)
        options = (folder, number, family.reference_attention if family else None)
        model, lazy = lazy_model(*options, sliced=ranks > 1)
        context = read_context(folder, config)
    return LoadedModel(name, model, load_tokenizer(folder), family, context, lazy, lambda: float_model(*options))


def on_device(model: Any, device: torch.device) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        raise OutOfMemory(
            f"the model takes {size_text(size)}, but {device} has {size_text(free_memory(device))} free;"
            " free memory, or use a smaller dtype or model"
        ) from error


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer, or None where it has none."""
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    with asking_for_code(folder, f"the tokenizer in {folder}", trust_remote_code):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
