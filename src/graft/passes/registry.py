"""Transforms by name. The name is the registry key, the YAML key and the file name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import fields

from graft import __version__
from graft.base.errors import DuplicateTransform, UnknownTransform
from graft.base.plugins import load_installed, load_named, owner_of, watch
from graft.passes.base import BaseTransform


class TransformRegistry:
    _known: dict[str, type[BaseTransform]] = {}  # noqa: RUF012 (the registry is meant to be shared)

    @classmethod
    def register(cls, name: str) -> Callable[[type[BaseTransform]], type[BaseTransform]]:
        def add(transform: type[BaseTransform]) -> type[BaseTransform]:
            if name in cls._known:
                raise DuplicateTransform(name, cls._known)
            transform.name = name
            cls._known[name] = transform
            return transform

        return add

    @classmethod
    def get(cls, name: str) -> type[BaseTransform]:
        if name not in cls._known:
            raise UnknownTransform(name, cls._known)
        return cls._known[name]

    @classmethod
    def forget(cls, name: str) -> None:
        del cls._known[name]

    @classmethod
    def names(cls) -> list[str]:
        return sorted(cls._known)

    @classmethod
    def with_key(cls, key: str) -> list[str]:
        """Those whose configuration has this key, such as `devices`."""
        return [name for name in cls.names() if key in {f.name for f in fields(cls._known[name].get_config_class())}]


LIBRARY = "graft.passes.library"  # found by its name, as plugins are: its files import this one
_loaded = False
watch(TransformRegistry._known)


def load_library() -> None:
    """graft's own transforms."""
    global _loaded
    if not _loaded:
        library = importlib.import_module(LIBRARY)
        for module in pkgutil.walk_packages(library.__path__, f"{library.__name__}."):
            importlib.import_module(module.name)
        _loaded = True


def load_all(plugins: tuple[str, ...] = ()) -> None:
    """Imports the library, installed plugins (entry point group `graft.transforms`), and modules and files that the
    user named."""
    load_library()
    load_installed()
    for name in plugins:
        load_named(name)


def origin_of(name: str) -> str:
    """Where a transform comes from: `graft 0.1.0`, `my-fusions 0.2`, what --plugin named, or its module."""
    module = TransformRegistry.get(name).__module__
    if module.startswith("graft."):
        return f"graft {__version__}"
    plugin = owner_of(module)
    return plugin.origin if plugin else module
