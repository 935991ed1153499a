"""The model registry: one YAML a family, with real configurations and the match counts to expect."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from graft.base.errors import ConfigError

FOLDER = Path(__file__).with_name("registry")
COMMON = "common.yaml"  # reasons that hold for most families
KEYS = {"family", "model_type", "models", "embedded", "tiny", "reference_attention", "transforms", "absent"}
KEYS |= {"expect", "expect_gpu"}


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


@cache
def families() -> dict[str, Family]:
    found = {}
    common: dict[str, str] = yaml.safe_load((FOLDER / COMMON).read_text())["absent"]
    for path in sorted(path for path in FOLDER.glob("*.yaml") if path.name != COMMON):
        data = yaml.safe_load(path.read_text())
        unknown = set(data) - KEYS
        if unknown:
            raise ConfigError(
                f"{path.name} has the unknown key {sorted(unknown)[0]!r}; known are {', '.join(sorted(KEYS))}"
            )
        name = data.pop("family")
        counted = {**data.get("expect", {}), **data.get("expect_gpu", {})}
        both = sorted(set(counted) & set(data.get("absent", {})))
        if both:
            raise ConfigError(f"{path.name} both counts {both[0]} and says why it is absent; keep one")
        elsewhere = {key: why for key, why in common.items() if key not in data.get("expect", {})}
        settings: dict[str, Any] = {"models": {}, "embedded": {}, **data}
        settings["absent"] = {**elsewhere, **data.get("absent", {})}
        found[name] = Family(name, **settings)
    return found


@cache
def entries() -> dict[str, RegistryEntry]:
    """Every name that can be loaded without files: embedded models first, then real shapes, then tiny ones."""
    found: dict[str, RegistryEntry] = {}
    for family in families().values():
        found |= {name: RegistryEntry(name, family, "embedded", package) for name, package in family.embedded.items()}
    for family in families().values():
        found |= {name: RegistryEntry(name, family, "random", config) for name, config in family.models.items()}
    for family in families().values():
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
