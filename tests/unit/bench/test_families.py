"""`graft bench --families`: which models, how large, and what becomes of a family that fails."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from graft.base.errors import UsageError
from graft.bench import families, family_process, family_turns
from graft.bench.families import FamilyPlan, in_processes, measure_families, models_of
from graft.bench.family_process import measure_family
from graft.bench.family_turns import last_line
from graft.bench.limits import roofline
from graft.bench.plan import BenchPlan
from graft.bench.sizes import layer_count, sized, weights, with_layers
from graft.cli.app import app
from graft.models.registry import entries

PLAN = FamilyPlan(("tiny-gpt2", "tiny-llama"), BenchPlan((1, 2), (8,), 4, 1, ()), device="cpu", backend="eager")


def command(*args):
    return CliRunner().invoke(app, ["bench", "--families", *args])


def one_process(seconds=60):
    ((_, said, why),) = in_processes(PLAN, ("tiny-gpt2",), seconds)
    return said, why


def test_families_stand_for_their_models():
    assert models_of(["llama"], all_sizes=True) == ("llama-3.2-1b", "llama-3.1-8b")
    assert models_of(["llama", "gpt2", "llama-3.1-8b"], all_sizes=False) == ("llama-3.2-1b", "gpt2", "llama-3.1-8b")
    assert {entries()[name].family.name for name in models_of([], all_sizes=False)} == set(families.families())
    with pytest.raises(UsageError, match="'lama' is no family and no model; did you mean"):
        models_of(["lama"], all_sizes=False)


def test_a_large_model_is_cut_to_real_layers():
    """As many as fit; weights are those of the model that is then built. One layer is left of the largest."""
    entry = entries()["llama-3.2-1b"]
    whole = sized(entry, torch.bfloat16, None)
    assert whole.is_whole and whole.bytes == weights(entry, torch.bfloat16)
    cut = sized(entry, torch.bfloat16, 1 << 30)
    assert cut.bytes == weights(cut.entry, torch.bfloat16) <= 1 << 30
    more = replace(cut.entry, settings=with_layers(cut.entry.settings, cut.layers + 1))
    assert weights(more, torch.bfloat16) > 1 << 30 and cut.of == 16
    assert cut.entry.settings["hidden_size"] == 2048
    tables = sized(entries()["command-r"], torch.bfloat16, 1 << 30)
    assert (tables.layers, tables.vocabulary, tables.entry.settings["eos_token_id"]) == (1, 32_000, 0)
    assert sized(entries()["gpt2"], torch.float32, 1 << 30).is_whole


def test_lists_of_layers_are_cut_with_them():
    cut = with_layers({"n_layer": 4, "layer_types": ["a", "b", "a", "b"], "vocab_size": 7}, 3)
    assert cut == {"n_layer": 3, "layer_types": ["a", "b", "a"], "vocab_size": 7} and layer_count(cut) == 3


def test_a_family_is_measured_in_every_batch(monkeypatch):
    monkeypatch.setattr(roofline, "cpu_buffer", lambda: 1 << 22)
    said = measure_family({**PLAN.__dict__, "bench": PLAN.bench.__dict__, "model": "tiny-gpt2"})
    rows = families.rows_of(PLAN, entries()["tiny-gpt2"], json.loads(json.dumps(said)))
    assert [(row.family, row.batch, row.layers, row.layers_of, row.backend) for row in rows] == [
        ("gpt2", 1, 2, 2, "eager"), ("gpt2", 2, 2, 2, "eager"),
    ]  # fmt: skip
    assert all(row.failed or (row.share and row.tokens_per_s) for row in rows) and all(row.built_s for row in rows)


def test_a_transform_is_turned_off_for_all_families(monkeypatch):
    """The engine of a family is built with what --set says."""
    built = []
    monkeypatch.setattr(family_process, "bench", lambda llm, *_: built.append(llm) or pytest.fail("enough"))
    sets = ("transforms.merge_qkv.enabled=false",)
    for given, found in (((), "applied"), (sets, "disabled")):
        asked = {**replace(PLAN, sets=given).__dict__, "bench": PLAN.bench.__dict__, "model": "tiny-llama"}
        with pytest.raises(pytest.fail.Exception, match="enough"):
            measure_family(asked)
        assert built[-1].report.transforms["merge_qkv"].status == found


def test_a_family_that_fails_is_a_row(monkeypatch, capfd):
    """What its process died of stands in the rows of all its batches, and the next family is measured."""
    ok = "import sys, json; asked = json.loads(sys.argv[1])"
    dies = "if asked['model'] == 'tiny-gpt2': raise ValueError('no such thing')"
    row = {"engine": "graft", "batch": 1, "roofline_percent": 50.0, "token_ms": 2.0, "decode_tokens_per_s": 500.0,
           "build_seconds": 3.5, "failed": ""}  # fmt: skip
    said = {"bench": {"setup": {"backend": "eager"}, "rows": [row]}, "layers": 2, "layers_of": 4, "weight_bytes": 9}
    monkeypatch.setattr(family_turns, "PROGRAM", f"{ok}\n{dies}\nprint({json.dumps(said)!r})")
    table = measure_families(PLAN)
    assert [(r.model, r.batch, r.failed) for r in table.rows] == [
        ("tiny-gpt2", 1, "ValueError: no such thing"), ("tiny-gpt2", 2, "ValueError: no such thing"),
        ("tiny-llama", 1, ""), ("tiny-llama", 2, "its process was interrupted"),
    ]  # fmt: skip
    assert table.rows[2].share == 0.5 and table.setup == {"backend": "eager"}


def test_a_family_that_hangs_or_dies_without_a_word_is_told(monkeypatch):
    monkeypatch.setattr(family_turns, "PROGRAM", "import time; time.sleep(600)")
    assert one_process(0.3) == (None, "not through after 0 s")
    monkeypatch.setattr(family_turns, "PROGRAM", "import time; print('built', flush=True); time.sleep(600)")
    assert one_process(2.0) == (None, "not through after 2 s")
    monkeypatch.setattr(family_turns, "PROGRAM", "import os; os._exit(9)")
    assert one_process() == (None, "its process ended with 9")


def test_caches_are_empty_and_those_of_the_user_untouched(monkeypatch):
    monkeypatch.setenv("GRAFT_NATIVE_CACHE_DIR", "/elsewhere")
    look = (
        "import os, json; print(json.dumps([os.environ['GRAFT_CACHE_DIR'], 'GRAFT_NATIVE_CACHE_DIR' in os.environ]))"
    )
    monkeypatch.setattr(family_turns, "PROGRAM", look)
    (first, own), (second, _) = (one_process()[0] for _ in range(2))
    assert first != second and not own


def test_no_family_is_begun_after_the_limit(monkeypatch):
    monkeypatch.setattr(families, "in_processes", lambda *_: pytest.fail("it was begun"))
    table = measure_families(replace(PLAN, time_limit=0.0))
    assert len(table.rows) == 4 and {(row.failed, row.begun) for row in table.rows} == {
        ("not begun: raise --time-limit", False)
    }


def test_the_limit_is_one_for_building_and_measuring(monkeypatch):
    """Each of them is ended when the time is up, whatever was left when the first was begun."""
    slow = "import sys, time; time.sleep(0.5); print('built', flush=True); sys.stdin.readline(); time.sleep(600)"
    monkeypatch.setattr(family_turns, "PROGRAM", slow)
    began = time.monotonic()
    table = measure_families(replace(PLAN, side_by_side=2, time_limit=2.0))
    assert time.monotonic() - began < 3.5 and len(table.rows) == 4
    assert all(row.begun and "not through" in row.failed for row in table.rows)


def test_ctrl_c_keeps_the_rows_that_are_there(monkeypatch):
    def play(_, models, *__):
        yield models[0], None, "it died"
        raise KeyboardInterrupt

    monkeypatch.setattr(families, "in_processes", play)
    table = measure_families(replace(PLAN, side_by_side=2))
    assert table.interrupted and [row.model for row in table.rows] == ["tiny-gpt2", "tiny-gpt2"]


WATCHED = """
import json, os, sys, time
asked = json.loads(sys.argv[1])
file = os.open(asked["device"], os.O_WRONLY | os.O_APPEND)
log = lambda what: os.write(file, f"{asked['model']} {what}\\n".encode())
log("builds")
if asked["model"] == "tiny-gpt2":
    raise SystemExit("no such thing")
