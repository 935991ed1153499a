"""Configuration in layers: default.yaml, plugins, the model's overlay, the user's file or mapping, `--set a.b=c`.

Every value remembers where it came from. An unknown key or a value of the wrong type is an error that names it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from graft.base.errors import BrokenPlugin, ConfigError, UnknownKey, UnknownTransform, UsageError, WrongType, near
from graft.base.plugins import STATE, Plugin, leave_out
from graft.base.yaml_file import parse_yaml, read_yaml
from graft.ops import OPS
from graft.passes.base import Stage, TransformConfig
from graft.passes.registry import TransformRegistry, load_all
from graft.weights.quantize import QUANTIZERS

Verify = Literal["structure", "matches"]  # what is checked after each transform: the graph, or also every match
DEPTH = {"verify": 0, "kernels": 1, "transforms": 2}  # how many names stand above a value
DEFAULTS = Path(__file__).with_name("default.yaml")


@dataclass(frozen=True)
class ConfigLayer:
    """One source of values, by dotted key."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class PipelineConfig:
    """The typed result, in file order, and the origin of every value."""

    transforms: Mapping[str, TransformConfig]
    origins: Mapping[str, str] = field(default_factory=dict)
    verify: Verify = "structure"
    kernels: Mapping[str, str] = field(default_factory=dict)  # op → the kernel it must run


def load_config(
    user: str | Path | Mapping[str, Any] | None = None,
    *,
    model: ConfigLayer | None = None,
    sets: Sequence[str] = (),
    plugins: tuple[str, ...] = (),
) -> PipelineConfig:
    """Lays the layers over each other and checks the result."""
    load_all(plugins)
    layers = [defaults(DEFAULTS.read_text())]
    layers += plugin_layers(layers[0])
    if model is not None:
        layers.append(model)
    if isinstance(user, Mapping):
        layers.append(ConfigLayer("config argument", flatten(user, "config argument")))
    elif user is not None:
        layers.append(ConfigLayer(str(user), flatten(read_yaml(Path(user)), str(user))))
    layers += [parse_set(text) for text in sets]
    return build(layers)


@cache
def defaults(text: str) -> ConfigLayer:
    """default.yaml: reading YAML takes 40 ms, and one run loads many configurations."""
    return ConfigLayer("default.yaml", flatten(parse_yaml(text), "default.yaml"))


def plugin_layers(base: ConfigLayer) -> list[ConfigLayer]:
    """What plugins list. One that cannot be used leaves an installed plugin out, and is an error of a named one."""
    layers = []
    for plugin in STATE.active():
        try:
            layer = listing_layer(plugin)
            if plugin.module not in STATE.checked:
                check_order(build([base, layer]), layer)
                STATE.checked.add(plugin.module)
        except UsageError as error:  # a key, a value, a name
            leave_out(plugin, BrokenPlugin(plugin.origin, str(error)))
            continue
        layers.append(layer)
    return layers


def listing_layer(plugin: Plugin) -> ConfigLayer:
    where = f"{plugin.origin}: {plugin.file.name}" if plugin.file else plugin.origin
    return ConfigLayer(where, flatten({k: v for k, v in plugin.listing.items() if k in DEPTH}, where))


def check_order(settings: PipelineConfig, layer: ConfigLayer) -> None:
    """The transforms that a plugin's own come before or after are there."""
    for name, options in settings.transforms.items():
        for other in (*options.after, *options.before):
            if other not in TransformRegistry.names():
                raise UnknownTransform(other, TransformRegistry.names(), f"{layer.name} (transforms.{name})")


def flatten(tree: Any, where: str, prefix: str = "") -> dict[str, Any]:
    """{'transforms': {'a': {'enabled': True}}} → {'transforms.a.enabled': True}."""
    if not isinstance(tree, Mapping):
        raise WrongType(prefix.rstrip(".") or "the config", tree, "a mapping", where)
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if not prefix and key not in DEPTH:
            raise UnknownKey(str(key), where, DEPTH)
        deep = name.count(".") < DEPTH.get(name.partition(".")[0], 2)
        if deep and not isinstance(value, Mapping):
            raise WrongType(name, value, "a mapping", where)
        flat |= flatten(value, where, f"{name}.") if deep else {name: value}
    return flat


def parse_set(text: str) -> ConfigLayer:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write it as key=value, e.g. transforms.fuse_rope.enabled=false")
    try:
        return ConfigLayer(f"--set {text}", {key.strip(): parse_yaml(value)})
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: the value is not YAML: {error}") from error


def quantize_sets(kind: str | None) -> tuple[str, ...]:
    """What `--quantize KIND` stands for, as values of `--set`. `none`: floats, whatever the file has."""
    if kind in (None, "none"):
        return ()
    if kind not in (*QUANTIZERS, "file"):
        raise UsageError(f"quantize: unknown format {kind!r}{near(str(kind), [*QUANTIZERS, 'none'])}")
    return "transforms.quantize_linear.enabled=true", f"transforms.quantize_linear.format={kind}"


def shard_sets(rank: int, world: int) -> tuple[str, ...]:
    """What `--tensor-parallel WORLD` stands for, on one of the ranks."""
    name = "transforms.shard_tensor_parallel"
    return f"{name}.enabled=true", f"{name}.world={world}", f"{name}.rank={rank}"


