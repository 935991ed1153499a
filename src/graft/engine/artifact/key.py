"""What an engine that was kept may depend on, as named parts: one that differs is another engine.

The parts are known before the model is loaded and before transformers is imported, which takes longer than all else
of a start. Whatever no part can stand for (a plugin's code, classes that were changed in this process) makes the
request one without a key, and the report says why.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from graft.base.errors import NoCompiler
from graft.base.plugins import STATE, points
from graft.engine.artifact.request import EngineRequest
from graft.engine.artifact.target import built_for, package_version
from graft.models.places import resolve_device

OFF = "GRAFT_NO_ENGINE_CACHE"
LIBRARIES = ("transformers", "tokenizers", "safetensors", "gguf", "sentencepiece", "numpy")
SETTINGS = ("GRAFT_", "TRITON_", "ATEN_", "MKL_")  # beginnings of names in the environment
UNRELATED = ("GRAFT_NUM_THREADS", "GRAFT_ENGINE_CACHE_SIZE")  # what is compiled is the same
SMALL = 1 << 25  # bytes of a file that is read; of a larger one the file system says whether it was written
MOST_FILES = 2000  # in a model's folder
FRESH = 1_000_000_000  # nanoseconds within which two writes may have one time
HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class NoKey(Exception):
    """Why an engine is neither looked for nor kept."""


def engine_key(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:32]


def key_parts(request: EngineRequest) -> dict[str, str]:
    """Raises NoKey. The model's files, the request, and all that is between them and a step."""
    refuse_switched_off(request)
    refuse_foreign_code(request)
    refuse_changed_process()
    device = resolve_device(request.device)
    if device.type != "cpu":
        raise NoKey(f"its device is {device}; `graft compile` keeps engines of a GPU")
    return {
        **built_for(device),
        "python": sys.version,
        "libraries": " ".join(f"{name} {package_version(name)}" for name in LIBRARIES),
        "transformers": listing_hash(package_folder("transformers")),
        "model": model_part(Path(request.model)),
        "asked": json.dumps([request.dtype, str(device), request.backend, request.quantize,
                             request.sizes.kv_cache_dtype, request.sizes.max_model_len]),
        "config": config_part(request),
        "environment": environment_part(),
        "compiler": compiler_part(),
    }  # fmt: skip


def refuse_switched_off(request: EngineRequest) -> None:
    if not request.use_cache:
        raise NoKey("it is switched off (--no-cache, use_cache=False)")
    if os.environ.get(OFF, "") not in ("", "0"):
        raise NoKey(f"{OFF} is set")
    if request.sizes.runner == "pooling":
        raise NoKey("engines that embed are built at each start")
    if request.keep_weights:
        raise NoKey("the Hugging Face module is needed too")
    if request.dump_dir or os.environ.get("GRAFT_DUMP_GRAPHS_DIR"):
        raise NoKey("graphs are to be dumped")
    if request.trust_remote_code:
        raise NoKey("code of the model's folder may run")


def refuse_foreign_code(request: EngineRequest) -> None:
    """Of plugins, whose code may lie anywhere."""
    if request.plugins:
        raise NoKey(f"the plugin {request.plugins[0]} is code that no key stands for")
    if active := STATE.active():
        raise NoKey(f"the plugin {active[0].origin} is loaded, code that no key stands for")
    if installed := points():
        raise NoKey(f"the plugin {installed[0].name} is installed, code that no key stands for")
    for home, table in (("graft.passes.registry", "TransformRegistry"), ("graft.ops.spec", "OPS")):
        registered = getattr(sys.modules.get(home), table, {})
        known = registered if isinstance(registered, dict) else registered._known
        for name, thing in list(known.items()):
            if not getattr(thing, "reference", thing).__module__.startswith("graft."):
                raise NoKey(f"{name} was registered in this process, code that no key stands for")


def refuse_changed_process() -> None:
    """What a capture would see of this process, and no file has."""
    if "transformers.modeling_utils" in sys.modules:
        raise NoKey("transformers' models were imported before, and may have been changed since")
    if torch.get_default_dtype() != torch.float32 or torch.get_default_device() != torch.device("cpu"):
        raise NoKey("torch's default dtype or device was changed")
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise NoKey("autocast is on")
    if any(getattr(torch_modules, hooks) for hooks in HOOKS):
        raise NoKey("hooks are registered for all modules")


# ── the parts ───────────────────────────────────────────────────────────────────────────────────────────────────


def model_part(model: Path) -> str:
    """A registry's entry with its checksum, or the model's files."""
    from graft.models.registry import entries

    entry = entries().get(str(model))
    if entry is not None:
        return json.dumps([entry.name, entry.family.name, entry.kind, dict(entry.settings)], default=str)
    if model.suffix == ".gguf" and model.is_file():
        return json.dumps([model.stem, file_identity(model)])
    if not model.is_dir():
        raise NoKey("there is no such model")
    return json.dumps([model.resolve().name, *folder_files(model)])


def folder_files(folder: Path) -> Iterator[list[str]]:
    count = 0
    for home, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            count += 1
            if count > MOST_FILES:
                raise NoKey(f"its folder has more than {MOST_FILES} files")
            file = Path(home) / name
            yield [file.relative_to(folder).as_posix(), file_identity(file)]


def file_identity(file: Path) -> str:
    """The content's hash; of a large file what changes whenever it is written, which nobody can set back."""
    try:
        found = file.stat()
        if found.st_size <= SMALL:
            return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise NoKey(f"{file} cannot be read ({error.strerror})") from error
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < FRESH:
        raise NoKey(f"{file.name} was written a moment ago, so that a further change might not be seen")
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_dev}:{found.st_ino}"


def package_folder(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise NoKey(f"{name} is not installed as files")
    return Path(spec.origin).parent


def listing_hash(folder: Path) -> str:
    """Of a package's sources: names, sizes and times, since reading thousands takes longer than the rest."""
    digest = hashlib.sha256()

    def add(path: str) -> None:
        with os.scandir(path) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        add(entry.path)
                elif entry.name.endswith(".py"):
                    about = entry.stat()
                    digest.update(f"{entry.path} {about.st_size} {about.st_mtime_ns}\n".encode())

    add(str(folder))
    return digest.hexdigest()


def config_part(request: EngineRequest) -> str:
    """The settings that were given; the defaults and the registry's are sources."""
    config: Any = request.config
    if isinstance(config, (str, Path)):
        try:
            config = Path(config).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise NoKey(f"{request.config} cannot be read") from error
    elif config is not None and not isinstance(config, Mapping):
        raise NoKey(f"its configuration is a {type(config).__name__}")
    try:
        return json.dumps([config, list(request.sets)], sort_keys=True)
    except TypeError as error:
        raise NoKey(f"its configuration cannot be written down ({error})") from error


def environment_part() -> str:
    names = [name for name in sorted(os.environ) if name.startswith(SETTINGS) and name not in UNRELATED]
    return json.dumps([[name, os.environ[name]] for name in names if not name.endswith("_DIR")])


def compiler_part() -> str:
    """Which C++ compiler would be taken, and whether it is still the same program."""
    from graft.backends.native.compiler import find_compiler

    try:
        program, *options = find_compiler()
    except NoCompiler:
        return "none"
    about = os.stat(os.path.realpath(program))
    return json.dumps([program, options, about.st_size, about.st_mtime_ns])
