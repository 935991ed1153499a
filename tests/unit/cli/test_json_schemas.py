"""Every JSON document has a schema in docs/schemas, and what the commands print follows it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from document_schemas import FOLDER, follows, schema_of
from graft.cli.app import app
from graft.cli.documents import VERSIONS, document
from graft.serve.logs import SCHEMA, ServerLog

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).parents[3]
SMALL = ("--dtype", "float32")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a dump, in which commands run."""
    folder = tmp_path_factory.mktemp("schemas")
    (folder / "app.yaml").write_text("serve: {model: smollm2-135m}\nreplicas: {min: 1, max: 2}\n")
    return folder


def run(work: Path, *words: str) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setenv("GRAFT_CACHE_DIR", str(work / "cache"))
        done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_every_document_has_a_schema_and_every_schema_a_document():
    assert {file.stem for file in FOLDER.glob("*.json")} == set(VERSIONS)
    source = "".join(file.read_text() for file in (ROOT / "src/graft/cli").rglob("*.py"))
    printed = set(re.findall(r'(?:print_json|tell|document)\(\s*"([a-z-]+)"', source))
    assert printed == set(VERSIONS) - {"serve-log"} and f"serve-log/{VERSIONS['serve-log']}" == SCHEMA
    for name, version in VERSIONS.items():
        schema = schema_of(name)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["properties"]["schema"]["const"] == f"{name}/{version}" and schema["$id"].endswith(
            f"/{version}"
        )
        assert schema["title"] and schema["description"] and "schema" in schema["required"]
        assert all(field["description"] for field in schema["properties"].values())


def test_every_command_takes_json():
    """Those of groups too; nobody has to parse text."""

    def commands(command, words=()):
        if hasattr(command, "commands"):
            for name, one in command.commands.items():
                yield from commands(one, (*words, name))
        else:
            yield " ".join(words), command

    from typer.main import get_command

    found = dict(commands(get_command(app)))
    without = [name for name, one in found.items() if not any("--json" in p.opts for p in one.params)]
    assert len(found) > 30 and not without


@pytest.mark.parametrize(
    "words",
    [
        ("models",),
        ("transforms",),
        ("ops", "rope", "--device", "cpu"),
        ("config",),
        ("skills", "list"),
        ("skills", "show", "graph-dump"),
        ("skills", "install", "installed"),
        ("deploy", "app.yaml", "--dry-run"),
        ("mcp",),
        ("new-transform", "fuse_mine", "--package", "mine"),
        ("cache", "ls"),
        ("cache", "stats"),
        ("cache", "prune", "--older", "0d", "--dry-run"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_documents_follow_their_schemas(words, work):
    if words[0] == "mcp":
        pytest.importorskip("mcp")
    assert follows(run(work, *words))


def test_documents_about_a_dump_follow_theirs(work):
    steps = [
        ("dump", "tiny-llama", "-o", "run", *SMALL),
        ("diff", "run", "-t", "fuse_rms_norm"),
        ("diff", "run", "run"),
        ("discover", "run", "--measure", "none"),
        ("search", "silu mul", "run"),
        ("repro", "run"),
        ("repro", "run", "--match", "fuse_rope:1", "-o", "repro.py"),
        ("report", "run", "-o", "report.html"),
        ("export", "run", "-f", "perfetto", "-o", "step.json"),
    ]
    names = [follows(run(work, *words)) for words in steps]
    assert names[0] == "dump" and names[-1] == "export" and len(set(names)) == 8


@pytest.mark.exhaustive
def test_documents_that_take_longer_follow_theirs(work):
    (work / "f.py").write_text(
        "import torch\n\n\ndef f(x):\n    return torch.relu(x).pow(2) * x\n\n\n"
        "def f_inputs():\n    return [(torch.randn(4, 8),)]\n"
    )
    bench = ("bench", "tiny-llama", "--batch", "1", "--prompt", "8", "--new", "8", "--against", "none", *SMALL)
    steps = [
        ("explain", "tiny-llama", "fuse_rope", *SMALL),
        ("explain", "tiny-llama", "--cost", *SMALL),
        ("explain", "tiny-llama", *SMALL),
        ("check", "fuse_rope", "--model", "tiny-llama", "--note", "note.md", *SMALL),
        ("note", "diff", "note.md", "note.md"),
        ("run", "-m", "tiny-llama", "--token-ids", "5,6", "--max-tokens", "2", "--backend", "eager", *SMALL),
        ("events", "tiny-llama", *SMALL),
        ("compile", "tiny-llama", "-o", "engine", *SMALL),
        ("cache", "export", "bundle"),
        ("cache", "import", "bundle"),
        ("compare", "tiny-llama", "--backend", "eager", *SMALL),
        ("eval", "tiny-llama", "--backend", "eager", "--tasks", "grammar", "--tokens", "40", *SMALL),
        bench,
        (*bench, "--kernels"),
        ("stages", "f.py:f", "-o", "story", "--backend", "inductor"),
        ("stages", "why", "story", "%relu"),
        ("stages", "diff", "story", "story"),
        ("stages", "ask", "breaks", "story"),
        ("report", "story", "-o", "story.html"),
        ("repro", "story"),
    ]
    for words in steps:
        assert follows(run(work, *words))


def test_a_document_that_lacks_a_field_or_has_another_kind_is_found(work):
    good = run(work, "models")
    for wrong in (
        {name: value for name, value in good.items() if name != "items"},
        good | {"items": "none"},
        good | {"schema": "models/2"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema_of("models"))


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (["explain", "tiny-lama", "fuse_rope"], "UnknownModel", 2),
        (["models", "--nonsense"], "NoSuchOption", 2),
        (["nonsense"], "UsageError", 2),
        (["stages", "ask"], "MissingParameter", 2),
        (["bench", "--batch", "x"], "UsageError", 2),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_errors_are_documents_too(words, kind, code):
    done = CliRunner().invoke(app, [*words, "--json"])
    found = json.loads(done.stdout)
    assert follows(found) == "error" and done.exit_code == code
    assert found["error"]["kind"] == kind and found["error"]["exit_code"] == code
    assert found["error"]["message"].split(":")[0] in " ".join(done.stderr.split())
    plain = CliRunner().invoke(app, words)
    assert plain.exit_code == code and plain.stdout == ""


@pytest.mark.exhaustive
def test_a_defect_is_a_document_too(tmp_path):
    """A process that dies of something nobody foresaw: its traceback on standard error, its document on the other."""
    code = (
        "import graft.workbench.skills as s\n"
        "def broken(): raise ZeroDivisionError('nobody foresaw it')\n"
        "s.all_skills = broken\nfrom graft.cli.app import main\nmain()"
    )
    words = [sys.executable, "-c", code, "skills", "list", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    found = json.loads(done.stdout)
    assert follows(found) == "error" and done.returncode == 1 and "Traceback" in done.stderr
    assert found["error"]["kind"] == "ZeroDivisionError" and found["error"]["exit_code"] == 1


def test_lines_of_a_server_s_log_follow_theirs():
    line = json.loads(ServerLog(as_json=True).line("ready", {"url": "http://127.0.0.1:8000"}))
    assert follows(line) == "serve-log" and line["event"] == "ready"


def test_lists_are_fields():
    assert document("ops", []) == {"schema": "ops/1", "items": []}
