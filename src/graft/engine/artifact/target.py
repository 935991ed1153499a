"""What a compiled engine depends on beside its own files: where one of these differs, it is refused, by name."""

from __future__ import annotations

import hashlib
import platform
import shlex
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import graft
from graft.backends.native.cpu import cpu_features
from graft.base.errors import OtherTarget
from graft.base.plugins import fingerprints, load_installed

ROOT = Path(graft.__file__).parent
# what makes a graph, a kernel or a step; commands, servers and tools around them may change
SOURCES = ("base", "ir", "memory", "passes", "ops", "weights", "models", "capture", "backends", "dist", "engine")
KINDS = (".py", ".h", ".yaml", ".json")
WORDS = {
    "graft": "graft", "sources": "graft's sources", "torch": "torch", "triton": "Triton", "machine": "the machine",
    "cpu": "the CPU's instructions", "gpu": "the GPU", "capability": "the GPU's compute capability", "cuda": "CUDA",
}  # fmt: skip


def built_for(device: torch.device) -> dict[str, str]:
    """By name, in the order in which differences are told."""
    found = {"graft": graft.__version__, "torch": torch.__version__, "machine": platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
            "triton": package_version("triton"),
        }
    else:
        found |= {"cpu": cpu_features()}
    return found | {"sources": source_hash()}


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@cache
def source_hash() -> str:
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in KINDS):
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def check_target(path: Path, manifest: dict[str, Any], device: torch.device) -> None:
    """Raises OtherTarget with everything that differs, and what to do."""
    saved, here = manifest["built_for"], built_for(device)
    told = [difference(name, saved.get(name), here.get(name)) for name in {**saved, **here}]
    found = [text for text in told if text] + plugin_differences(manifest.get("plugins", {}))
    if found:
        raise OtherTarget(path, "; ".join(found), again(path, manifest))


def plugin_differences(saved: dict[str, str]) -> list[str]:
    """Of plugins that were loaded when the engine was compiled, and are here. One that is not changes nothing: its
    transforms have been at work, and an op of its own that is missing is told where the graph is read."""
    if not saved:
        return []
    load_installed()
    here = fingerprints()
    both = [(module, text, here[module]) for module, text in saved.items() if module in here]
    return [f"the plugin {module} was {was}, here it is {now}" for module, was, now in both if was != now]


def again(path: Path, manifest: dict[str, Any]) -> str:
    """The command that would make it anew, where one is known."""
    if not manifest["made_by"]:
        return "Load the model itself, and save it again"
    command = shlex.join(["graft", *manifest["made_by"], "-o", str(path), "--overwrite"])
    return f"Start it with --recompile (LLM: recompile=True), or compile it again: {command}"


def difference(name: str, saved: str | None, here: str | None) -> str:
    if saved == here:
        return ""
    word = WORDS.get(name, name)
    if name == "cpu":
        return f"{word} differ: {features(saved, here)}"
    if name == "sources":
        return f"{word} have changed since"
    return f"{word} was {saved or 'not needed'}, here it is {here or 'not needed'}"


def features(saved: str | None, here: str | None) -> str:
    """A few of the features that one has and the other has not."""
    there, now = (set((text or "").replace(":", " ").split()) for text in (saved, here))
    lacking, more = sorted(there - now), sorted(now - there)
    texts = [
        f"{what} {', '.join(some[:6])}" for what, some in (("here lacks", lacking), ("here also has", more)) if some
    ]
    return " and ".join(texts) or "in their order"
