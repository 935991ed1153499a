"""The model registry: one YAML a family, with real configurations and match counts to expect; plugins add to it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from graft.base.errors import BrokenPlugin, ConfigError
from graft.base.plugins import Plugin, leave_out, load_installed
from graft.base.yaml_file import parse_yaml

FOLDER = Path(__file__).with_name("registry")
COMMON = "common.yaml"  # reasons that hold for most families
KEYS = {"family", "model_type", "models", "embedded", "tiny", "reference_attention", "transforms", "absent"}
KEYS |= {"expect", "expect_gpu"}
ADDED = ("models", "embedded", "transforms", "expect", "expect_gpu", "absent")  # mappings that a plugin adds to
EVERY = "every"  # in a plugin's list: all families


@dataclass(frozen=True)
class Family:
    """A model family: its Hugging Face type, what its transforms need, and how often each must match."""

    name: str
    model_type: str
    models: Mapping[str, Mapping[str, Any]]
    embedded: Mapping[str, Mapping[str, str]]
    tiny: Mapping[str, Any]
    reference_attention: str = "sdpa"
    transforms: Mapping[str, Any] = field(default_factory=dict)
    expect: Mapping[str, str] = field(default_factory=dict)
    expect_gpu: Mapping[str, str] = field(default_factory=dict)  # what matches beyond that on a GPU
    absent: Mapping[str, str] = field(default_factory=dict)  # transforms that find nothing here, and why

    def expected_matches(self, layers: int, *, gpu: bool = False) -> dict[str, int]:
        """How often each transform must match a model of this family with that many layers."""
        formulas = {**self.expect, **(self.expect_gpu if gpu else {})}
        counts = {name: evaluate(str(formula), layers) for name, formula in formulas.items()}
        return {**dict.fromkeys(self.absent, 0), **counts}


@dataclass(frozen=True)
class RegistryEntry:
    """One registry name."""

    name: str
    family: Family
    kind: Literal["embedded", "random"]
    settings: Mapping[str, Any]


def families() -> dict[str, Family]:
    """By name, with what plugins add."""
    found, loaded = own_families(), load_installed()
    for plugin in loaded:
        try:
            found = with_plugin(found, plugin)
        except ConfigError as error:
            leave_out(plugin, BrokenPlugin(plugin.origin, str(error)))
    return found


@cache
def own_families() -> dict[str, Family]:
    found = {}
    common: dict[str, str] = parse_yaml((FOLDER / COMMON).read_text())["absent"]
    for path in sorted(path for path in FOLDER.glob("*.yaml") if path.name != COMMON):
        data = parse_yaml(path.read_text())
        name = data.pop("family")
        elsewhere = {key: why for key, why in common.items() if key not in data.get("expect", {})}
        found[name] = make_family(name, {**data, "absent": {**elsewhere, **data.get("absent", {})}}, path.name, data)
    return found


def make_family(name: str, settings: Mapping[str, Any], where: str, own: Mapping[str, Any]) -> Family:
    """own: what its own file says, which must not contradict itself."""
    unknown = set(settings) - KEYS
    if unknown:
        raise ConfigError(f"{where} has the unknown key {sorted(unknown)[0]!r}; known are {', '.join(sorted(KEYS))}")
    counted = {**own.get("expect", {}), **own.get("expect_gpu", {})}
    both = sorted(set(counted) & set(own.get("absent", {})))
    if both:
        raise ConfigError(f"{where} both counts {both[0]} and says why it is absent; keep one")
    fields: dict[str, Any] = {key: value for key, value in settings.items() if key != "family"}
    fields = {"models": {}, "embedded": {}, **fields}
    return Family(name, **fields)


def with_plugin(known: dict[str, Family], plugin: Plugin) -> dict[str, Family]:
    """Adds what a plugin's list says of families: to one that is there, to every one, or a new one."""
    listed = plugin.listing.get("families") or {}
    where = f"{plugin.origin}: families"
    if not isinstance(listed, Mapping) or not all(isinstance(value, Mapping) for value in listed.values()):
        raise ConfigError(f"{where} must be a mapping of mappings: {{llama: {{expect: {{fuse_mine: L}}}}}}")
    found = dict(known)
    for name, more in listed.items():
        if name != EVERY and name not in known:
            missing = [key for key in ("model_type", "tiny") if key not in more]
            if missing:
                raise ConfigError(f"{where}: {name} is a new family, and has no {missing[0]}")
            found[name] = make_family(name, more, f"{where}.{name}", more)
    for name, more in listed.items():
        for each in list(found) if name == EVERY else [name] if name in known else []:
            found[each] = added(found[each], more, f"{where}.{name}", everywhere=name == EVERY)
    return found


def added(family: Family, more: Mapping[str, Any], where: str, everywhere: bool) -> Family:
    """everywhere: what is said of all families gives way to what one of them says itself."""
    wrong = next((key for key in more if key not in ADDED or not isinstance(more[key], Mapping)), None)
    if wrong is not None:
        raise ConfigError(f"{where}.{wrong} cannot be added to a family; {', '.join(ADDED)} can, as mappings")
    sides = {key: (getattr(family, key), more[key]) for key in more}
    fields: dict[str, Any] = {
        key: {**new, **own} if everywhere else {**own, **new} for key, (own, new) in sides.items()
    }
    made = replace(family, **fields)
    counted = {*made.expect, *made.expect_gpu}
    lost = (
        counted & set(made.absent) & {*more.get("expect", {}), *more.get("expect_gpu", {}), *more.get("absent", {})}
    )
    return replace(made, absent={name: why for name, why in made.absent.items() if name not in lost})


def entries() -> dict[str, RegistryEntry]:
    """Every name that can be loaded without files: embedded models first, then real shapes, then tiny ones."""
    found: dict[str, RegistryEntry] = {}
    known = families().values()
    for family in known:
        found |= {name: RegistryEntry(name, family, "embedded", package) for name, package in family.embedded.items()}
    for family in known:
        found |= {name: RegistryEntry(name, family, "random", config) for name, config in family.models.items()}
    for family in known:
        name = f"tiny-{family.name}"
        found[name] = RegistryEntry(name, family, "random", family.tiny)
    return found


def family_of(model_type: str, name: str = "") -> Family | None:
    """The family of a Hugging Face model type; where several share it, the one that `name` starts with."""
    fitting = [family for family in families().values() if family.model_type == model_type]
    named = [family for family in fitting if name.startswith(family.name)]
    return (named or fitting or [None])[0]


OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def evaluate(formula: str, layers: int) -> int:
    """`2*L + 1` for a layer count; numbers, L, + - * // and nothing else."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id="L"):
                return layers
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ConfigError(f"the formula {formula!r} may hold numbers, L, + - * // and nothing else")

    return value(ast.parse(formula, mode="eval").body)
