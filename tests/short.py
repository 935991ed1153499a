"""What `make test` leaves out and `make test-all` runs: checks that repeat, on more models or in a new process, what
the short run has seen once. Whoever names files or folders, `pytest tests/unit/test_soak.py`, gets all of them.

A key is a test, its value what is kept: values of the parameters, or nothing. What names no test is an error.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

# plain; window and soft cap; no RoPE; experts; parallel block
FAMILIES = ("llama", "gemma-2", "gpt2", "qwen3-moe", "cohere")

LEFT_OUT: dict[str, tuple[str, ...]] = {
    # one of each class of cache is in the tests beside it
    "test_decoder_state::test_every_decoder_is_accounted_for": ("llama", "qwen3_next"),
    "test_decoder_state::test_what_is_not_refused_generates_as_hugging_face_does": ("gemma3_text",),
    # every family is captured, transformed and generates in test_llm
    "test_canonical::test_idempotent_on_every_family": FAMILIES,
    "test_capture::test_attention_keeps_what_the_model_gives_it": FAMILIES,
    "test_capture::test_captured_graph_equals_the_model_bit_for_bit": FAMILIES,
    "test_decode_families::test_counts_and_greedy_tokens_r22": FAMILIES,
    "test_golden_graphs::test_graph_and_report_are_the_stored_ones": tuple(
        f"{family}-{route}" for family in FAMILIES for route in ("eager", "native", "cuda")
    ),
    "test_stored_graphs::test_a_stored_graph_is_the_captured_one_r48": ("gemma-2", "qwen3-moe"),
    "test_native_families::test_greedy_tokens_are_those_of_the_eager_engine_r41": FAMILIES,
    "test_transforms::test_expected_counts_on_every_family_r9": tuple(f"{family}-float32" for family in FAMILIES),
    "test_transforms::test_transformed_graph_keeps_the_numbers": FAMILIES,
    "test_batch_invariance::test_alone_or_together_in_any_order_r42": ("llama", "gemma-2"),
    "test_batch_invariance::test_with_prefixes_from_the_cache_r42": ("llama", "gemma-2"),
    "test_fuse_attention_models::test_every_layer_of_a_decoder_r17": ("bfloat16",),
    "test_fuse_rope_into_attention::test_engine_tokens_stay_the_same_r22": ("qwen3",),
    "test_fuse_rope_into_attention::test_every_layer_that_turns_fuses_r22": ("olmo-2",),
    "test_fuse_rope_kv_write::test_every_layer_that_turns_fuses_r22": ("smollm3",),
    "test_fuse_rope_kv_write::test_engine_tokens_stay_those_of_hugging_face_r22": ("glm-4",),
    "test_fuse_moe::test_other_families_fuse_with_their_shared_experts_left_outside": (),
    "test_fuse_rope_spellings::test_whole_models_fuse_every_query_and_key_r14": (),
    "test_inductor_passes::test_fusions_on_inductors_graph_of_hugging_face_models_r24": ("llama-bfloat16",),
    "test_native_regions::test_an_op_without_a_kernel_runs_eagerly_and_is_reported_r12": ("mixtral",),
    "test_qk_norm_rope::test_queries_and_keys_of_every_layer_fuse_r15": ("qwen3-bfloat16",),
    "test_qk_norm_rope::test_engine_tokens_stay_those_of_hugging_face_r15": (),
    "test_static_cache::test_twenty_tokens_twice_as_in_eager_r38": ("inductor",),
    "test_stream_models::test_decoders_on_streams_give_the_same_tokens_r44": ("tiny-cohere",),
    "test_torch_compile::test_fusions_on_hugging_face_models_r24": ("llama-bfloat16", "gemma-2"),
    # more random programs, examples and dtypes of the same kind
    "test_functionalization::test_random_programs_r23": ("0",),
    "test_native_linear::test_nan_weight_stays_in_its_column_r22": ("bf16", "q4"),
    "test_ops::test_triton_agrees_with_the_reference": ("dtype0", "dtype2"),
    "test_soak::test_a_soak_ends_with_every_block_free_and_no_wrong_token_r40": (),
    "test_state_programs::test_programs_agree_with_eager_r28_to_r33": ("eager-torch.float32", "inductor-torch.int8"),
    "test_state_writes::test_caches_that_are_not_contiguous_r30": ("eager",),
    "test_state_writes::test_every_form_of_write_r28_r29_r30": ("module", "inductor-caller"),
    # programs of peers: each on one route and together on the others
    "test_peer_programs::test_alone": ("eager",),
    "test_peer_programs::test_alone_with_generated_code": ("custom_ops.last_row_at_a_dynamic_size",),
    "test_peer_programs::test_replayed": ("aliased_io.owned_cache", "aliased_io.one_token_by_assignment"),
    "test_peer_programs::test_together": (
        *("passes-custom_ops_0", "passes-dispatch_1", "passes-mutation_2"),
        *("dynamo-dynamic-mutation_0", "dynamo-dynamic-custom_ops_1", "inductor-dispatch_0"),
    ),
    # other formats of the embedded model
    "test_native_perplexity::test_perplexity_is_that_of_the_dequantised_model_r41": ("None",),
    "test_quantization::test_perplexity_stays_and_wrong_scales_would_show_r21": ("int4",),
    # new processes: compilers, browsers, checkouts
    "test_artifact::test_a_new_process_goes_on_from_the_saved_state_r36": ("eager",),
    "test_exports::test_the_program_loads_elsewhere_and_gives_the_same_bits_at_other_sizes_r59": ("merge_gate_up",),
    "test_inductor_passes::test_a_second_process_finds_the_graph_in_the_cache_r24": (),
    "test_new_transform_from_runs::test_an_op_of_graft_takes_the_place_of_what_it_computes_r54": (),
    "test_new_transform_from_runs::test_in_a_checkout_what_is_written_is_formatted_and_lint_free_r54": (),
    "test_new_transform_from_runs::test_novel_blocks_match_their_models_and_pass_their_tests_r54": (),
    "test_new_transform_runs::test_in_a_checkout_the_rules_of_the_code_hold_r54": (),
    "test_new_transform_runs::test_the_generated_tests_can_fail_r54": (),
    "test_report_browser::test_a_report_of_32_layers_is_small_and_opens_quietly_r56": (),
    "test_report_browser::test_every_transform_and_every_step_can_be_drawn_r56": (),
    "test_repro::test_every_match_of_a_run_is_equal_or_refused_with_its_reason_r59": (),
    "test_testing_plugin::test_the_fixture_forgets_what_was_compiled_r58": (),
    "test_write_a_transform::test_the_page_on_repro_and_exports_followed_word_for_word_r59": (),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-tests", action="store_true", help="also what tests/short.py leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not is_short(config):
        return
    keys = {item: key_of(item) for item in items}
    if stale := unmatched(list(keys.values())):
        raise pytest.UsageError(f"tests/short.py names what no test has: {', '.join(stale)}")
    items[:] = [item for item, key in keys.items() if kept(*key)]
    config.hook.pytest_deselected(items=[item for item, key in keys.items() if not kept(*key)])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if is_short(config):
        terminalreporter.write_line("the short run: `make test-all` also has what tests/short.py leaves out")


def is_short(config: pytest.Config) -> bool:
    """The run of this project without arguments."""
    whole = {config.rootpath / path for path in config.getini("testpaths")}
    asked_for = {(config.invocation_params.dir / path).resolve() for path in config.args}
    return not config.option.all_tests and not config.option.keyword and asked_for == whole


def key_of(item: pytest.Item) -> tuple[str, str]:
    """The test, and its parameters as pytest writes them: `llama-float32`."""
    name, _, parameters = item.name.partition("[")
    return f"{item.path.stem}::{name}", parameters.removesuffix("]")


def kept(key: str, parameters: str) -> bool:
    words = LEFT_OUT.get(key)
    return words is None or any(has(parameters, word) for word in words)


def has(parameters: str, word: str) -> bool:
    return re.search(rf"(^|-){re.escape(word)}(-|$)", parameters) is not None


def unmatched(keys: list[tuple[str, str]]) -> list[str]:
    """Tests that there are none of, and values that keep nothing: a renamed one would leave a test out whole."""
    found = {key: [parameters for other, parameters in keys if other == key] for key in LEFT_OUT}
    return [key for key, cases in found.items() if not cases] + [
        f"{key}[{word}]"
        for key, cases in found.items()
        for word in LEFT_OUT[key]
        if cases and not any(has(parameters, word) for parameters in cases)
    ]
