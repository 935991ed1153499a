"""What a captured graph depends on, as one hash: the model's configuration, sizes and code, and all versions."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig, PreTrainedModel

import graft
from graft.capture.code import PLAIN, Description, Unknowable, package_of

LIBRARIES = ("torch", "transformers")
# what of graft makes the graph
SOURCES = ("capture", "ir", "ops/attention", "ops/causal_conv", "ops/gated_delta_rule")
STATE = frozenset(vars(torch.nn.Module()))  # what every module has
# where it was loaded from, and the class that is noted when it is saved: a copy, and another checkpoint of the same
# architecture, have the same graph
ORIGIN = frozenset({"name_or_path", "_name_or_path", "architectures"})
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def fingerprint(model: PreTrainedModel) -> str:
    """Raises Unknowable where the model holds something that no hash can stand for."""
    digest = hashlib.sha256()
    for line in facts(model):
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()


def facts(model: PreTrainedModel) -> Iterator[str]:
    yield f"{torch.__version__} {torch.version.git_version} {transformers.__version__} {sys.version} {own_sources()}"
    yield f"{platform.machine()} {torch.get_default_dtype()} training={model.training}"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Unknowable("autocast is on")
    if any(getattr(torch.nn.modules.module, hooks) for hooks in GLOBAL_HOOKS):
        raise Unknowable("hooks are registered for all modules")
    yield from tensor_facts(model)
    yield from module_facts(model)


@cache
def own_sources() -> str:
    """The hash of graft's files that a captured graph comes through."""
    root, digest = Path(graft.__file__).parent, hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def tensor_facts(model: PreTrainedModel) -> Iterator[str]:
    """Every parameter and buffer under every name; a tied one refers to its first."""
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for kind, named in (("parameter", parameters), ("buffer", model.named_buffers(remove_duplicate=False))):
        for name, tensor in named:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise Unknowable(f"{name} is a {type(tensor).__name__}")
            tied = first.setdefault(id(tensor), name)
            yield f"{kind} {name} {tied} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"


def module_facts(model: PreTrainedModel) -> Iterator[str]:
    """The tree of modules with what each holds, then the code of their classes and of what these call."""
    classes = {type(module): None for module in model.modules()}
    description = Description(cls.__module__ for cls in classes if package_of(cls.__module__) == "transformers")
    roots: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        check_module(name or "the model", module)
        held = {key: value for key, value in vars(module).items() if key not in STATE | ORIGIN}
        yield f"{name} {type(module).__module__}.{type(module).__qualname__} training={module.training}"
        for key, value in sorted(held.items()):
            yield f"  {key}={held_text(f'{name}.{key}', value, description)}"
    for cls in classes:
        roots[f"{cls.__module__}.{cls.__qualname__}"] = cls
    for home in sorted(description.homes):
        code = {n: v for n, v in vars(sys.modules[home]).items() if callable(v)}
        roots |= {f"{home}.{name}": value for name, value in sorted(code.items())}
    roots["attention"] = dict(AttentionInterface().items())
    roots["masks"] = dict(AttentionMaskInterface().items())
    roots["tensor"] = torch.Tensor
    yield from description.lines(roots)


def check_module(name: str, module: torch.nn.Module) -> None:
    cls = type(module)
    if package_of(cls.__module__) not in LIBRARIES:
        raise Unknowable(f"{name} is a {cls.__module__}.{cls.__qualname__}, neither torch's nor transformers'")
    if any(getattr(module, hooks) for hooks in HOOKS):
        raise Unknowable(f"{name} has hooks")
    shadows = [key for key in vars(module) if key not in STATE and callable(getattr(cls, key, None))]
    if shadows:
        raise Unknowable(f"{name} has a {shadows[0]} of its own in place of its class's")


def held_text(name: str, value: Any, description: Description) -> str:
    """An attribute of a module: plain values, containers of them, configurations and functions."""
    if isinstance(value, (transformers.PreTrainedConfig, GenerationConfig)):
        implementation = getattr(value, "_attn_implementation", None)
        settings = without_origin(json.loads(value.to_json_string(use_diff=False)))
        return f"{type(value).__qualname__} {json.dumps(settings)} {implementation}"
    if isinstance(value, dict):
        return str(sorted((str(key), held_text(name, item, description)) for key, item in value.items()))
    if isinstance(value, (list, tuple, set, frozenset)):
        texts = [held_text(name, item, description) for item in value]
        return f"{type(value).__name__}{texts if isinstance(value, (list, tuple)) else sorted(texts)}"
    if isinstance(value, BuiltinFunctionType) and package_of(value.__module__ or "") == "torch":
        return f"{value.__module__}.{value.__qualname__}"  # its code is that of torch's version
    text = description.text(value)
    if type(value) not in PLAIN and not text.startswith("#"):
        raise Unknowable(f"{name} is a {type(value).__module__}.{type(value).__qualname__}")
    return text


def without_origin(settings: Any) -> Any:
    """Settings of a configuration, and of those within it."""
    if isinstance(settings, dict):
        return {key: without_origin(value) for key, value in settings.items() if key not in ORIGIN}
    return [without_origin(value) for value in settings] if isinstance(settings, list) else settings
