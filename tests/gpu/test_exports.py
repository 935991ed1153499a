"""graft export on a GPU: the calls of a run as torch's profiler saw them."""

from __future__ import annotations

import json

from graft.passes.config import load_config
from graft.workbench.dump import dump_model
from graft.workbench.export.write import export_run


def test_the_kernels_of_a_run_are_drawn(tmp_path):
    dump_model("tiny-llama", tmp_path / "run", load_config(), "bfloat16", weights=True)
    for step in ("captured", "merge_gate_up"):
        export_run(tmp_path / "run", "perfetto", tmp_path / "trace.json", step=step, timed=True, device="cuda")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        kernels = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
        assert len(kernels) > 20 and all(e["dur"] > 0 for e in kernels)
        assert any("timed on cuda" in str(e["args"]) for e in events if e["ph"] == "M")
