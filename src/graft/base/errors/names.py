"""Names, keys and values of a request or a configuration that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graft.base.errors.base import GraftError, UsageError, near


class UnknownModel(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown model {name!r}: not a registry name, a folder, or a .gguf file{near(name, known)}")


class UnknownTransform(UsageError):
    def __init__(self, name: str, known: Iterable[str], where: str = "") -> None:
        super().__init__(f"unknown transform {name!r}{f' in {where}' if where else ''}{near(name, known)}")


class TransformOff(UsageError):
    """Of a stored run that is asked for a graph which it has not."""

    def __init__(self, name: str, folder: object) -> None:
        super().__init__(
            f"{name} was off in {folder}, so there is no graph after it; dump again with --set"
            f" transforms.{name}.enabled=true"
        )


class UnknownInput(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"dynamic_shapes names {name!r}, which is no input of the call{near(name, known)}")


class UnknownOp(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown op {name!r}{near(name, known)}")


class UnknownBackend(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown backend {name!r}{near(name, known)}")


class UnknownCandidate(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown candidate {name!r}{near(name, known)} `graft discover` lists them")


class UnknownSkill(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown skill {name!r}{near(name, known)}")


class UnknownMatch(UsageError):
    def __init__(self, name: str, known: Sequence[str], run: str) -> None:
        listed = f"it has {', '.join(known[:3])}{' …' if len(known) > 3 else ''}" if known else "it has none"
        super().__init__(f"unknown match {name!r} of {run}: {listed}; graft repro {run} lists them")


class DuplicateTransform(GraftError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(
            f"a transform named {name!r} is registered already; names are unique. Known: {', '.join(sorted(known))}."
        )


class BrokenPlugin(UsageError):
    """A plugin that cannot be used. One that is installed is left out; one that was asked for ends the program."""

    def __init__(self, origin: str, problem: str) -> None:
        self.origin, self.problem = origin, problem
        super().__init__(f"plugin {origin} cannot be used: {problem}")


class ConfigError(UsageError):
    """A configuration key or value that cannot be used."""


class UnknownKey(ConfigError):
    def __init__(self, key: str, where: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown key {key!r} in {where}{near(key, known)}")


class WrongType(ConfigError):
    def __init__(self, key: str, value: object, expected: str, where: str) -> None:
        super().__init__(
            f"{where}: {key} must be {expected}, but is {value!r} ({type(value).__name__}); correct the value"
        )


class OrderError(ConfigError):
    """`after` / `before` constraints that no order can satisfy."""