def pooling_sets() -> tuple[str, ...]:
    """What `--runner pooling` stands for: the graph ends before the output projection."""
    return ("transforms.last_token_logits.output=hidden",)


def with_sets(config: PipelineConfig, sets: Sequence[str]) -> PipelineConfig:
    """A loaded configuration with `--set` values laid over it."""
    transforms, origins = dict(config.transforms), dict(config.origins)
    for layer in map(parse_set, sets):
        for key, value in layer.values.items():
            name, option = split_key(key, layer.name)
            if name not in transforms:
                raise ConfigError(f"{layer.name}: the configuration does not list {name}")
            typed = check_value(name, option, value, layer.name)
            transforms[name] = dataclasses.replace(transforms[name], **{option: typed})
            origins[key] = layer.name
    return dataclasses.replace(config, transforms=transforms, origins=origins)


def build(layers: Sequence[ConfigLayer]) -> PipelineConfig:
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    verify: Verify = "structure"
    kernels: dict[str, str] = {}
    for layer in layers:
        for key, value in layer.values.items():
            origins[key] = layer.name
            if key == "verify":
                verify = convert(value, Verify, key, layer.name)
            elif key.startswith("kernels."):
                op, name = check_kernel(key, value, layer.name)
                kernels[op] = name
            else:
                name, option = split_key(key, layer.name)
                values.setdefault(name, {})[option] = check_value(name, option, value, layer.name)
    missing = [name for name, options in values.items() if "stage" not in options]
    if missing:
        raise ConfigError(f"transform {missing[0]} has no stage; add transforms.{missing[0]}.stage to your config")
    for name, options in values.items():
        if (options["stage"] is Stage.INDUCTOR) is not TransformRegistry.get(name).on_inductor:
            raise ConfigError(
                f"transforms.{name}.stage={options['stage'].value}: the stage inductor is for what runs on Inductor's"
                " graphs, and nothing else runs there; graft.passes_for_inductor() takes patterns of any stage there"
            )
    typed = {name: TransformRegistry.get(name).get_config_class()(**options) for name, options in values.items()}
    return PipelineConfig(typed, origins, verify, kernels)


def check_kernel(key: str, value: Any, where: str) -> tuple[str, str]:
    """'kernels.rope' = 'triton' → ('rope', 'triton'), both known."""
    op = key.removeprefix("kernels.")
    if op not in OPS:
        raise UnknownKey(op, f"{where} (kernels)", OPS)
    names = list(OPS[op].by_name)
    if value not in names:
        raise WrongType(key, value, f"one of {', '.join(names)}", where)
    return op, value


def split_key(key: str, where: str) -> tuple[str, str]:
    """'transforms.fuse_rope.enabled' → ('fuse_rope', 'enabled'), checked."""
    parts = key.split(".")
    if parts[0] in ("kernels", "verify"):
        form = "kernels.<op>=<kernel>" if parts[0] == "kernels" else "verify=structure or verify=matches"
        raise ConfigError(f"{where}: {key!r} is not a key; write {form}")
    if parts[0] != "transforms":
        raise UnknownKey(parts[0], where, DEPTH)
    if len(parts) != 3:
        raise ConfigError(f"{where}: {key!r} is not a key; write transforms.<name>.<option>")
    if parts[1] not in TransformRegistry.names():
        raise UnknownTransform(parts[1], TransformRegistry.names(), where)
    known = [f.name for f in dataclasses.fields(TransformRegistry.get(parts[1]).get_config_class())]
    if parts[2] not in known:
        raise UnknownKey(parts[2], f"{where} (transforms.{parts[1]})", known)
    return parts[1], parts[2]


def check_value(name: str, option: str, value: Any, where: str) -> Any:
    """The value as the field's type, or WrongType."""
    hints = field_types(TransformRegistry.get(name).get_config_class())
    return convert(value, hints[option], f"transforms.{name}.{option}", where)


@cache
def field_types(config: type) -> dict[str, Any]:
    return typing.get_type_hints(config)


def convert(value: Any, hint: Any, key: str, where: str) -> Any:
    origin = typing.get_origin(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [member.value for member in hint]
        if value in choices:
            return hint(value)
        raise WrongType(key, value, f"one of {', '.join(choices)}", where)
    if origin is typing.Literal:
        if value in typing.get_args(hint):
            return value
        raise WrongType(key, value, f"one of {', '.join(map(str, typing.get_args(hint)))}", where)
    if origin in (typing.Union, types.UnionType):
        return convert_union(value, hint, key, where)
    if origin is tuple:
        if isinstance(value, list):
            return tuple(convert(item, typing.get_args(hint)[0], key, where) for item in value)
        raise WrongType(key, value, "a list", where)
    return convert_plain(value, hint, key, where)


def convert_union(value: Any, hint: Any, key: str, where: str) -> Any:
    if value is None and type(None) in typing.get_args(hint):
        return None
    inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return convert(value, inner, key, where)


def convert_plain(value: Any, hint: Any, key: str, where: str) -> Any:
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-6 as text
        try:
            return float(value)
        except ValueError:
            raise WrongType(key, value, "a number", where) from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        raise WrongType(key, value, names.get(hint, str(hint)), where)
    return value
