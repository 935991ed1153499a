"""What a folder asks for beside its config and weights: code of its own, an adapter, a quantization, sampling.

Each is done, refused, or told in a line of the report; none depends on which other packages are installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graft.base.errors import CheckpointError, GraftError, UsageError, near
from graft.weights.checkpoint import read_header, read_object, refusing

CODE_FILES = ("config.json", "tokenizer_config.json")
# of generation_config.json: what the engine takes from it, and what says nothing about tokens
USED = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "_from_model_config"}
IF_SAMPLED = {"temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"}
CONSTANTS = (".masked_bias",)  # what old versions of transformers filled masks with
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def check_requests(folder: Path) -> None:
    """Refuses what graft cannot do."""
    refuse_adapter(folder)
    refuse_quantization(folder, read_object(folder / "config.json"))


def refuse_adapter(folder: Path) -> None:
    """transformers applies an adapter where peft is installed, and ignores it where not."""
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder} holds an adapter (adapter_config.json), which graft does not apply; merge it into the weights"
            " (peft: model.merge_and_unload(), then save_pretrained), or move adapter_* away to run the base model"
        )


def refuse_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    """transformers runs a method that it does not know as if the weights were floats."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    location = f"{folder / 'config.json'}: quantization_config"
    known = sorted(set(AUTO_QUANTIZATION_CONFIG_MAPPING) - {"gguf", "torchao"})  # gguf: files, not folders
    for settings in quantizations(config):
        if not isinstance(settings, dict):
            raise CheckpointError(f"{location} holds a {type(settings).__name__} where an object {{…}} belongs")
        method = settings.get("quant_method")
        if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
            method = "bitsandbytes"
        if method == "torchao":
            raise CheckpointError(
                f"{folder} is quantized with torchao, whose tensors are classes of its own, which graft cannot"
                " capture; use the unquantized weights, with --quantize int8 (LLM: quantize='int8')"
            )
        if not any(f"{method}{bits}" in known for bits in ("", "_4bit", "_8bit")):
            raise CheckpointError(f"{location} names the unknown quant_method {method!r}{near(str(method), known)}")


def quantizations(config: Mapping[str, Any]) -> Iterator[Any]:
    """The quantization settings of a config and of the language model inside it."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and part.get("quantization_config") is not None:
            yield part["quantization_config"]


def refuse_foreign_tensors(folder: Path, model: torch.nn.Module) -> None:
    """Weights in a class of another package cannot be captured, read or packed."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in PLAIN:
            raise CheckpointError(
                f"{folder}: {name} is a {type(tensor).__module__}.{type(tensor).__name__}, not a plain tensor, which"
                " graft cannot capture; use the unquantized weights"
            )


def refuse_differences(folder: Path, info: Mapping[str, Any]) -> None:
    """The weights are those of the config: none missing, none left over, all of its shapes."""
    for name, found, expected in sorted(info["mismatched_keys"], key=str):
        raise CheckpointError(
            f"{folder}: {name} is {list(found)}, but config.json makes it {list(expected)}; use the config that"
            " belongs to the weights"
        )
    missing, found = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    unused = [name for name in found if not name.endswith(CONSTANTS)]
    if missing:
        raise CheckpointError(f"{folder} has no weights for {missing[0]} ({len(missing)} are missing)")
    if unused:
        raise CheckpointError(
            f"{folder} holds {', '.join(unused[:3])}{' …' if len(unused) > 3 else ''}, which its config.json has no"
            f" place for ({len(unused)} tensors would be dropped); use the config that belongs to the weights"
        )


def unused_notes(folder: Path, model: Any) -> list[str]:
    """Tensors that transformers knows of and leaves out, such as layers that predict further tokens."""
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    if not patterns:
        return []
    stored = {name for path in folder.glob("*.safetensors") for name in read_header(path)[0]} - {"__metadata__"}
    unused = sorted(n for n in stored - set(model.state_dict()) if any(p.search(n) for p in patterns))
    listed = f"{', '.join(unused[:3])}{' …' if len(unused) > 3 else ''}"
    return [f"{len(unused)} tensors of the folder are not used, as in transformers: {listed}"] if unused else []


def own_code(folder: Path) -> list[str]:
    """`config.json: AutoConfig is configuration_x.X` for each class that the folder brings."""
    found = []
    for file in CODE_FILES:
        classes = read_object(folder / file).get("auto_map") if (folder / file).is_file() else None
        listed = classes if isinstance(classes, dict) else {"AutoTokenizer": classes} if classes else {}
        found += [f"{file}: {name} is {location}" for name, location in listed.items()]
    return found


def code_notes(folder: Path, trusted: bool) -> list[str]:
    """Code of the folder that ran, or that transformers' own stood in for."""
    done = "ran, as you allowed" if trusted else "did not run: transformers' own classes did (--trust-remote-code)"
    return [f"code of the model's folder {done} ({'; '.join(own_code(folder))})"] if own_code(folder) else []


@contextmanager
def asking_for_code(folder: Path, what: str, trusted: bool) -> Iterator[None]:
    """Around calls of transformers with `trust_remote_code=trusted`: one line where the folder's code is needed."""
    try:
        with refusing(f"{what} cannot be loaded"):
            yield
    except GraftError as error:
        if trusted or not isinstance(error.__cause__, ValueError) or "trust_remote_code" not in str(error.__cause__):
            raise
        raise UsageError(
            f"{what} needs Python code that comes with it ({'; '.join(own_code(folder))}), and graft runs code of a"
            " model only where it is told to; read it, then pass --trust-remote-code (LLM: trust_remote_code=True)"
        ) from error


def sampling_notes(model: Any) -> list[str]:
    """Defaults of generation_config.json that a request does not get: SamplingParams decide."""
    settings = getattr(model, "generation_config", None)
    if settings is None or getattr(settings, "_from_model_config", False):
        return []
    asked = {key: value for key, value in settings.to_diff_dict().items() if key not in USED}
    if not asked.get("do_sample"):
        asked = {key: value for key, value in asked.items() if key not in (*IF_SAMPLED, "do_sample")}
    if not asked:
        return []
    listed = ", ".join(f"{key}={value}" for key, value in sorted(asked.items()))
    return [f"generation_config.json: {listed} not used; a request has what it asks for, and is greedy by default"]
