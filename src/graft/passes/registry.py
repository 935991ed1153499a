"""Transforms by name. The name is the registry key, the YAML key and the file name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points

from graft.base.errors import DuplicateTransform, UnknownTransform, UsageError
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
    def names(cls) -> list[str]:
        return sorted(cls._known)


_loaded = False


def load_all(plugins: tuple[str, ...] = ()) -> None:
    """Imports the library, installed plugins (entry point group `graft.transforms`) and modules named by the user."""
    global _loaded
    if not _loaded:
        import graft.passes.library as library

        for module in pkgutil.walk_packages(library.__path__, f"{library.__name__}."):
            importlib.import_module(module.name)
        for point in entry_points(group="graft.transforms"):
            point.load()
        _loaded = True
    for name in plugins:
        try:
            importlib.import_module(name)
        except (ImportError, ValueError, TypeError) as error:  # "", ".relative" and names that lead nowhere
            raise UsageError(f"plugin module {name!r} cannot be imported: {error}") from error
