"""What Python code would do, as text that two processes write alike: its bytecode, and that of what it calls.

Every object gets a number when it is first named and is written down once, so code may refer to itself:

    #0 function transformers.….forward   code, defaults, closure, and its globals by name: softmax=#1, eps=1e-06
    #1 builtin torch.…

A function of transformers is followed into what it names; one of torch or of another installed package is written
with its own bytecode and the package's version. Code without a version (a script's, a notebook's) is refused: what it
depends on cannot be known.
"""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from graft.base.bytecode import cell_value, code_text, names_in

FOLLOWED = "transformers"
OWN = "graft"  # its sources are hashed as files
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.layout)
BUILTIN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip


# Of a class: what no call depends on, what Python notes there when an object is first copied, what transformers does
# once it has looked at its own code, and what it puts on torch's Module when it first fills in weights.
UNTOLD = ("__dict__", "__weakref__", "__doc__", "__annotations__", "__slotnames__", "_cached_value", "smart_apply")
# Of a Python module: what transformers notes of every class of models that this process has made, from the class.
NOTED = frozenset({"_CAN_RECORD_REGISTRY"})


class Unknowable(Exception):
    """Why something cannot be told apart from another by what it is written as."""


class Description:
    """Lines about objects; `homes` are the Python modules whose classes are followed with all they call."""

    def __init__(self, homes: Iterable[str]) -> None:
        self.homes = frozenset(homes)
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # so that ids stay their own
        self.queue: deque[tuple[int, Any]] = deque()

    def lines(self, roots: Mapping[str, Any]) -> Iterator[str]:
        for name, root in roots.items():
            yield f"{name} = {self.text(root)}"
        while self.queue:
            number, thing = self.queue.popleft()
            yield f"#{number} {self.body(thing)}"

    def text(self, value: Any) -> str:
        """A plain value as it is, containers by their items, and all that is code by its number."""
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if type(value) in PLAIN:
            return repr(value)
        if isinstance(value, (set, frozenset)):
            ordered = sorted(value, key=lambda item: getattr(item, "__qualname__", repr(item)))  # numbers follow it
            return f"{type(value).__name__}{sorted(self.text(item) for item in ordered)}"
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}[{', '.join(self.text(item) for item in value)}]"
        if isinstance(value, Mapping):  # the registries of attention functions too
            items = sorted((str(key), self.text(item)) for key, item in value.items())
            return f"{type(value).__name__}{items}"
        return self.reference(value)

    def reference(self, thing: Any) -> str:
        if isinstance(thing, (staticmethod, classmethod, types.MethodType)):
            thing = thing.__func__
        if isinstance(thing, BUILTIN) or not is_code(thing):
            return f"{type(thing).__module__}.{type(thing).__qualname__} {getattr(thing, '__qualname__', '')}"
        if id(thing) not in self.numbers:
            self.numbers[id(thing)] = len(self.numbers)
            self.kept.append(thing)
            self.queue.append((self.numbers[id(thing)], thing))
        return f"#{self.numbers[id(thing)]}"

    def body(self, thing: Any) -> str:
        if isinstance(thing, functools.partial):
            return f"partial {self.text([thing.func, thing.args, thing.keywords])}"
        if isinstance(thing, property):
            return f"property {self.text([thing.fget, thing.fset])}"
        if isinstance(thing, functools.cached_property):
            return f"cached {self.text(thing.func)}"
        if isinstance(thing, type):
            return self.class_body(thing)
        if isinstance(thing, types.FunctionType):
            return self.function_body(thing)
        return f"wrapper {self.text(thing.__wrapped__)}"

    def class_body(self, cls: type) -> str:
        head = f"class {cls.__module__}.{cls.__qualname__}{self.origin(cls.__module__, cls.__qualname__)}"
        if package_of(cls.__module__) in sys.stdlib_module_names or cls.__module__ == "builtins":
            return head
        members = {name: member for name, member in vars(cls).items() if not name.endswith(UNTOLD)}
        if cls.__module__ not in self.homes:  # what it has, but not what that calls
            own = [f"{name}={self.member(member)}" for name, member in sorted(members.items())]
            return f"{head} {own}"
        own = [f"{name}={self.text(member)}" for name, member in sorted(members.items())]
        return f"{head} {[self.text(base) for base in cls.__mro__[1:]]} {own}"

    def member(self, member: Any) -> str:
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if isinstance(function, property):
            return f"property[{self.member(function.fget)}, {self.member(function.fset)}]"
        if isinstance(function, types.FunctionType):
            origin = self.origin(function.__globals__.get("__name__", ""), function.__qualname__)
            return f"{origin} {own_code_text(function.__code__)}"
        return self.text(member) if type(member) in PLAIN else type(member).__qualname__

    def function_body(self, function: types.FunctionType) -> str:
        home = function.__globals__.get("__name__", "")
        cells = [cell_value(cell) for cell in function.__closure__ or ()]
        parts = [
            f"function {home}.{function.__qualname__}{self.origin(home, function.__qualname__)}",
            own_code_text(function.__code__),
            self.text([function.__defaults__, function.__kwdefaults__, cells]),
        ]
        if package_of(home) == FOLLOWED:
            names = sorted(set(names_in(function.__code__)))
            parts.append(self.globals_text(function.__globals__, names))
        return " ".join(parts)

    def globals_text(self, namespace: Mapping[str, Any], names: list[str]) -> str:
        """What these names mean there; of a Python module, what they mean in it (`nn.functional.silu`)."""
        found = []
        for name in names:
            value = namespace.get(name, self) if name not in NOTED else self
            if isinstance(value, types.ModuleType) and package_of(value.__name__) in sys.stdlib_module_names:
                continue  # Python's version stands for it; `os.environ` is not code
            if isinstance(value, types.ModuleType):
                inside = [n for n in names if n in vars(value) and not isinstance(vars(value)[n], types.ModuleType)]
                nested = [n for n in names if isinstance(vars(value).get(n), types.ModuleType)]
                own = [f"{n}={self.text(vars(value)[n])}" for n in inside]
                own += [self.globals_text(vars(vars(value)[n]), leaves(vars(value)[n], names)) for n in nested]
                found.append(f"{name}={value.__name__}{own}")
            elif value is not self:
                found.append(f"{name}={self.text(value)}")
        return str(found)

    def origin(self, module: str, name: str) -> str:
        """The version of the package that it is from."""
        package = package_of(module)
        if package in sys.stdlib_module_names or package == OWN or package.startswith("namedtuple_"):
            return ""
        try:
            return f"@{version_of(package)}"
        except importlib.metadata.PackageNotFoundError:
            raise Unknowable(f"{name} is code of {module or 'no module'}, which has no version") from None


@functools.cache
def version_of(package: str) -> str:
    """Of the code that this process has imported; reading it takes 2 ms."""
    return importlib.metadata.version(package)


@functools.lru_cache(maxsize=8192)
def own_code_text(code: types.CodeType) -> str:
    """Of a function's own code, which holds constants that are plain and code, so that no text depends on where it is
    named first. torch.Tensor and the modules that every model is made of take half of a fingerprint's time."""
    return code_text(code, Description(()).text)


def is_code(thing: Any) -> bool:
    known = (types.FunctionType, type, functools.partial, property, functools.cached_property)
    return isinstance(thing, known) or isinstance(getattr(thing, "__wrapped__", None), types.FunctionType)


def leaves(module: types.ModuleType, names: list[str]) -> list[str]:
    """The names that mean something other than a module in it: no chain of modules leads back."""
    return [name for name in names if not isinstance(vars(module).get(name), types.ModuleType)]


def package_of(module: str) -> str:
    return module.partition(".")[0]
