"""The stages of torch.compile by the kinds of test that PyTorch has for them: what graft offers, and our tests.

`python tests/stage_coverage.py` says what differs from docs/stage_coverage.md; `--write` updates it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "stage_coverage.md"
NONE = "—"


@dataclass(frozen=True)
class Covered:
    """theirs: files of PyTorch's test/. offers: names of graft.testing, or commands. tests: files of ours.

    gap: what graft does not do there; without any offer it says why.
    """

    stage: int
    kind: str
    theirs: tuple[str, ...]
    offers: tuple[str, ...]
    tests: tuple[str, ...]
    gap: str = ""


KIT, STAGES = "tests/unit/testing/test_testing_kit_stages.py", "tests/unit/workbench/test_stage_lab.py"
LAUNCHES, KERNEL = "tests/unit/stages/test_launches.py", "tests/unit/workbench/test_repro_kernel.py"
BUCKETS, GPU = "tests/unit/stages/test_buckets.py", "tests/gpu/test_stages_on_gpu.py"
AUTOTUNE, CUDAGRAPHS = "tests/unit/stages/test_autotune.py", "tests/unit/stages/test_cudagraphs.py"
APART = "tests/unit/workbench/test_stage_apart.py"
PARITY, FRESH = "tests/unit/api/test_op_parity.py", "tests/unit/workbench/test_stage_fresh.py"
STORY, COMPILED = "tests/unit/stages/test_story.py", "tests/unit/testing/test_testing_kit_compiled.py"
TABLE = (
    Covered(
        1, "capture and guards", ("dynamo/test_misc.py", "dynamo/test_guard_manager.py"),
        ("assert_no_graph_breaks", "assert_no_recompiles", "graft stages ask breaks", "graft stages ask recompiles"),
        (STORY, STAGES, KIT, COMPILED), "guards that compare several values (aliasing) have no time of their own",
    ),
    Covered(
        1, "control flow", ("inductor/test_control_flow.py",), ("graft stages TARGET",), ("tests/peers",),
        "inner graphs are in the text of a graph; nodes inside are not followed",
    ),
    Covered(
        1, "compiled autograd", ("inductor/test_compiled_autograd.py",), (), (),
        "graft compiles for inference; stories run without gradients",
    ),
    Covered(
        2, "functionalization and auto_functionalize", ("functorch/test_aotdispatch.py",
        "inductor/test_auto_functionalize.py"), ("assert_no_copies", "graft stages ask copies"), (STORY, KIT, STAGES),
    ),
    Covered(
        2, "operator database", ("inductor/test_torchinductor_opinfo.py",), ("assert_compiled_like_eager", "matrix"),
        (KIT, "tests/peers", PARITY), "through Inductor tests see every 24th entry; tests/op_parity.py runs all",
    ),
    Covered(
        3, "pattern matcher", ("inductor/test_pattern_matcher.py",), ("assert_fuses", "assert_not_fuses",
        "post_grad_graph"), ("tests/unit/testing/test_testing_kit.py", COMPILED),
    ),
    Covered(
        3, "group-batch and custom passes", ("inductor/test_group_batch_fusion.py",
        "inductor/test_custom_post_grad_passes.py"), ("post_grad_graph", "graft stages TARGET --stage 3"),
        (COMPILED, STORY), "group-batch fusion has no helper of its own; its passes are listed as all are",
    ),
    Covered(
        4, "scheduler and fusion", ("inductor/test_inductor_scheduler.py", "inductor/test_perf.py"),
        ("assert_fused_together", "assert_kernel_count", "graft stages ask fusion"), (KIT, STAGES, STORY),
        "rules of a code generator that give no reason are told as such",
    ),
    Covered(
        4, "loop ordering", ("inductor/test_loop_ordering.py",), ("assert_kernel_count", "assert_fused_together"),
        (KIT,), "orders of loops are not shown, what was fused by them is",
    ),
    Covered(
        5, "code generation", ("inductor/test_torchinductor.py", "inductor/test_cpu_repro.py"),
        ("generated_kernels", "assert_kernel_count", "assert_compiled_like_eager", "graft stages ask kernel",
        "graft stages TARGET --values", "graft stages TARGET --index-asserts", "graft repro DIR --kernel NAME"),
        (COMPILED, KIT, STAGES, STORY, LAUNCHES, APART, KERNEL, GPU),
        "registers and spills are read off Triton's launchers, which only a GPU has",
    ),
    Covered(
        5, "max-autotune and templates", ("inductor/test_max_autotune.py", "inductor/test_cpu_select_algorithm.py"),
        ("autotune_choices", "graft stages TARGET --mode max-autotune"), (KIT, AUTOTUNE, GPU),
        "what Inductor prunes before it times anything is not shown",
    ),
    Covered(
        6, "CUDA graph trees", ("inductor/test_cudagraph_trees.py",), ("assert_cudagraphed",
        "graft stages ask cudagraph", "graft stages TARGET --buckets SIZES"), (KIT, STAGES, CUDAGRAPHS, BUCKETS, GPU),
        "which graph follows which in a tree is not shown",
    ),
    Covered(
        6, "streams", ("dynamo/test_streams.py",), ("graft stages TARGET --stage 6",), (CUDAGRAPHS, GPU),
        "streams are counted, and those that Inductor does not keep; events and waits between them are not shown",
    ),
    Covered(
        6, "collectives", ("distributed/test_inductor_collectives.py",), ("graft stages TARGET --stage 6",), (STORY,),
        "collectives are listed by name, without a test of several processes",
    ),
    Covered(
        7, "code caches", ("inductor/test_codecache.py", "dynamo/test_aot_autograd_cache.py"),
        ("cache_round_trip", "graft stages ask cache", "graft stages TARGET --fresh"),
        (COMPILED, STAGES, STORY, FRESH),
    ),
    Covered(
        7, "AOTInductor", ("inductor/test_aot_inductor.py",), ("graft export TARGET --aoti",),
        ("tests/unit/workbench/test_export_aoti.py", "tests/unit/api/test_aot_inductor.py"),
        "stories show torch.compile, not the making of packages",
    ),
)  # fmt: skip

HEAD = """# Stages and tests

Generated by `python tests/stage_coverage.py --write`. For each kind of test that PyTorch's own suite has: what graft
offers to test the same on your code (`graft.testing`, [graft stages](stages.md)), where graft tests that itself, and
what is missing.

| stage | kind | PyTorch's `test/` | graft offers | our tests | missing |
|---|---|---|---|---|---|
"""


def page() -> str:
    return HEAD + "".join(map(row, TABLE))


def row(one: Covered) -> str:
    cells = (
        str(one.stage),
        one.kind,
        code(one.theirs),
        code(one.offers),
        code(test.removeprefix("tests/") for test in one.tests),
        one.gap or NONE,
    )
    return f"| {' | '.join(cells)} |\n"


def code(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names) or NONE  # type: ignore[attr-defined]


def main() -> int:
    if "--write" in sys.argv:
        PAGE.write_text(page())
    same = PAGE.is_file() and PAGE.read_text() == page()
    print("docs/stage_coverage.md is up to date" if same else "run: python tests/stage_coverage.py --write")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
