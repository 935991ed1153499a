"""Plugins: found by entry points or named, and left out whole where something about them is wrong."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from graft.base.errors import BrokenPlugin, GraftError
from graft.base.plugins import STATE, active_text, fingerprints, load_named
from graft.cli.app import app
from graft.engine.artifact.target import plugin_differences
from graft.ir.trace import export_graph
from graft.models.registry import families
from graft.ops import OPS
from graft.passes.config import load_config
from graft.passes.registry import TransformRegistry, load_all, origin_of

NUMBERS = itertools.count()  # every plugin has a name of its own: Python keeps what it has imported
REGISTER = '''
from graft import Outcome, BaseTransform, TransformRegistry


@TransformRegistry.register("{name}")
class Mine(BaseTransform):
    """Does nothing."""

    def apply(self, gm, context):
        {does}
'''
GRAPH = export_graph(torch.nn.Identity(), (torch.zeros(2),), {}, None)
LIST = "transforms: {{{name}: {{stage: fuse, enabled: false}}}}\n"


@pytest.fixture(name="plugins")
def plugins_folder(tmp_path_factory, monkeypatch):
    """A place on the path, and the process as it was afterwards."""
    load_all()
    folder = tmp_path_factory.mktemp("site")
    kept = {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(STATE).items()}
    known, modules = dict(TransformRegistry._known), set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    yield folder
    put_back(kept, known, modules)


def put_back(kept, known, modules):
    for name, value in kept.items():
        setattr(STATE, name, value.copy() if hasattr(value, "copy") else value)
    TransformRegistry._known.clear()
    TransformRegistry._known.update(known)
    STATE.registries[:] = kept["registries"]
    for name in set(sys.modules) - modules:
        if name.startswith("plugin_"):
            del sys.modules[name]


def install(folder, code, listing=LIST, does="return Outcome(reason='nothing')"):
    """A package with an entry point, as pip leaves it; the plugins of this process are looked for again."""
    name = f"plugin_{next(NUMBERS)}"
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code.format(name=name, does=does))
    (folder / name / "graft.yaml").write_text(listing.format(name=name))
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[graft.transforms]\n{name} = {name}\n")
    STATE.installed = False
    importlib.invalidate_caches()
    return name


def test_an_installed_package_is_listed_with_its_version(plugins):
    name = install(plugins, REGISTER, LIST + "families: {{llama: {{expect: {{{name}: 2*L}}}}}}\n")
    config = load_config()
    assert origin_of(name) == f"{name} 1.2" and origin_of("fuse_rope").startswith("graft ")
    assert config.origins[f"transforms.{name}.stage"] == f"{name} 1.2: graft.yaml"
    assert families()["llama"].expected_matches(3)[name] == 6
    assert name not in families()["qwen3"].expected_matches(3)
    # a user's file lies over it
    assert load_config({"transforms": {name: {"enabled": True}}}).transforms[name].enabled


def test_a_package_adds_a_family_and_a_reason_for_all(plugins):
    listing = LIST + (
        "families:\n"
        "  every: {{absent: {{{name}: off by default}}}}\n"
        "  {name}-family: {{model_type: llama, tiny: {{hidden_size: 8}}, expect: {{{name}: L}}}}\n"
        "  gemma-2: {{expect: {{{name}: 1}}, transforms: {{{name}: {{enabled: true}}}}}}\n"
    )
    name = install(plugins, REGISTER, listing)
    found = families()
    assert found[f"{name}-family"].expect == {name: "L"} and name not in found[f"{name}-family"].absent
    assert found["llama"].absent[name] == "off by default"
    assert found["gemma-2"].expect[name] == 1 and name not in found["gemma-2"].absent
    assert found["gemma-2"].transforms == {name: {"enabled": True}}


WRONG = {  # what is wrong with it: code, list, words of the message
    "syntax": ("def broken(:\n", LIST, r"SyntaxError: invalid syntax \(.*__init__.py:1\)"),
    "import": (REGISTER + "\nimport no_such_library\n", LIST, "no_such_library"),
    "raises": (
        REGISTER + "\n1 / 0\n",
        LIST,
        r"ZeroDivisionError: division by zero \(.*__init__.py:12, in <module>\)",
    ),
    "exits": (REGISTER + "\nraise SystemExit(3)\n", LIST, "SystemExit"),
    "a name of graft": (REGISTER.replace("{name}", "fuse_rope"), LIST, "registered already"),
    "no YAML": (REGISTER, "transforms: [unclosed", "not YAML"),
    "a list": (REGISTER, "- a\n", "no mapping"),
    "unknown key": (REGISTER, "transform: {{}}\n", "unknown key 'transform'"),
    "unknown transform": (REGISTER, "transforms: {{no_such: {{stage: fuse}}}}\n", "unknown transform 'no_such'"),
    "no stage": (REGISTER, "transforms: {{{name}: {{enabled: true}}}}\n", "has no stage"),
    "wrong type": (REGISTER, "transforms: {{{name}: {{stage: fuse, enabled: 3}}}}\n", "must be true or false"),
    "order": (REGISTER, "transforms: {{{name}: {{stage: fuse, after: [nobody]}}}}\n", "unknown transform 'nobody'"),
    "families": (REGISTER, LIST + "families: [llama]\n", "mapping of mappings"),
    "new family": (REGISTER, LIST + "families: {{new: {{expect: {{{name}: L}}}}}}\n", "has no model_type"),
    "family key": (REGISTER, LIST + "families: {{llama: {{tiny: {{}}}}}}\n", "cannot be added"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_and_the_plugin_left_out(plugins, what, caplog):
    code, listing, words = WRONG[what]
    name = install(plugins, code, listing)
    families()
    load_config()
    (told,) = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert f"plugin {name} 1.2 cannot be used" in told and "left out" in told
    assert re.search(words, told), told
    assert name not in TransformRegistry.names() and name not in load_config().transforms
    result = CliRunner().invoke(app, ["transforms", "--strict"])
    assert result.exit_code == 2 and f"plugin {name} 1.2 cannot be used" in result.stderr


@settings(max_examples=15, deadline=None)
@given(kinds=st.lists(st.sampled_from([*WRONG, "good"]), min_size=1, max_size=4))
def test_good_plugins_stay_and_nothing_of_others_does(tmp_path_factory, kinds):
    """Whatever is installed beside it."""
    load_all()
    folder = tmp_path_factory.mktemp("site")
    kept = {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(STATE).items()}
    known, modules, ops = dict(TransformRegistry._known), set(sys.modules), set(OPS)
    sys.path.insert(0, str(folder))
    try:
        made = [(kind, install(folder, *(WRONG[kind][:2] if kind in WRONG else (REGISTER,)))) for kind in kinds]
        families()
        config = load_config()
        good = {name for kind, name in made if kind == "good"}
        assert set(config.transforms) - set(known) == good
        assert set(TransformRegistry.names()) - set(known) == good and set(OPS) == ops
        assert {error.origin for error in STATE.broken} == {f"{name} 1.2" for kind, name in made if kind != "good"}
    finally:
        sys.path.remove(str(folder))
        put_back(kept, known, modules)


def test_a_module_or_a_file_is_named_on_every_verb(plugins):
    name = f"plugin_{next(NUMBERS)}"
    file = plugins / f"{name}.py"
    file.write_text(REGISTER.format(name=name, does="return Outcome(reason='nothing')"))
    (plugins / f"{name}.yaml").write_text(LIST.format(name=name))
    for given_as in (str(file), name):
        assert load_named(given_as).module == name
        assert load_config().transforms[name].stage == "fuse"
    verbs = [command.callback.__name__ for command in app.registered_commands]
    for verb in verbs:
        result = CliRunner().invoke(app, [verb.replace("_", "-"), "--help"], env={"COLUMNS": "200"})
        for option in ("--plugin", "--strict", "--traceback"):
            assert option in result.output, (verb, option)


@pytest.mark.parametrize(
    ("given_as", "words"),
    [
        ("nowhere/mine.py", "there is no Python file"),
        ("no_such_module", "there is no module 'no_such_module'"),
        ("", "Empty module name"),
        (".relative", "name a module or a .py file"),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error(plugins, given_as, words):
    with pytest.raises(BrokenPlugin, match=words):
        load_named(given_as)


def test_a_file_beside_is_hinted_at(plugins, monkeypatch):
    monkeypatch.chdir(plugins)
    (plugins / "plugin_beside.py").write_text("")
    monkeypatch.syspath_prepend("/")  # what a console script has in front is not this folder
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(plugins))])
    with pytest.raises(GraftError, match=r"--plugin plugin_beside\.py"):
        load_named("plugin_beside")


def test_an_authors_exception_names_his_line_and_the_rest_is_asked_for(plugins, monkeypatch):
    name = install(plugins, REGISTER, "transforms: {{{name}: {{stage: fuse}}}}\n", does="return [][0]")
    monkeypatch.setattr(
        "graft.workbench.explain.captured", lambda *_, **__: (SimpleNamespace(name="", context=8), GRAPH)
    )
    told = CliRunner().invoke(app, ["explain", "tiny-llama", name])
    assert told.exit_code == 1 and "Traceback" not in told.stderr
    assert f"IndexError: list index out of range ({plugins / name / '__init__.py'}:10, in apply)" in told.stderr
    whole = CliRunner().invoke(app, ["explain", "tiny-llama", name, "--traceback"])
    assert "Traceback (most recent call last)" in whole.stderr and "run_one" in whole.stderr


def test_processes_compare_plugins_by_the_content_of_their_files(plugins):
    """Any file of a package, its listing included; a file by itself, not what lies beside it."""
    assert active_text() == "none"
    name = install(plugins, REGISTER)
    load_all()
    before = active_text()
    assert re.fullmatch(rf"{name} 1\.2 \([0-9a-f]{{12}}\)", before)
    (plugins / name / "helpers.py").write_text("A = 1\n")
    helped = active_text()
    (plugins / name / "graft.yaml").write_text(LIST.format(name=name) + "# another\n")
    assert len({before, helped, active_text()}) == 3
    file = plugins / "plugin_alone.py"
    file.write_text("")
    load_named(str(file))
    alone = active_text()
    (plugins / "beside.py").write_text("A = 1\n")
    assert active_text() == alone and "plugin_alone (" in alone
    file.write_text("A = 2\n")
    assert active_text() != alone


def test_an_engine_that_a_plugin_was_at_work_on_knows_it_by_its_content(plugins):
    """One that is there and was changed is told; one that is not there any more has done its work."""
    name = install(plugins, REGISTER)
    load_all()
    saved = fingerprints()
    assert plugin_differences(saved) == [] == plugin_differences({"gone": "1.0 (0)"}) == plugin_differences({})
    code = plugins / name / "__init__.py"
    code.write_text(code.read_text() + "# another line\n")
    (told,) = plugin_differences(saved)
    assert told == f"the plugin {name} was {saved[name]}, here it is {fingerprints()[name]}"
