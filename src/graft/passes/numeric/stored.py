"""Results of numeric checks on disk: what passed once is not run again while nothing that it depends on has changed.

    <cache directory>/checks/<key>.json     a line with the key and a checksum, then the result

The key is a hash of all that decides: both sides as text, kinds and values of their weights, sizes and bounds, the
activations, the code of every op and of the check itself as it is in this process (code.py), versions, device and
settings. Results that failed are not kept. GRAFT_NO_CHECK_CACHE=1 turns it off, GRAFT_CHECK_CACHE_DIR names another
folder. An entry that cannot be read is told, and the check is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.fx import Node

from graft.base.caches import CHECKS, note_use
from graft.base.files import atomic_file
from graft.ir.evaluate import Subprogram
from graft.ir.nodes import OpOverload, leaves, val
from graft.ops import OPS
from graft.passes.numeric.code import CodeText, tensor_digest
from graft.passes.numeric.sizes import RECORDED, open_sizes, size_with
from graft.passes.report import NumericCheck, read_check

log = logging.getLogger("graft")
OFF = "GRAFT_NO_CHECK_CACHE"
BUILT_IN = ("aten", "prims", "prim")  # namespaces that torch's version stands for
FROM_CACHE = "from the cache"


class NoFingerprint(Exception):
    """Why a pair of pieces cannot be told from another by what it is written as."""


class StoredChecks:
    """The stored results, as one transform's check asks for them. check: the code that makes them."""

    def __init__(self, check: Mapping[str, Any]) -> None:
        self.roots = check
        self.off = os.environ.get(OFF, "") not in ("", "0")

    @cached_property
    def common(self) -> str:
        """What all pairs depend on. The code is read once: a transform's check takes seconds."""
        return digest([*surroundings(), *CodeText().lines(self.roots)])

    def result(self, facts: Callable[[], Iterator[str]], make: Callable[[], NumericCheck]) -> NumericCheck:
        """What is stored for these facts; else what `make` gives, which is stored then."""
        if self.off:
            return make()
        try:
            key = digest([self.common, *facts()])
        except NoFingerprint as error:
            return replace(make(), origin=f"not stored: {error}")
        file = CHECKS.folder() / f"{key}.json"
        problem = ""
        if file.exists():
            found = load(file, key)
            if isinstance(found, NumericCheck):
                note_use(file)
                return replace(found, origin=FROM_CACHE)
            problem = f"tried again: the stored result is damaged ({found})"
            log.warning("graft: the numeric check in %s is damaged (%s); it is made anew", file, found)
        made = make()
        not_stored = store(file, key, made)
        return replace(made, origin="; ".join(text for text in (problem, not_stored) if text))


def pair_facts(
    old: Subprogram,
    new: Subprogram,
    kind: str,
    most: int | None,
    not_kept: Mapping[str, str],
    given: Mapping[Node, Any],
) -> Iterator[str]:
    """What the check of one pair depends on. kind: of both sides as text."""
    boundary = list(dict.fromkeys([*old.shared(), *new.shared()]))
    yield f"{kind} {sorted(open_sizes(boundary, most).items())} {most} {sorted(not_kept.items())}"
    for node in boundary:
        sizes = [size_with(s, node, RECORDED) for v in leaves(val(node)) for s in symbols(v)]
        values = [tensor_digest(v) if isinstance(v, torch.Tensor) else repr(v) for v in leaves(given.get(node))]
        yield f"{sizes} {values}"
    for piece in (old, new):
        for node in piece.program:
            call = piece.calls[node]
            if piece.boundary(node) is None and call.op == "get_attr":
                yield tensor_digest(piece.attributes(str(call.target)))
    called = [piece.calls[node] for piece in (old, new) for node in piece.program]
    targets = dict.fromkeys(call.target for call in called if call.op == "call_function")
    yield from CodeText().lines({str(target): code_of(target) for target in targets})


def symbols(value: Any) -> list[torch.SymInt]:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def code_of(target: Any) -> Any:
    """The Python code that a call runs; its name where a version stands for it."""
    if isinstance(target, FunctionType):
        return target
    if not isinstance(target, OpOverload):
        return f"{getattr(target, '__module__', '')}.{target}"
    space, _, name = target._schema.name.partition("::")
    if space in BUILT_IN:
        return str(target)
    if space == "graft" and name in OPS:
        return OPS[name]
    definitions = getattr(getattr(torch, "_library", None), "custom_ops", None)
    found = getattr(definitions, "OPDEFS", {}).get(target._schema.name)
    if found is None:
        raise NoFingerprint(f"{target} has no Python code that could be looked at")
    return [found._init_fn, dict(found._backend_fns)]


def surroundings() -> Iterator[str]:
    """Versions, the machine, and the settings of torch that change numbers."""
    yield f"{sys.version} {torch.__version__} {torch.version.git_version} {platform.machine()}"
    yield " ".join(f"{name} {package_version(name)}" for name in ("triton", "numpy", "transformers"))
    yield f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} {torch.get_default_dtype()}"
    yield f"{torch.get_float32_matmul_precision()} {torch.are_deterministic_algorithms_enabled()}"
    if torch.cuda.is_available():
        yield f"{torch.version.cuda} {torch.cuda.get_device_name()} {torch.backends.cuda.matmul.allow_tf32}"
    ours = [name for name in sorted(os.environ) if name.startswith(("GRAFT_", "TRITON_", "ATEN_", "MKL_"))]
    yield str([(name, os.environ[name]) for name in ours if not name.endswith("_DIR")])


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def digest(lines: Iterator[str] | list[str]) -> str:
    made = hashlib.sha256()
    for line in lines:
        made.update(line.encode(errors="surrogatepass") + b"\n")
    return made.hexdigest()


def load(file: Path, key: str) -> NumericCheck | str:
    """The result, or what is wrong with the file."""
    try:
        head, _, body = file.read_text().partition("\n")
        if json.loads(head) != header(key, body):
            return "its checksum is not what it says"
        return read_check(json.loads(body))
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def store(file: Path, key: str, check: NumericCheck) -> str:
    """Writes the file whole or not at all; '' or why not."""
    body = json.dumps(asdict(check))
    try:
        with atomic_file(file) as partial:
            partial.write_text(f"{json.dumps(header(key, body))}\n{body}")
    except OSError as error:
        return f"not stored: {error}"
    note_use(file)
    return ""


def header(key: str, body: str) -> dict[str, str]:
    return {"graft_check": key, "sha256": hashlib.sha256(body.encode()).hexdigest()}
