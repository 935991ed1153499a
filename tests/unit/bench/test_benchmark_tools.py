"""The measuring scripts: what they conclude from what they are told."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from graft.bench.limits.traffic import weight_bytes
from graft.models.load import load_model

FOLDER = Path(__file__).parents[3] / "benchmarks"


@cache
def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# ── sanitizer ────────────────────────────────────────────────────────────────────────────────────────────────────

CLEAN = "ran rope: triton 5\nran linear: no Triton kernel\ncalls: 5\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("code", "said", "clean"),
    [
        (0, CLEAN, True),
        (0, CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors)"), True),
        (9, CLEAN.replace("0 errors", "3 errors"), False),
        (0, CLEAN.replace("0 errors", "10 errors"), False),
        (1, CLEAN, False),  # the process itself failed
        (0, "ran rope: triton 5\n", False),  # the tool said nothing
        (0, CLEAN.replace("triton 5", "triton 5, split 0"), False),  # a kernel that no case reaches
        (124, CLEAN, False),
    ],
)
def test_a_run_is_clean_only_if_the_tool_says_so(code, said, clean):
    found, lines = script("sanitize").summary("memcheck", code, said, 1.0)
    assert found == clean and lines[0].startswith("memcheck: clean" if clean else "memcheck: NOT clean")
    assert "ran rope: triton 5" in lines[1]


def test_the_log_keeps_what_killed_the_process_and_stays_short():
    said = "\n".join(f"line {i}" for i in range(500))
    _, lines = script("sanitize").summary("memcheck", 1, said, 1.0)
    assert lines[-2] == "line 499" and len(lines) < 60


def test_a_command_that_takes_too_long_is_told():
    command = [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(60)"]
    code, said = script("sanitize").check("racecheck", command, 2.0)
    assert code == 124 and "began" in said and "time is up" in said


@pytest.mark.skipif(script("sanitize").find_tool(None) is not None, reason="compute-sanitizer is on this machine")
def test_without_the_tool_it_says_so():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "sanitize.py")], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "compute-sanitizer is not on this machine" in done.stderr


# ── fusions on and off ───────────────────────────────────────────────────────────────────────────────────────────


def test_savings_are_medians_against_all_on_a_layer():
    tool = script("decode_fusions")
    found = tool.variants(["fuse_rope"])
    assert [(v.name, v.off) for v in found] == [
        ("all on", ()), ("without fuse_rope", ("fuse_rope",)), ("all off", ("fuse_rope",))
    ]  # fmt: skip
    found[0].step_ms, found[1].step_ms = {8: [1.0, 9.0, 1.0]}, {8: [1.4, 1.2, 1.4]}
    found[2].failed = "RuntimeError: no memory"
    on, off, dead = tool.rows_of(found, [8], layers=16)
    assert on["saved_us_a_layer"] == 0 and off["saved_us_a_layer"] == pytest.approx(400 / 16)
    assert dead["failed"] and "step_ms" not in dead
    assert [v.name for v in tool.variants([])] == ["all on"], "nothing is known yet"


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_quantized_bounds_count_weights_and_scales():
    tool = script("roofline_bounds")
    assert tool.quantized(10, 256, "int4") == 10 * 128 + 2 * 10 * 2 and tool.quantized(10, 256, "int8") == 2600
    module = load_model("tiny-llama", dtype="bfloat16", device="meta").module
    assert tool.bytes_of(module, "bfloat16") == weight_bytes(module, 1)
    assert tool.bytes_of(module, "int8") < tool.bytes_of(module, "bfloat16")
    row = tool.bounds("tiny-llama", 100, 4.0)[0]
    assert row["bound_ms"] == pytest.approx((row["weight_gb"] + row["cache_gb"]) / 4.0)


# ── the native backend's targets ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def native(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))  # it takes the busy core from the script beside it
    return script("native")


def results(native, **rates):
    """One speed for each name; batch 8 where the name ends in 8."""
    found = native.Results()
    for name, (first, rate) in rates.items():
        batch = 8 if name.endswith("8") else 1
        key = name.removesuffix("8").replace("_", " ").replace("llama", "llama.cpp")
        found.speeds[key, batch] = native.Speed(key, batch, first, rate)
    return found


def test_targets_are_ratios_to_the_fastest_baseline(native):
    speeds = {"graft_bf16": (100.0, 40.0), "eager_float32": (90.0, 10.0), "eager_bfloat16": (500.0, 2.0)}
    found = results(
        native, **speeds, graft_file=(80.0, 92.0), llama=(120.0, 80.0), graft_file8=(1, 300), llama8=(1, 100)
    )
    by = {verdict.what: verdict for verdict in native.verdicts(found, 0.75, 0.3)}
    assert by["bf16 / Hugging Face eager"].measured == pytest.approx(4.0), "not 20: the faster dtype counts"
    assert by["4-bit, the file's own / llama.cpp"].measured == pytest.approx(1.15)
    assert by["4-bit, the file's own / llama.cpp, batch 8"].measured == pytest.approx(3.0)
    assert by["prefill, fastest baseline / graft bf16"].measured == pytest.approx(0.9)
    assert by["prefill, fastest baseline / graft file"].measured == pytest.approx(90 / 80)
    assert by["bf16 / Hugging Face eager"].line().endswith("met")
    assert by["bf16, rate left beside a busy core"].line().endswith("MISSED")


def test_what_could_not_be_measured_says_why(native):
    found = results(native, graft_bf16=(100.0, 40.0), eager_float32=(90.0, 10.0))
    found.missing["graft int8"] = "not run: not native from end to end: aten.mm"
    found.speeds["llama.cpp", 1] = native.Speed("llama.cpp", 1, failed="not run: llama-cpp-python is not installed")
    by = {verdict.what: verdict for verdict in native.verdicts(found, None, None)}
    assert by["int8 / Hugging Face eager"].measured is None
    assert by["int8 / Hugging Face eager"].line().endswith("graft int8: not run: not native from end to end: aten.mm")
    assert by["4-bit, the file's own / llama.cpp"].why_not == "graft file: not asked for"
    found.speeds["graft file", 1] = native.Speed("graft file", 1, 1.0, 1.0)
    why = native.verdicts(found, None, None)[3].why_not
    assert why == "llama.cpp: not run: llama-cpp-python is not installed"


def test_a_format_that_is_not_native_from_end_to_end_is_not_measured(native, monkeypatch):
    from types import SimpleNamespace

    from graft.base.errors import GraftError

    notes = ["native: 9 steps and 3 barriers", "native: eager at 2 sites: graft.fused_linear: no kernel"]
    monkeypatch.setattr(native.graft, "LLM", lambda *_, **__: SimpleNamespace(built=SimpleNamespace(notes=notes)))
    with pytest.raises(GraftError, match="not native from end to end: eager at 2 sites"):
        native.native_llm("m", {"quantize": "int8"}, 10)
    monkeypatch.setattr(
        native.graft, "LLM", lambda *_, **__: SimpleNamespace(built=SimpleNamespace(notes=[]), quantized=None)
    )
    monkeypatch.setattr(native, "load_model", lambda *_, **__: None)
    assert native.native_llm("m", None, 10).quantized is None, "floats were asked for"
    with pytest.raises(GraftError, match="came as floats"):
        native.native_llm("m", {"quantize": "int8"}, 10)


def test_what_is_left_beside_a_busy_core(native):
    hog = script("native_hog")
    assert hog.Fall("graft", 50.0, 30.0).left == pytest.approx(0.6)
    from types import SimpleNamespace

    pair = SimpleNamespace(rest=[2.0, 1.0, 9.0], failed=""), SimpleNamespace(rest=[4.0, 4.0, 5.0], failed="")
    dead = SimpleNamespace(rest=[], failed=""), SimpleNamespace(rest=[], failed="RuntimeError: x")
    (fall,) = hog.falls({"graft": pair, "other": dead}, 8)
    assert (fall.alone, fall.busy) == (4.0, 2.0) and "0.50" in fall.line()


@pytest.mark.skipif(not hasattr(__import__("os"), "sched_setaffinity"), reason="the busy process is bound to a core")
def test_the_busy_process_runs_only_when_asked_and_ends():
    hog = script("native_hog").Hog(0)
    state = lambda: Path(f"/proc/{hog.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]  # noqa: E731
    with hog.on():
        assert hog.process.poll() is None and state() != "T"
    hog.close()
    assert hog.process.poll() is not None
