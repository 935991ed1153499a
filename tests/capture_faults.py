"""Faults for tests/mutation.py in captures and in what tells one from another."""

from __future__ import annotations

from fault import fault

CAPTURE_FAULTS = [
    fault(
        "capture/static_cache.py",
        "if not any(is_empty(layer) for cache in caches",
        "if any(is_empty(layer) for cache in caches",
        "unit/capture/test_encoder_decoder_cache.py"
        "::test_an_object_of_another_model_and_a_cache_without_tensors_together",
    ),
    fault(
        "ir/program/generators.py",
        "if found is not None:\n        raise",
        "if False:\n        raise",
        "unit/capture/test_generators.py",
    ),
    fault(
        "ir/program/gradient_flags.py",
        "and not torch.is_grad_enabled() and",
        "and",
        "unit/api/test_gradients.py::test_gradients_that_a_program_takes_itself_are_traced_without_a_word",
    ),
    fault(
        "ir/program/frames.py",
        'if name == "forward" and file.startswith(GENERATED):',
        "if False:",
        "unit/ir/test_frames.py::test_nodes_of_branches_and_bodies_have_the_lines_of_the_program",
    ),
    fault(
        "ops/cached_attention/triton.py",
        "splits = None if few_variants else LONG_SPLITS",
        "splits = None",
        "unit/ops/test_cached_attention.py",
    ),
    fault(
        "ir/canonical/normal_form.py",
        "drop_dead(gm, captured=True)",
        "drop_dead(gm)",
        "unit/capture/test_generators.py::test_samples_that_nothing_reads_advance_the_generator",
    ),
    fault(
        "ir/program/assignments.py",
        "twins.get(id(b)) is n",
        "True",
        "unit/api/test_programs.py::test_a_list_that_gets_other_tensors_is_refused",
    ),
    fault(
        "api/gradients.py",
        "        table.clear()\n",
        "        pass\n",
        "unit/api/test_gradients.py::test_a_hook_on_a_parameter_runs_once",
    ),
    fault(
        "memory/uninitialised.py",
        " or next(made_inside(gm, node), None)",
        "",
        "unit/memory/test_uninitialised.py::test_memory_that_a_branch_gives_back",
    ),
    fault(
        "capture/fingerprint.py",
        "{tensor.stride()} {tensor.dtype} {tensor.device}",
        "{tensor.stride()} {tensor.device}",
        "unit/capture/test_capture_cache.py::test_another_model_is_another_fingerprint",
    ),
    fault(
        "capture/cache.py",
        "if not header(key, text).items() <= json.loads(head).items():",
        "if not header(key, text).keys() <= json.loads(head).keys():",
        "unit/capture/test_capture_cache.py::test_a_file_of_another_model_under_its_name_is_not_used",
    ),
    fault(
        "engine/artifact/key.py",
        "{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_dev}",
        "{found.st_size} {found.st_mtime_ns} {found.st_dev}",
        "unit/engine/test_kept_engines.py::test_every_change_is_another_engine",
    ),
    fault(
        "capture/layer_entries.py",
        '"storage": numbers.get(number, number)',
        '"storage": number',
        "unit/capture/test_layers_once.py::test_a_layer_that_is_not_like_the_others_is_captured",
    ),
    fault(
        "capture/layers_once.py",
        "    if problems:\n",
        "    if not problems:\n",
        "unit/capture/test_layers_once.py::test_a_program_that_computes_with_the_number_of_a_layer_is_captured_whole",
    ),
    fault(
        "capture/attention.py",
        "    if dropout:\n",
        "    if dropout > 1:\n",
        "unit/capture/test_capture.py::test_dropout_and_disagreeing_windows_are_errors",
    ),
    fault(
        "ir/io/values.py",
        'if [stored_size(s) for s in whole.stride()] != entry["stride"]:',
        "if whole is None:",
        "unit/ir/test_symbols.py::test_layouts_of_open_sizes_come_back",
    ),
    fault(
        "capture/code.py",
        "own_code_text(function.__code__),",
        "own_code_text(function.__code__)[:0],",
        "unit/capture/test_capture_cache.py::test_other_code_is_another_fingerprint",
    ),
    fault(
        "ir/verify.py",
        'f"{path}.{leaf}" if path else leaf for leaf',
        "leaf for leaf",
        "unit/ir/test_edit.py::test_a_snapshot_brings_dropped_buffers_back_as_they_were",
    ),
]
