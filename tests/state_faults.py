"""Faults in the states of recurrent layers: their slots, what is new, and what is accounted for."""

from __future__ import annotations

from fault import fault

STATE_FAULTS = [
    fault(
        "ops/packed_states.py",
        "known = seq_lens > cu_seqlens.diff()",
        "known = seq_lens > 0",
        "unit/ops/test_stateful_ops.py::test_new_sequences_hold_zeros_whatever_is_in_their_slot",
        "unit/engine/test_recurrent_layers.py::test_requests_that_come_late_and_those_that_are_given_up",
    ),
    fault(
        "ops/stateful_causal_conv/reference.py",
        "place = brought - held.shape[2] + kept ",
        "place = brought - held.shape[2] - 1 + kept ",
        "unit/ops/test_stateful_ops.py::test_chunks_give_what_the_whole_sequence_gives",
    ),
    fault(
        "ops/stateful_delta_rule/reference.py",
        "    state.index_copy_(0, state_slots, held)\n    return out\n\n\ndef wide",
        "    return out\n\n\ndef wide",
        "unit/ops/test_stateful_ops.py::test_all_kernels_write_the_same_states",
    ),
    fault(
        "engine/scheduler.py",
        "self.states.give_back(request.state_slot)",
        "pass",
        "unit/engine/test_recurrent_layers.py::test_tokens_equal_hugging_face_in_chunks_of_any_size",
    ),
    fault(
        "ops/stateful_causal_conv/triton.py",
        "mask=inside & (source < first)[None, :] & known, other=0.0)",
        "mask=inside & (source < first)[None, :], other=0.0)",
        "unit/ops/test_stateful_ops.py::test_our_kernels_go_on_from_what_each_sequence_holds",
    ),
    fault(
        "ops/stateful_causal_conv/triton.py",
        "range(first + part * TOKENS, last,",
        "range(first, last,",
        "unit/ops/test_stateful_ops.py::test_a_part_of_a_prompt_is_one_program_s",
    ),
    fault(
        "ops/stateful_causal_conv/triton.py",
        "    if part == 0:\n",
        "    if part >= 0:\n",
        "unit/ops/test_stateful_ops.py::test_our_kernels_go_on_from_what_each_sequence_holds",
    ),
    fault(
        "ops/causal_conv/triton.py",
        "seen = tl.where(fed, seen, older.to(x.dtype.element_ty).to(tl.float32))",
        "seen = tl.where(fed, seen, 0.0)",
        "unit/ops/test_stateful_ops.py::test_our_kernels_go_on_from_what_each_sequence_holds",
    ),
    fault(
        "ops/stateful_delta_rule/triton.py",
        "mixed = tl.load(place, mask=inside & known, other=0.0)",
        "mixed = tl.load(place, mask=inside, other=0.0)",
        "unit/ops/test_stateful_ops.py::test_our_kernels_go_on_from_what_each_sequence_holds",
    ),
    fault(
        "ops/stateful_delta_rule/triton.py",
        "for token in range(first, last):",
        "for token in range(first, first + 1):",
        "unit/ops/test_stateful_ops.py::test_our_kernels_go_on_from_what_each_sequence_holds",
    ),
    # ── a step ahead of the host ────────────────────────────────────────────────────────────────────────────────
    fault(
        "engine/decode/loop.py",
        "            self.scheduler.preempt(one.request)\n",
        "            pass\n",
        "unit/engine/test_recurrent_decode_loop.py::test_a_nucleus_that_gets_wide_in_the_middle_is_computed_again",
    ),
    fault(
        "engine/decode/loop.py",
        "slot.command_array[2] = self.buffers.nobody",
        "slot.command_array[2] = 0",
        "unit/engine/test_recurrent_decode_loop.py::test_rows_that_end_leave_the_slot_that_another_has_by_then",
    ),
    fault(
        "engine/decode/buffers.py",
        "state[STATE_SLOTS] = self.nobody",
        "state[STATE_SLOTS] = 0",
        "unit/engine/test_recurrent_decode_loop.py::test_rows_that_end_leave_the_slot_that_another_has_by_then",
    ),
    fault(
        "engine/engine.py",
        "if request.table is not None and request not in grown:",
        "if request.table is not None and request not in grown and self.states is None:",
        "unit/engine/test_recurrent_decode_loop.py::test_a_step_that_fails_is_computed_again",
    ),
    fault(
        "engine/decode/loop.py",
        'if kind == "logits" or len(due) > len({one.row for one in due}):',
        'if kind == "logits":',
        "unit/engine/test_recurrent_decode_loop.py::test_samples_of_one_prompt_begin_with_its_state_alone",
    ),
    fault(
        "engine/setup/self_check.py",
        "block, count = request.table.blocks[0], request.fed",
        "block, count = request.table.blocks[0], request.computed",
        "unit/engine/test_recurrent_decode_loop.py::test_the_self_check_looks_at_the_states_of_captured_steps",
    ),
    fault(
        "capture/recurrence.py",
        "given = {where for where, tensor in self.out_of_cache if id(tensor) in convolved}",
        "given = {where for where, tensor in self.out_of_cache}",
        "unit/capture/test_recurrence.py::test_a_window_that_the_convolution_does_not_get_is_refused",
    ),
    # ── blocks in host memory ───────────────────────────────────────────────────────────────────────────────────
    fault(
        "engine/kv/host.py",
        "self.kept.popitem(last=False)",
        "self.kept.popitem(last=True)",
        "unit/engine/test_block_manager_traces.py::test_random_traces_with_host_memory_hold_the_model",
    ),
    fault(
        "engine/kv/manager.py",
        "self.moves.append(self.host.give(entry, block))",
        "self.host.give(entry, block)",
        "unit/engine/test_kv_offloading.py::test_tokens_are_those_of_an_engine_without_it",
    ),
    fault(
        "engine/kv/offload.py",
        "for kind, run in groupby(moves, type):",
        "for kind, run in groupby(sorted(moves, key=lambda move: type(move).__name__), type):",
        "unit/engine/test_kv_offloading.py::test_moves_are_made_bit_for_bit_and_in_order",
    ),
    fault(
        "engine/engine.py",
        """            if not alone:
                self.move_blocks()
""",
        "",
        "unit/engine/test_kv_offloading.py::test_decode_steps_go_ahead_while_blocks_leave",
    ),
    fault(
        "engine/decode/loop.py",
        "if commands is None or self.manager.moves:",
        "if commands is None:",
        "unit/engine/test_kv_offloading.py::test_decode_steps_go_ahead_while_blocks_leave",
    ),
]
