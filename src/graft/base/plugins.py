"""What extends graft from outside: packages, found by their entry points, and modules or files named by the user.

    [project.entry-points."graft.transforms"]
    my-fusions = "my_fusions"

Importing the module registers transforms and ops. The YAML beside it (`graft.yaml` in a package, `fuse_mine.yaml`
beside `fuse_mine.py`) lists the transforms as default.yaml does, and adds to the registry of model families.
An installed plugin that fails is left out, with nothing of it registered, and told; one that was named is an error.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from graft.base.authors import told
from graft.base.errors import BrokenPlugin, GraftError, UsageError
from graft.base.yaml_file import read_yaml

log = logging.getLogger("graft")
GROUP = "graft.transforms"
STRICT = "GRAFT_STRICT_PLUGINS"  # set: an installed plugin that fails is an error
KEYS = ("transforms", "kernels", "families")


@dataclass(frozen=True, eq=False)
class Plugin:
    """module: what was imported. origin: `my-fusions 0.1.0`, or what was named. listing: the YAML beside it."""

    module: str
    origin: str
    version: str = ""
    listing: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None  # of the listing

    @property
    def name(self) -> str:
        return self.origin.removesuffix(f" {self.version}") if self.version else self.origin

    @property
    def folder(self) -> str:
        """Where its module lies."""
        return str(Path(sys.modules[self.module].__file__ or ".").parent)

    def owns(self, module: str) -> bool:
        return module == self.module or module.startswith(f"{self.module}.")


@dataclass
class Loaded:
    """What there is in this process. registries: what plugins write into, put back where one of them fails."""

    plugins: dict[str, Plugin] = field(default_factory=dict)  # by module
    broken: list[BrokenPlugin] = field(default_factory=list)
    registries: list[dict[str, Any]] = field(default_factory=list)
    checked: set[str] = field(default_factory=set)  # modules whose listing can be used
    installed: bool = False
    strict: bool = False  # an installed plugin that fails is an error

    def active(self) -> tuple[Plugin, ...]:
        """A plugin whose module was taken out of Python is none any more."""
        return tuple(plugin for plugin in self.plugins.values() if plugin.module in sys.modules)


STATE = Loaded()


def watch(registry: dict[str, Any]) -> None:
    """A plugin that fails leaves nothing of itself in `registry`."""
    STATE.registries.append(registry)


def points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))


def load_installed() -> tuple[Plugin, ...]:
    """Imports what is installed, once; gives all plugins that there are."""
    if not STATE.installed:
        STATE.installed = True
        found = points()
        if found:  # graft's own names come first, so that a second one of a name is the plugin's mistake
            importlib.import_module("graft.passes.registry").load_library()
        for point in found:
            try:
                load_point(point)
            except BrokenPlugin as error:
                left_out(error)
    if STATE.broken and is_strict():
        raise STATE.broken[0]
    return STATE.active()


def is_strict() -> bool:
    return STATE.strict or bool(os.environ.get(STRICT))


def left_out(error: BrokenPlugin) -> None:
    """Told once, and kept: with --strict it is an error whenever plugins are asked for."""
    STATE.broken.append(error)
    if not is_strict():
        log.warning("graft: %s; it is left out (--strict makes this an error)", error)


def load_point(point: EntryPoint) -> None:
    name = point.dist.name if point.dist else point.name
    version = point.dist.version if point.dist else ""
    origin = f"{name} {version}".strip()
    if point.module not in STATE.plugins:
        with_rollback(origin, lambda: Plugin(importlib.import_module(point.module).__name__, origin, version))


def load_named(given: str) -> Plugin:
    """`--plugin`: a module, or a Python file."""
    is_file = given.endswith(".py") or os.sep in given
    known = next((plugin for plugin in STATE.active() if given in (plugin.origin, plugin.module)), None)
    if known is not None and not is_file:
        return known
    make = import_file if is_file else import_name
    return with_rollback(given, lambda: Plugin(make(given).__name__, given))


def adopt(module: str) -> None:
    """The package of a module that was imported by itself, not installed as a plugin nor named as one: its listing
    counts, too."""
    top = module.partition(".")[0]
    if top != "graft" and top in sys.modules and owner_of(module) is None:
        plugin = listed(Plugin(top, top))
        if plugin.listing:
            STATE.plugins[top] = plugin


def with_rollback(origin: str, load: Any) -> Plugin:
    """The plugin with its listing, kept; or BrokenPlugin, and the registries as they were."""
    before = [dict(registry) for registry in STATE.registries]
    try:
        plugin = listed(load())
    except UsageError as error:
        put_back(before)
        raise BrokenPlugin(origin, str(error)) from error
    except (Exception, SystemExit) as error:  # whatever a module of somebody else raises when it is imported
        put_back(before)
        raise BrokenPlugin(origin, str(error) if isinstance(error, GraftError) else told(error)) from error
    STATE.plugins[plugin.module] = plugin
    return plugin


def put_back(before: list[dict[str, Any]]) -> None:
    for registry, content in zip(STATE.registries, before, strict=False):
        registry.clear()
        registry.update(content)


def leave_out(plugin: Plugin, error: BrokenPlugin) -> None:
    """Nothing of an installed plugin stays registered; for a named one it is an error."""
    del STATE.plugins[plugin.module]
    for registry in STATE.registries:
        for key in [key for key, value in registry.items() if plugin.owns(home_of(value))]:
            del registry[key]
    if not plugin.version:
        raise error
    left_out(error)
    if is_strict():
        raise error


def home_of(registered: Any) -> str:
    """The module of a transform's class, or of an op's reference."""
    return getattr(registered, "reference", registered).__module__


def fingerprints() -> dict[str, str]:
    """What there is, by module: version and a hash of its files, for processes that must have the same."""
    found = {one.module: f"{one.version} ({files_hash(one)[:12]})".strip() for one in STATE.active()}
    return dict(sorted(found.items()))


def active_text() -> str:
    return ", ".join(f"{module} {text}" for module, text in fingerprints().items()) or "none"


def files_hash(plugin: Plugin) -> str:
    """Of its Python files, those of a whole package, and its listing."""
    module = Path(sys.modules[plugin.module].__file__ or ".")
    files = sorted(module.parent.rglob("*.py")) if module.name == "__init__.py" else [module]
    digest = hashlib.sha256()
    for file in (*files, *([plugin.file] if plugin.file else [])):
        digest.update(f"{file.relative_to(module.parent).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def import_name(given: str) -> ModuleType:
    try:
        return importlib.import_module(given)
    except ModuleNotFoundError as error:
        path = Path(*given.split(".")).with_suffix(".py")
        hint = f"; there is a file of that name: --plugin {path}" if path.is_file() else ""
        if error.name is not None and (given == error.name or given.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {error.name!r}{hint}") from error
        raise
    except (ValueError, TypeError) as error:  # "" and ".relative"
        raise UsageError(f"{error}; name a module or a .py file") from error


def import_file(given: str) -> ModuleType:
    """A file under its own name, with its folder on the path, as Python runs a script."""
    path = Path(given).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(f"there is no Python file {given}; name a module or a .py file")
    package = path.name == "__init__.py"
    name, folder = (path.parent.name, path.parent.parent) if package else (path.stem, path.parent)
    known = sys.modules.get(name)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() == path:
            return known
        raise UsageError(f"a module named {name!r} is imported already ({known.__file__}); rename the file")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = importlib.import_module(name)
    if Path(module.__file__ or "").resolve() != path:
        raise UsageError(f"{name!r} is the name of another module ({module.__file__}); rename the file")
    return module


def listed(plugin: Plugin) -> Plugin:
    """With the YAML beside its module, if there is one."""
    file = sys.modules[plugin.module].__file__
    if file is None:
        return plugin
    path = Path(file)
    listing = path.with_name("graft.yaml") if path.name == "__init__.py" else path.with_suffix(".yaml")
    if not listing.is_file():
        return plugin
    read = read_yaml(listing)
    if not isinstance(read, Mapping) or set(read) - set(KEYS):
        strange = next((key for key in read if key not in KEYS), "") if isinstance(read, Mapping) else ""
        what = f"the unknown key {strange!r}" if strange else "no mapping"
        raise UsageError(f"{listing} has {what}; a plugin lists {', '.join(KEYS)}")
    return Plugin(plugin.module, plugin.origin, plugin.version, read, listing)


def owner_of(module: str) -> Plugin | None:
    """The plugin that a module belongs to: the closest one; a package as a whole where no module of it is named."""
    fitting = [plugin for plugin in STATE.active() if plugin.owns(module)]
    if fitting:
        return max(fitting, key=lambda plugin: len(plugin.module))
    top = module.partition(".")[0]
    return next((plugin for plugin in STATE.active() if plugin.module.partition(".")[0] == top), None)