print("loading ...\\nbuilt", flush=True)
sys.stdin.readline()
log("measures")
time.sleep(0.2)
log("has measured")
print(json.dumps(asked["model"]))
"""


def test_models_are_built_side_by_side_and_measured_one_after_the_other(monkeypatch, tmp_path):
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setattr(family_turns, "PROGRAM", WATCHED)
    found = list(in_processes(replace(PLAN, device=str(log)), ("a", "tiny-gpt2", "b"), 60))
    assert found == [("a", "a", ""), ("tiny-gpt2", None, "no such thing"), ("b", "b", "")]
    lines = log.read_text().splitlines()
    assert {line.split()[1] for line in lines[:3]} == {"builds"}
    assert lines[3:] == ["a measures", "a has measured", "b measures", "b has measured"]


HANGS = """
import json, os, sys, time
asked = json.loads(sys.argv[1])
print("built", flush=True)
sys.stdin.readline()
if asked["model"] == "a":
    open(asked["device"], "w").write(str(os.getpid()))
    time.sleep(600)
pid = int(open(asked["device"]).read())
try:
    os.kill(pid, 0)
    print(json.dumps("beside another"))
except ProcessLookupError:
    print(json.dumps("alone"))
"""


def test_one_that_hangs_has_ended_when_the_next_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(family_turns, "PROGRAM", HANGS)
    found = list(in_processes(replace(PLAN, device=str(tmp_path / "pid")), ("a", "b"), 2.0))
    assert found == [("a", None, "not through after 2 s"), ("b", "alone", "")]


LEAVES_A_CHILD = "import subprocess, time; subprocess.Popen(['sleep', '20']); time.sleep(600)"


@pytest.mark.exhaustive
def test_one_that_was_given_up_is_not_waited_for_again(monkeypatch):
    """A child of its own may hold its standard output open."""
    monkeypatch.setattr(family_turns, "PROGRAM", LEAVES_A_CHILD)
    began = time.monotonic()
    assert one_process(2.0) == (None, "not through after 2 s")
    assert time.monotonic() - began < 3.5


def test_a_process_whose_run_is_gone_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(family_turns, "PROGRAM", "from graft.bench.family_turns import wait_for_turn as w; w()")
    one = family_turns.start({})
    family_turns.wait_until_built([one], 60)
    one.process.stdin.close()
    assert one.process.wait(60) == 1 and "nobody waits" in one.errors.read_text()
    one.close()


def test_waves_keep_the_order():
    plan = replace(PLAN, models=("a", "b", "c"), side_by_side=2)
    assert list(families.waves(plan)) == [("a", "b"), ("c",)]


@pytest.mark.parametrize(("text", "line"), [
    ("Traceback (most recent call last):\n  File\ngraft.base.errors.UsageError: wrong\n", "UsageError: wrong"),
    ("graft: note: a b\nKilled", "Killed"),
    ("", ""),
])  # fmt: skip
def test_the_last_line_of_an_error(text, line):
    assert last_line(text) == line


def test_the_command_prints_a_table_or_json_and_fails_where_a_family_does(monkeypatch):
    failing = lambda _, models, *__: ((model, None, "ValueError: no such thing") for model in models)  # noqa: E731
    monkeypatch.setattr(families, "in_processes", failing)
    shown = command("tiny-gpt2", "--device", "cpu", "--batch", "1")
    assert (
        shown.exit_code == 1 and "failed" in shown.stdout and "tiny-gpt2: ValueError: no such thing" in shown.stdout
    )
    data = json.loads(command("tiny-gpt2", "--device", "cpu", "--json").stdout)
    assert [(row["model"], row["batch"]) for row in data["rows"]] == [("tiny-gpt2", 1), ("tiny-gpt2", 32)]


def test_side_by_side_is_for_families():
    result = CliRunner().invoke(app, ["bench", "tiny-gpt2", "--side-by-side", "2"])
    assert result.exit_code != 0 and "needs --families" in f"{result.stdout}{result.stderr}{result.exception}"


@pytest.mark.parametrize(("args", "message"), [
    (["nothing-like-it"], "is no family and no model"),
    (["gpt2", "--kernels"], "--kernels says nothing about --families"),
    (["gpt2", "--dtype", "float7"], "unknown dtype"),
    (["gpt2", "--backend", "gpu"], "backend"),
    (["gpt2", "--batch", "0"], "--batch must be at least 1"),
    (["gpt2", "--side-by-side", "0"], "--side-by-side must be at least 1"),
    (["gpt2", "--set", "transforms.no_such.enabled=false"], "no_such"),
])  # fmt: skip
def test_a_mistake_is_told_before_anything_is_built(args, message, monkeypatch):
    monkeypatch.setattr(families, "in_processes", lambda *_: pytest.fail("it was begun"))
    result = command(*args)
    assert result.exit_code != 0 and message in f"{result.stdout}{result.stderr}{result.exception}"
