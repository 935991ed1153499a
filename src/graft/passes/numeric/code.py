"""What the code behind a call would do, as text: its bytecode, and that of all it names, as it is in this process.

Files alone would not do: a process may have read them before they were edited, or a function may have been replaced.
Code is followed through globals, closures, classes and tables; what a function imports when it runs is read from its
files. Of Python itself and of torch and the like the version stands for the code.
"""

from __future__ import annotations

import ctypes
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from graft.base.bytecode import cell_value, code_text, names_in

# the versions of these are in the key (stored.py)
LIBRARIES = frozenset({"torch", "triton", "numpy", "sympy", "transformers", "functorch", "torchgen", "__future__"})
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.layout)
SOURCES = frozenset({".py", ".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh", ".so", ".ptx", ".json", ".yaml"})
UNTOLD = ("__dict__", "__weakref__", "__doc__", "__annotations__", "__module__")


class CodeText:
    """Lines about code; each function and class gets a number when it is first named and is written down once."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # so that ids stay their own
        self.queue: deque[Any] = deque()
        self.imported: set[str] = set()  # top packages that functions import when they run

    def lines(self, roots: Mapping[str, Any]) -> Iterator[str]:
        for name, root in roots.items():
            yield f"{name} = {self.text(root)}"
        while self.queue:
            thing = self.queue.popleft()
            yield f"#{self.numbers[id(thing)]} {self.body(thing)}"
        for package in sorted(self.imported):
            yield f"{package} {package_digest(package)}"

    def text(self, value: Any) -> str:
        if type(value) in PLAIN:
            return repr(value)
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            return self.text(value.__func__)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, torch.Tensor):
            return tensor_digest(value)
        if is_counted(value):
            return self.number(value)
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__name__}{sorted(repr(item) for item in value)}"
        return f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__qualname__', '')}"

    def number(self, thing: Any) -> str:
        if id(thing) not in self.numbers:
            self.numbers[id(thing)] = len(self.numbers)
            self.kept.append(thing)
            self.queue.append(thing)
        return f"#{self.numbers[id(thing)]}"

    def body(self, thing: Any) -> str:
        if isinstance(thing, types.FunctionType):
            return self.function_body(thing)
        if isinstance(thing, type):
            return self.class_body(thing)
        if isinstance(thing, Mapping):
            return f"mapping {[(self.text(key), self.text(item)) for key, item in list(thing.items())]}"
        if isinstance(thing, (list, tuple)):
            return f"{type(thing).__name__} {[self.text(item) for item in thing]}"
        if isinstance(thing, functools.partial):
            return f"partial {self.text(thing.func)} {self.text(thing.args)} {self.text(thing.keywords)}"
        if isinstance(thing, property):
            return f"property {self.text(thing.fget)}"
        if isinstance(thing, functools.cached_property):
            return f"cached {self.text(thing.func)}"
        if dataclasses.is_dataclass(thing):
            fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
            return f"{self.text(type(thing))} {[(name, self.text(value)) for name, value in fields.items()]}"
        return f"wrapper {self.text(wrapped(thing))}"

    def function_body(self, function: types.FunctionType) -> str:
        home = str(function.__globals__.get("__name__", ""))
        cells = [self.text(cell_value(cell)) for cell in function.__closure__ or ()]
        known = [self.text(function.__defaults__), self.text(function.__kwdefaults__)]
        head = f"function {home}.{function.__qualname__} {cells} {known}"
        if not is_followed(home):
            return head
        return f"{head} {code_text(function.__code__, constant_text)} {self.globals_text(function)}"

    def class_body(self, cls: type) -> str:
        head = f"class {cls.__module__}.{cls.__qualname__}"
        if not is_followed(cls.__module__):
            return head
        own = [(name, self.text(value)) for name, value in vars(cls).items() if name not in UNTOLD]
        return f"{head} {[self.text(base) for base in cls.__bases__]} {own}"

    def globals_text(self, function: types.FunctionType) -> str:
        """What the names in its code mean; of a module, what they mean in that."""
        names = sorted(set(names_in(function.__code__)))
        self.imported |= set(imports_in(function))
        found = []
        for name in names:
            value = function.__globals__.get(name, self)
            if isinstance(value, types.ModuleType) and is_followed(value.__name__):
                inside = [(n, self.text(vars(value)[n])) for n in names if n in vars(value)]
                found.append(f"{name}={value.__name__}{inside}")
            elif value is not self:
                found.append(f"{name}={self.text(value)}")
        return str(found)


def is_counted(thing: Any) -> bool:
    known = (types.FunctionType, type, Mapping, list, tuple, functools.partial, property, functools.cached_property)
    if isinstance(thing, known) or wrapped(thing) is not None:
        return True
    return dataclasses.is_dataclass(thing) and is_followed(type(thing).__module__)


def wrapped(thing: Any) -> Any:
    """What a decorated function or a kernel of Triton was made of."""
    for name in ("__wrapped__", "fn"):
        found = getattr(thing, name, None) if not isinstance(thing, types.ModuleType) else None
        if isinstance(found, types.FunctionType) or (found is not None and hasattr(found, "fn")):
            return found
    return None


def is_followed(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "__main__" or (bool(top) and top not in LIBRARIES and top not in sys.stdlib_module_names)


def constant_text(value: Any) -> str:
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def imports_in(function: types.FunctionType) -> Iterator[str]:
    """The top packages of what it imports when it runs."""
    codes, home = [function.__code__], str(function.__globals__.get("__name__", ""))
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        if any(name == "IMPORT_NAME" for name in map(dis.opname.__getitem__, code.co_code[::2])):
            for step in dis.get_instructions(code):
                if step.opname == "IMPORT_NAME":
                    top = (step.argval or home).partition(".")[0]  # a relative one has no name
                    if is_followed(top):
                        yield top


def package_digest(package: str) -> str:
    """Of the files of a package, or of one module."""
    spec = importlib.util.find_spec(package) if package not in sys.modules else sys.modules[package].__spec__
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).rglob("*") if path.suffix in SOURCES)
    if not folders and spec is not None and spec.origin:
        files = [Path(spec.origin)]
    digest = hashlib.sha256()
    for path in files:
        facts = path.stat()
        digest.update(file_digest(str(path), facts.st_mtime_ns, facts.st_size))
    return digest.hexdigest()


@functools.lru_cache(maxsize=10_000)
def file_digest(path: str, changed: int, size: int) -> bytes:  # noqa: ARG001
    """Read again when its time or size is another."""
    return hashlib.sha256(path.encode() + Path(path).read_bytes()).digest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Sizes, strides, dtype and values; on the meta device there are none."""
    facts = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"
    if tensor.is_meta:
        return facts
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    memory = (ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr())
    return f"{facts} {hashlib.sha256(memory).hexdigest() if data.numel() else ''}"
