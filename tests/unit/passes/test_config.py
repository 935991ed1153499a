"""Configuration: layers, origins, and errors that name the right key."""

from __future__ import annotations

import pytest

from graft.base.errors import ConfigError, UnknownKey, UnknownTransform, UsageError, WrongType
from graft.passes.base import Stage
from graft.passes.config import ConfigLayer, convert, load_config
from graft.passes.registry import TransformRegistry


def test_defaults_list_every_transform():
    config = load_config()
    assert sorted(config.transforms) == TransformRegistry.names()
    assert config.transforms["fuse_rope"].stage is Stage.MATCH
    assert config.origins["transforms.fuse_rope.enabled"] == "default.yaml"


def test_layers_lie_over_each_other_in_order(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("transforms: {fuse_rope: {enabled: false, on_error: skip}, merge_qkv: {enabled: false}}\n")
    model = ConfigLayer(
        "registry/x.yaml", {"transforms.merge_qkv.enabled": True, "transforms.fuse_swiglu.enabled": False}
    )
    config = load_config(file, model=model, sets=["transforms.fuse_rope.enabled=true"])
    enabled = {name: entry.enabled for name, entry in config.transforms.items()}
    assert enabled["fuse_rope"] and not enabled["merge_qkv"] and not enabled["fuse_swiglu"]
    assert config.transforms["fuse_rope"].on_error == "skip"
    assert config.origins["transforms.fuse_rope.enabled"] == "--set transforms.fuse_rope.enabled=true"
    assert config.origins["transforms.fuse_rope.on_error"] == str(file)
    assert config.origins["transforms.fuse_swiglu.enabled"] == "registry/x.yaml"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"transforms": {"fuse_rope": {"enabeld": False}}}, UnknownKey, "did you mean 'enabled'"),
        ({"transform": {"fuse_rope": {"enabled": False}}}, UnknownKey, "did you mean 'transforms'"),
        ({"transforms": {"fuse_roap": {"enabled": False}}}, UnknownTransform, "did you mean 'fuse_rope'"),
        ({"transforms": {"fuse_rope": {"enabled": "no thanks"}}}, WrongType, "must be true or false"),
        ({"transforms": {"fuse_rope": {"enabled": 1}}}, WrongType, "must be true or false"),
        ({"transforms": {"fuse_rope": {"stage": "fuze"}}}, WrongType, "one of match, shard, fuse, state, schedule"),
        ({"transforms": {"fuse_rope": {"on_error": "ignore"}}}, WrongType, "one of raise, skip"),
        ({"transforms": {"fuse_rope": {"after": "merge_qkv"}}}, WrongType, "a list"),
        ({"transforms": {"fuse_rope": False}}, WrongType, "a mapping"),
        ({"transforms": ["fuse_rope"]}, WrongType, "a mapping"),
    ],
)
def test_wrong_keys_and_values_are_named(given, error, message):
    with pytest.raises(error, match=message):
        load_config(given)


def test_set_and_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="write it as key=value"):
        load_config(sets=["transforms.fuse_rope.enabled"])
    with pytest.raises(ConfigError, match=r"transforms\.<name>\.<option>"):
        load_config(sets=["transforms.fuse_rope=false"])
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("transforms: [unclosed")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(sets=["transforms.fuse_rope.enabled=["])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    with pytest.raises(UsageError, match="there is no module"):
        load_config(plugins=("no_such_module",))


def test_numbers_as_yaml_writes_them():
    assert convert("1e-6", float, "k", "w") == 1e-6  # YAML 1.1 reads it as text
    assert convert(2, float, "k", "w") == 2.0
    with pytest.raises(WrongType, match="a number"):
        convert("fast", float, "k", "w")
    with pytest.raises(WrongType, match="a whole number"):
        convert(True, int, "k", "w")
    assert convert(None, int | None, "k", "w") is None


def test_a_plugin_registers_its_transform(tmp_path, monkeypatch):
    (tmp_path / "my_plugin.py").write_text(
        "from graft.passes.base import BaseTransform, Outcome\n"
        "from graft.passes.registry import TransformRegistry\n"
        "@TransformRegistry.register('from_plugin')\n"
        "class FromPlugin(BaseTransform):\n"
        "    def apply(self, gm, context):\n"
        "        return Outcome(reason='nothing to do')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="has no stage"):
        load_config({"transforms": {"from_plugin": {"enabled": True}}}, plugins=("my_plugin",))
    try:
        config = load_config({"transforms": {"from_plugin": {"stage": "fuse"}}}, plugins=("my_plugin",))
        assert "from_plugin" in config.transforms
    finally:
        del TransformRegistry._known["from_plugin"]
