"""Faults for tests/mutation.py in what parts do together: no test of one part alone would see these."""

from __future__ import annotations

from fault import fault

JOINT_FAULTS = [
    fault(  # the bias of a layer that is split by columns, of the one family that has such
        "passes/library/shard/writing.py",
        "return self.reduced(node, partial, bias)",
        "return self.reduced(node, partial, None)",
        "unit/passes/library/test_shard_tensor_parallel.py::test_the_ranks_together_give_what_one_gives",
    ),
    fault(  # norms over all heads, which are on all ranks
        "passes/library/shard/writing.py",
        "(total, split.size * self.world)",
        "(total, split.size)",
        "unit/passes/library/test_shard_tensor_parallel.py::test_the_ranks_together_give_what_one_gives",
    ),
    fault(  # a decoder, traced by Dynamo down to Inductor's graph
        "workbench/post_grad.py",
        "InductorSettings(observer=recorder.key)",
        "InductorSettings()",
        "unit/api/test_fix_functionalization.py::test_explain_shows_it_on_a_model",
    ),
    fault(  # an option of the command line, a model, and every match run beside what it replaced
        "cli/inspect/explain.py",
        '*(["verify=matches"] if verify else [])',
        "*([] if verify else [])",
        "e2e/test_cli.py::test_explain_tells_matches_and_reasons",
    ),
    fault(
        "workbench/check/baseline.py",
        'BAD = ("match loss", "metadata loss", "numeric drift not acceptable")',
        'BAD = ("match loss", "numeric drift not acceptable")',
        "unit/workbench/test_check_baseline.py::test_metadata_loss",
    ),
    fault(  # a command in a process of its own
        "mcp/runner.py",
        "code = -1 if late else process.returncode or 0",
        "code = 0 if late else process.returncode or 0",
        "unit/mcp/test_mcp.py::test_errors_and_limits_are_answers",
    ),
    fault(  # a server in a process of its own, and the engine in this one
        "serve/protocol/requests.py",
        "if echo and logprobs is not None and (params.prompt_logprobs or 0) <= logprobs:",
        "if echo and logprobs is not None and (params.prompt_logprobs or 0) < logprobs - 9:",
        "e2e/test_serve.py::test_prompts_are_as_likely_as_in_process",
    ),
    fault(  # scales of the cache: one case of those of the plain cache
        "ops/rope_kv_write/triton.py",
        "scales = larger(larger(scales_for(first), scales_for(second)), scales_for(tail))",
        "scales = larger(scales_for(first), scales_for(second))",
        "unit/ops/test_float8_cache.py",
    ),
    fault(
        "stages/kernels.py",
        'name.startswith(("torch.ops.", "extern_kernels.", "aten."))',
        'name.startswith(("extern_kernels.", "aten."))',
        "unit/testing/test_testing_kit_compiled.py::test_generated_kernels_and_the_ops_beside_them",
    ),
    fault(
        "bench/loads/throughput.py",
        "params = SamplingParams(max_tokens=load.osl, ignore_eos=True)",
        "params = SamplingParams(max_tokens=load.osl - 1, ignore_eos=True)",
        "unit/bench/test_throughput.py::test_every_request_gets_all_of_its_tokens",
    ),
    fault(  # convolutions and recurrent state, in the one family of the short run
        "capture/cache_layers.py",
        'STATES = ("conv_states", "recurrent_states")',
        'STATES = ("recurrent_states",)',
        "unit/capture/test_encoder_decoder_cache.py::"
        "test_layers_with_convolutions_and_recurrent_state_step_as_in_eager",
    ),
    fault(
        "cli/generate/run.py",
        'return [*(sets or ()), *(["verify=matches"] if verify else [])]',
        "return [*(sets or ())]",
        "e2e/test_cli.py::test_verify_shows_the_numeric_checks",
    ),
    fault(  # one pattern has a largest value
        "workbench/scaffold/row_texts.py",
        'TRITON_FOLD = {"sum": "tl.sum", "mean": "tl.sum", "amax": "row_max", "amin": "row_min"}',
        'TRITON_FOLD = {"sum": "tl.sum", "mean": "tl.sum", "amax": "row_min", "amin": "row_min"}',
        "unit/workbench/test_row_kernels.py::test_triton_kernels_compute_their_pattern",
    ),
    # ── what a story says of times and CUDA graphs ──────────────────────────────────────────────────────────────
    fault(
        "workbench/stages/times.py",
        "return apart <= max(one.noise, two.noise)",
        "return True",
        "unit/workbench/test_stage_lab.py::test_a_change_that_is_less_than_noise_is_told_as_that",
    ),
    fault(  # 15 matmuls as 15 times the first
        "stages/kernel_times.py",
        "us = sum(times * one.us for times, one in shapes) / count",
        "us = first.us",
        "unit/stages/test_launches.py::test_launches_with_other_shapes_have_times_of_their_own",
    ),
    fault(  # a graph that may be recorded is not one that was
        "stages/cudagraphs.py",
        "return one if one.graph in seen.captured else",
        "return one if seen.captured else",
        "unit/stages/test_cudagraphs.py::test_a_graph_that_is_recorded_is_told_as_that_and_no_other",
    ),
    fault(  # of C++ the short run has rows with arguments of any name
        "workbench/scaffold/row_texts.py",
        'CPP_FOLD = {"sum": "row_sum"',
        'CPP_FOLD = {"sum": "row_max"',
        "unit/workbench/test_argument_names.py",
        "-k",
        "rows",
    ),
    fault(  # several names in one program
        "workbench/scaffold/row_program.py",
        'return "result" if any(name.startswith("out") for name in given) else "out"',
        'return "out"',
        "unit/workbench/test_argument_names.py",
        "-k",
        "rows",
    ),
    fault(
        "workbench/scaffold/kernel.py",
        'GIVEN = "in_{}"',
        'GIVEN = "{}"',
        "unit/workbench/test_argument_names.py",
        "-k",
        "product",
    ),
    fault(
        "backends/inductor.py",
        "config.fallback_random and any(map(is_random, all_nodes(graph)))",
        "config.fallback_random and 0",
        "unit/api/test_op_parity.py::test_what_torch_compile_does_otherwise_is_in_the_report",
    ),
    fault(
        "backends/dynamo.py",
        'f"aten::{name}" in EMPTY or may_give_seed(name)',
        "may_give_seed(name)",
        "unit/api/test_op_parity.py::test_what_torch_compile_does_otherwise_is_in_the_report",
    ),
    # ── a story in a process of its own ─────────────────────────────────────────────────────────────────────────
    fault(  # a story that is kept on the way is no whole one
        "workbench/stages/apart.py",
        "if (folder / DONE).is_file():",
        "if (folder / FILE).is_file():",
        "unit/workbench/test_stage_apart.py::test_a_program_that_ends_its_process_ends_its_story",
    ),
    fault(
        "workbench/stages/apart.py",
        "and one.graph == running]",
        "and one.graph in running]",
        "unit/workbench/test_stage_apart.py::test_indices_that_other_graphs_check_are_not_told",
    ),
    fault(  # it has inherited that the signal is held back
        "workbench/stages/apart.py",
        "        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT)\n        end_with_parent()\n",
        "        end_with_parent()\n",
        "unit/workbench/test_stage_apart.py::"
        "test_an_interrupted_command_interrupts_the_program_and_waits_for_its_end",
    ),
    fault(
        "workbench/stages/apart.py",
        "        end(child)\n",
        "        pass\n",
        "unit/workbench/test_stage_apart.py::"
        "test_an_interrupted_command_interrupts_the_program_and_waits_for_its_end",
    ),
    # ── the graphs of branches, and Dynamo ──────────────────────────────────────────────────────────────────────
    fault(
        "ir/trace.py",
        "if isinstance(inner, _LazyGraphModule):",
        "if inner is None:",
        "unit/passes/test_branches.py::test_inductor_and_torch_compile_keep_them",
    ),
]
