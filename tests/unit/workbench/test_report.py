"""`graft report` as people call it, and its page: every section, all escaped, whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report_data import kernel_document
from typer.testing import CliRunner

from graft.base.errors import DiskFull
from graft.cli.app import app
from graft.passes.dumps import MANIFEST, REPORT
from graft.workbench.report import collect, render, stage_page
from graft.workbench.report import page as page_module
from graft.workbench.report.page import PACKAGE, SCRIPTS, STYLES, VENDOR, policy, safe_json, write_page
from report_cases import HOSTILE, dump_stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return dump_stack(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="module")
def page(folder):
    return render(collect(folder))


def planted(folder, other, text):
    """The page of the same run with `text` as its model, in module paths, source lines, reasons and anchors."""
    shutil.copytree(folder, other)
    for file in other.glob("*.json"):
        data = json.loads(file.read_text())
        if file.name in (MANIFEST, REPORT):
            data["model"] = text
        for node in data.get("nodes", ()):
            node["modules"] = [[key, f"{path}.{text}" if path else path, cls] for key, path, cls in node["modules"]]
            node["made_by"] = text
            node["stack_trace"] = f'File "/home/{text}.py", line 3, in f'
        for record in data.get("transforms", {}).values():
            record["reason"] = text
            for one in (*record["near_misses"], *record["matches"]):
                one["anchor"] = f"%x ({text}, a.py:1)"
        file.write_text(json.dumps(data))
    return render(collect(other))


class Elements(HTMLParser):
    """The tags and ids of a page, and what stands in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.ids, self.scripts, self.open, self.addresses = [], [], [], False, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [given[key] for key in ("src", "href", "srcset", "action") if key in given]
        if tag == "script":
            self.open = True
            self.scripts.append([given.get("type", ""), ""])

    def handle_endtag(self, tag):
        self.open = self.open and tag != "script"

    def handle_data(self, data):
        if self.open:
            self.scripts[-1][1] += data


def call(*args):
    return CliRunner().invoke(app, ["report", *map(str, args)])


def test_the_page_has_every_section_and_every_transform(page, folder):
    found = Elements(page)
    assert {"summary", "pipeline", "layers", "candidates", "kernels", "made-of", "drawer", "help", "search"} <= set(
        found.ids
    )
    assert len(found.ids) == len(set(found.ids)), "an id is there twice"
    names = json.loads((folder / REPORT).read_text())["transforms"]
    for name in names:
        assert f'data-transform="{name}"' in page
    assert "has a second reader" in page and "layers.*.norm × 9 (layers 0–6, 8–9)" in page
    assert "None was measured for this run" in page and "graft bench stack --kernels --json" in page


def test_the_page_loads_nothing(page):
    found = Elements(page)
    assert all(address.startswith("#") for address in found.addresses)
    assert not {"link", "iframe", "object", "embed", "base", "img"} & set(found.tags)
    own = "".join((PACKAGE / "static" / name).read_text() for name in (*SCRIPTS, *STYLES))
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|innerHTML", own)
    assert "default-src &#39;none&#39;" in page


def test_nothing_that_a_model_says_becomes_markup(folder, tmp_path):
    hostile = planted(folder, tmp_path / "hostile", HOSTILE)
    plain, odd = Elements(planted(folder, tmp_path / "plain", "plain")), Elements(hostile)
    assert odd.tags == plain.tags, "a name became an element"
    assert len(odd.scripts) == len(plain.scripts)
    assert [kind for kind, _ in odd.scripts] == [*["application/json"] * 3, "", "", ""]
    assert odd.scripts[3:] == plain.scripts[3:], "a name reached the code"
    assert HOSTILE in "".join(json.loads(odd.scripts[0][1])["strings"])
    assert "owned" in hostile and "<script>document" not in hostile


def test_only_the_reports_own_scripts_may_run(page):
    scripts = [text for kind, text in Elements(page).scripts if not kind]
    allowed = re.search(r"script-src ([^;]*);", policy(scripts))[1]
    assert allowed.count("sha256-") == 3 and "unsafe" not in allowed
    assert policy([*scripts[:2], scripts[2] + " "]) != policy(scripts)


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_json_in_a_page_reads_back_and_cannot_end_its_element(value):
    text = safe_json(value)
    assert json.loads(text) == value
    assert "<" not in text and ">" not in text and text.isascii()


