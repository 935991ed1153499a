"""The measuring scripts: what they conclude from what they are told."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from graft.models.load import load_model
from graft.workbench.traffic import weight_bytes

FOLDER = Path(__file__).parents[2] / "benchmarks"


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


# ── floors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_quantized_floors_count_weights_and_scales():
    tool = script("floors")
    assert tool.quantized(10, 256, "int4") == 10 * 128 + 2 * 10 * 2 and tool.quantized(10, 256, "int8") == 2600
    module = load_model("tiny-llama", dtype="bfloat16", device="meta").module
    assert tool.bytes_of(module, "bfloat16") == weight_bytes(module, 1)
    assert tool.bytes_of(module, "int8") < tool.bytes_of(module, "bfloat16")
    row = tool.floors("tiny-llama", 100, 4.0)[0]
    assert row["floor_ms"] == pytest.approx((row["weight_gb"] + row["cache_gb"]) / 4.0)
