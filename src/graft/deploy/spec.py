"""app.yaml: an application of several replicas. Needs no Ray.

name: graft               # of the Ray Serve application
serve:                    # every option of `graft serve`, by name
  model: smollm2-135m
replicas: 2               # or {min: 1, max: 4, open_requests: 8, up_after: 30, down_after: 600}: as many as keep so
                          # many open in each, seconds after there were more or fewer
gateways: 1
cpus: 1                   # of each replica; gpus: as many as --tensor-parallel, where the cluster has any
attempts: 3
routing: {least_share: 0.25, slack: 8}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from graft.base.errors import UsageError, near
from graft.deploy.policy import RoutePolicy
from graft.serve.options import ServeOptions

SECTION = "serve"


@dataclass(frozen=True)
class Scaling:
    """open_requests: what Ray Serve aims at for each replica; more are added above it, and taken away below.
    up_after, down_after: seconds that it must have been so."""

    min: int = 1
    max: int = 1
    open_requests: float = 8
    up_after: float = 30.0
    down_after: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise UsageError(
                f"replicas: min must be at least 1 and at most max, but they are {self.min} and {self.max}"
            )
        if not self.open_requests > 0:
            raise UsageError(f"replicas: open_requests must be more than 0, but is {self.open_requests:g}")
        for name, seconds in (("up_after", self.up_after), ("down_after", self.down_after)):
            if seconds < 0:
                raise UsageError(f"replicas: {name} must be at least 0 seconds, but is {seconds:g}")

    @property
    def fixed(self) -> bool:
        return self.min == self.max


@dataclass(frozen=True)
class AppSpec:
    """attempts: replicas that a request is tried on, as long as nothing of its answer was sent."""

    serve: ServeOptions
    name: str = "graft"
    replicas: Scaling = Scaling()
    gateways: int = 1
    cpus: float = 1
    gpus: float | None = None
    attempts: int = 3
    routing: RoutePolicy = field(default_factory=RoutePolicy)

    def __post_init__(self) -> None:
        for name, least in (("gateways", 1), ("cpus", 0), ("gpus", 0), ("attempts", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, but is {value:g}")
        if not self.name:
            raise UsageError("name must not be empty")
        if self.serve.published.on:
            raise UsageError(
                "--kv-events-config has one address, and replicas cannot share it; their events reach the router"
                " without it"
            )

    @property
    def found(self) -> AppSpec:
        """With the model's folder or file as every process finds it: those of Ray have a folder of their own."""
        model = Path(self.serve.load.model)
        if not model.exists():
            return self
        load = replace(self.serve.load, model=str(model.resolve()))
        names = self.serve.names
        return replace(self, serve=replace(self.serve, load=load, served_model_name=names))

    def plan(self) -> dict[str, Any]:
        """What is deployed, for people and programs. Keys are secret."""
        options = asdict(self.serve)
        options |= options.pop("load")
        options |= options.pop("engine")
        options["api_key"] = ["…"] * len(self.serve.api_key)
        return {
            "name": self.name,
            "address": f"http://{self.serve.host}:{self.serve.port}",
            "model": self.serve.load.model,
            "served_model_name": list(self.serve.names),
            "replicas": {
                **asdict(self.replicas),
                "cpus": self.cpus,
                "gpus": "auto" if self.gpus is None else self.gpus,
            },
            "gateways": self.gateways,
            "attempts": self.attempts,
            "routing": asdict(self.routing),
            "serve": {key: value for key, value in sorted(options.items()) if value not in (None, (), {}, [])},
        }


def app_spec(given: Mapping[str, Any], serve: ServeOptions, where: str) -> AppSpec:
    """given: app.yaml without its section `serve`. where: for errors."""
    known = {one.name: one for one in fields(AppSpec) if one.name != SECTION}
    for key in given:
        if key not in known:
            raise UsageError(f"{where}: unknown key {str(key)!r}{near(str(key), [*known, SECTION])}")
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for key, whole in (("gateways", True), ("attempts", True), ("cpus", False), ("gpus", False)):
        if key in values:
            number(values[key], f"{where}: {key}", whole)
    if not isinstance(values.get("name", ""), str):
        raise UsageError(f"{where}: name must be a text, not {values['name']!r}")
    if "replicas" in values:
        values["replicas"] = scaling(values["replicas"], f"{where}: replicas")
    if "routing" in values:
        values["routing"] = section(RoutePolicy, values["routing"], f"{where}: routing")
    try:
        return AppSpec(serve, **values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def scaling(given: object, where: str) -> Scaling:
    if isinstance(given, Mapping):
        return section(Scaling, given, where)
    number(given, where, whole=True)
    count: Any = given
    if count < 1:
        raise UsageError(f"{where} must be at least 1, but is {count}")
    return Scaling(count, count)


def section(kind: Any, given: object, where: str) -> Any:
    known = {one.name: one for one in fields(kind)}
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} must be a mapping of {', '.join(known)}, not {given!r}")
    for key, value in given.items():
        if key not in known:
            raise UsageError(f"{where}: unknown key {str(key)!r}{near(str(key), known)}")
        number(value, f"{where}: {key}", isinstance(known[key].default, int) and key != "open_requests")
    if kind is Scaling and "max" not in given and "min" in given:
        raise UsageError(f"{where}: max is missing")
    try:
        return kind(**given)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def number(value: object, where: str, whole: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise UsageError(f"{where} must be a {'whole ' if whole else ''}number, not {value!r}")