def test_every_file_of_the_page_is_used():
    names = {file.name for file in (PACKAGE / "static").iterdir()}
    assert names == {*SCRIPTS, *STYLES, *stage_page.SCRIPTS, *stage_page.STYLES}
    templates = {file.name: file.read_text() for file in (PACKAGE / "templates").iterdir()}
    used = re.findall(r'(?:include|from) "([^"]+)"', "".join(templates.values()))
    assert {name for name in templates if name not in ("report.html.j2", "stages.html.j2")} == set(used)


def test_vendored_code_is_whole_named_and_licensed():
    vendor = PACKAGE / "vendor"
    readme = (vendor / "README.md").read_text()
    for name in VENDOR:
        text = (vendor / name).read_text()
        assert name in readme and "</script" not in text.lower() and "sourceMappingURL" not in text
        licence = (vendor / f"{name.split('.')[0]}.LICENSE").read_text()
        assert "Permission is hereby granted, free of charge" in licence
    assert 'version="3.34.4"' in (vendor / "cytoscape.min.js").read_text() and "3.34.4" in readme
    assert "3.1.1" in readme and '"3.1.1"' in (vendor / "dagre.min.js").read_text()


def test_the_command_writes_a_file_and_says_its_size(folder, tmp_path):
    file = tmp_path / "report.html"
    kernels = tmp_path / "k.json"
    kernels.write_text(json.dumps(kernel_document("another")))
    done = call(folder, "-o", file, "--kernels", kernels, "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["bytes"] == file.stat().st_size < 5e6 and told["counts"]["layers"] == 10
    text = file.read_text()
    assert "k&lt;ernel&gt;" in text and "These times are of another, and this run is of stack." in text
    again = call(folder, "-o", file)
    assert again.exit_code == 0 and "MB, stack" in again.stdout and "None was measured" in file.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.json", "report.html"]


def test_help_needs_no_torch():
    imports = "import sys\nfrom graft.cli.inspect.report import report\n"
    code = imports + "assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def broken(tmp_path, folder, what):
    other = tmp_path / "run"
    shutil.copytree(folder, other)
    manifest = json.loads((other / MANIFEST).read_text())
    if what == "format":
        (other / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    elif what == "report":
        (other / REPORT).write_text("{")
    elif what == "graph":
        (other / f"{manifest['steps'][0]}.json").write_text("{")
    return other


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("format", "has format 99 with graphs of format"),
        ("report", "report.json is damaged"),
        ("graph", "the dump is not JSON (truncated?)"),
    ],
)
def test_a_run_of_another_version_or_a_damaged_one_is_refused(tmp_path, folder, what, told):
    file = tmp_path / "report.html"
    done = call(broken(tmp_path, folder, what), "-o", file)
    assert done.exit_code == 1 and told in done.stderr and "Traceback" not in done.stderr and not file.exists()


def test_what_is_no_run_or_no_place_to_write_is_told_in_a_line(tmp_path, folder):
    for args, told in (
        ((tmp_path / "nowhere",), "is not a folder; graft dump MODEL -o DIR"),
        ((tmp_path,), "is no folder of dumps; graft dump MODEL -o DIR"),
        ((folder, "-o", tmp_path), "is a folder; name a file"),
        ((folder, "-o", tmp_path / "no" / "report.html"), "does not exist; make the folder first"),
        ((folder, "-o", Path("/proc/report.html")), "cannot write /proc/report.html"),
        ((folder, "-o", tmp_path / "r.html", "--kernels", tmp_path / "k.json"), "cannot read"),
    ):
        done = call(*args)
        assert done.exit_code == 1 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert call(folder, "--plugin", "no_such_module").exit_code == 2
    assert not list(tmp_path.iterdir())


def test_an_old_report_stays_when_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    file = tmp_path / "report.html"
    write_page(file, "old")

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskFull, match="nothing was left behind"):
        write_page(file, "new")

    def interrupted(self, data):
        self.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_page(file, "new")
    assert file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_half_a_surrogate_pair_shows_as_its_code(tmp_path):
    write_page(tmp_path / "report.html", "a\ud800b")
    assert (tmp_path / "report.html").read_text() == "a\\ud800b"


@pytest.mark.parametrize(("value", "text"), [(0.0123, "12 ms"), (0.9994, "999 ms"), (1.5, "1.50 s"), (0.0, "0 ms")])
def test_times_read_well(value, text):
    assert page_module.seconds(value) == text
