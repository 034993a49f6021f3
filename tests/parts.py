"""Two parts of the tests: README's command runs the first, and `.ci/run` the rest after it.

The rest are the further rows of grids, and tests of 5 to 80 seconds whose faults others would
probably show first. They take as long as the first part, which alone is a thorough look; `.ci/run`
runs a sixth of them, another for other sources, and `.ci/run --whole` all.
"""

import pytest

PARTS = ("first", "rest", "all")

# Module -> test with few rows or none in the first part -> of how many rows it has the first one
# there; 0: it has none. Rows of the grids differ from their neighbours in everything.
FIRST_OF_EVERY = {
    "benchmarks/test_benchmark_cluster.py": {
        "test_schemes_and_steps_of_train_py_are_timed_in_one_process": 0,
        "test_bytes_and_times_of_an_emulated_cluster_are_those_expected": 0,
    },
    "benchmarks/test_benchmark_gpu.py": {
        "test_devices_alone_make_the_kernel_calls_of_the_mesh": 5,
    },
    "benchmarks/test_benchmark_memory.py": {
        "test_longest_sequence_is_a_multiple_of_a_fine_step": 0,
    },
    "op/test_attention_gpu_blocks.py": {
        "test_attention_on_tiles_matches_oracle": 6,
        "test_attention_on_cudnn_is_nearly_as_exact_as_one_kernel": 6,
        "test_attention_on_cudnn_matches_oracle": 5,
        "test_attention_on_cudnn_serves_narrow_dtypes": 6,
    },
    "op/test_attention_grid.py": {
        "test_attention_float32_matches_oracle": 6,
        "test_attention_narrow_dtype_is_as_exact_as_jax_nn": 4,
        "test_attention_under_every_mask_matches_oracle": 6,
        "test_attention_of_any_setting_matches_oracle": 0,
    },
    "op/test_attention_masks.py": {
        "test_short_window_skips_rounds_and_stays_exact": 4,
    },
    "op/test_attention_meshes.py": {
        "test_mesh_of_the_user": 4,
        "test_key_heads_are_replicated_and_their_gradients_summed": 3,
    },
    "op/test_attention_plugins.py": {
        "test_nnx_module_matches_flax": 2,
    },
    "op/test_attention_transforms.py": {
        "test_remat_that_saves_attention_sends_nothing_again": 0,
        "test_auto_backward_is_the_program_of_the_cheaper_mode": 3,
        "test_gradient_of_lse_alone": 2,
        "test_gradient_without_lse": 2,
    },
    "op/test_blocks.py": {
        "test_block_agrees_with_the_oracle": 4,
    },
    "op/test_blocks_cudnn.py": {
        "test_pieces_hold_every_visible_pair_once": 3,
    },
    "op/test_blocks_tiled.py": {
        "test_tiles_agree_with_the_oracle_and_go_to_kernels_where_they_can": 8,
        "test_tiled_inside_shard_map_with_each_device_at_its_own_tiles": 2,
    },
    "op/test_communication_bytes.py": {
        "test_forward_and_backward_receive_the_closed_form": 9,
        "test_forward_receives_the_closed_form": 3,
        "test_remat_repeats_attention_only_if_its_outputs_are_not_saved": 3,
    },
    "op/test_complaints.py": {
        "test_ring_flash_attention_36_both_passes_drop_the_same_entries": 0,
        "test_prime_rl_3397_sinks_are_not_dropped": 2,
    },
    "op/test_decode.py": {
        "test_decode_beyond_the_slots_sees_what_the_mask_shows": 7,
    },
    "op/test_flax_models.py": {
        "test_complete_model_matches_its_dense_self": 4,
    },
    "op/test_gradient_dtype.py": {
        "test_rounding_on_the_way_adds_no_more_than_is_stated": 7,
        "test_kept_units_give_the_same_bits": 0,
        "test_bfloat16_inputs_keep_their_own_error_beside_it": 0,
    },
    "op/test_head_chunks.py": {
        "test_parts_of_the_heads_match_the_oracle": 2,
    },
    "op/test_masks.py": {
        "test_rounds_are_left_out_just_where_no_device_sees_a_key": 5,
    },
    "op/test_scores.py": {
        "test_scores_match_the_oracle": 9,
        "test_local_takes_what_a_call_takes": 0,
    },
    "trainer/test_checkpoint.py": {
        "test_kill_in_a_save_leaves_whole_checkpoints_alone": 0,
    },
    "trainer/test_crash.py": {
        "test_killed_training_ends_as_if_undisturbed": 0,
    },
    "trainer/test_distributed.py": {
        "test_any_number_of_processes_trains_alike_and_goes_on_with_the_run_of_another": 0,
        "test_failures_end_all_processes_and_training_goes_on": 0,
        "test_process_that_is_lost_while_jax_leaves_ends_all_without_a_trace": 0,
    },
    "trainer/test_dit_drawing.py": {
        "test_images_do_not_depend_on_the_mesh_or_how_many_at_a_time": 0,
    },
    "trainer/test_dit_sample.py": {
        "test_grid_has_a_row_for_each_class": 0,
    },
    "trainer/test_dit_step.py": {
        "test_losses_do_not_depend_on_how_it_runs": 0,
        "test_text_is_divided_among_the_devices_like_the_image": 0,
        "test_weights_are_used_alike_at_every_level_of_zero": 0,
        "test_average_follows_its_equation_and_is_what_is_measured": 0,
    },
    "trainer/test_dit_train.py": {
        "test_an_interrupted_run_goes_on_on_another_mesh": 0,
        "test_damaged_image_costs_no_step_and_the_run_goes_on_with_the_flag_of_the_error": 0,
    },
    "trainer/test_divergence.py": {
        "test_loss_spike_leads_back_once_and_its_data_are_left_out": 0,
        "test_spike_before_the_first_checkpoint_leads_back_to_the_beginning": 0,
    },
    "trainer/test_footprint.py": {
        "test_gradients_of_the_compiled_step_are_exact": 4,
        "test_state_and_batch_of_a_dit_are_exact": 3,
    },
    "trainer/test_generation.py": {
        "test_draws_do_not_depend_on_the_mesh": 0,
        "test_32k_tokens_on_eight_devices_give_the_tokens_of_one": 0,
    },
    "trainer/test_gpt_sample.py": {
        "test_program_ends_with_its_reader": 0,
        "test_program_streams_until_ctrl_c": 0,
        "test_program_continues_standard_input_while_the_run_goes_on": 0,
        "test_text_does_not_depend_on_the_mesh": 0,
    },
    "trainer/test_interruption.py": {
        "test_signal_during_the_final_sample_ends_a_whole_run": 0,
    },
    "trainer/test_lora.py": {
        "test_losses_do_not_depend_on_the_mesh": 0,
        "test_export_and_samples_give_the_logits_of_the_adapters": 0,
        "test_run_goes_on_from_its_checkpoint_to_the_same_bits": 0,
        "test_adapters_are_never_exchanged": 0,
        "test_adapters_of_a_model_that_flags_changed_are_not_exported_without_it": 0,
    },
    "trainer/test_mirror.py": {
        "test_run_whose_folder_is_lost_goes_on_to_the_same_bits": 0,
    },
    "trainer/test_optimizer.py": {
        "test_losses_with_muon_do_not_depend_on_the_mesh": 0,
    },
    "trainer/test_plan.py": {
        "test_flags_to_paste_give_the_setting": 3,
        "test_pasted_commands_pass_the_checks_of_a_step": 3,
    },
    "trainer/test_planning.py": {
        "test_a_step_is_timed_on_its_mesh": 0,
    },
    "trainer/test_pretrained.py": {
        "test_two_processes_import_the_same_bits_as_one": 0,
    },
    "trainer/test_pretrained_parity.py": {
        "test_pretrained_model_computes_over_eight_devices_what_pytorch_does": 3,
        "test_pretrained_model_computes_what_pytorch_does": 5,
    },
    "trainer/test_step.py": {
        "test_gradients_are_those_of_the_dense_model": 3,
        "test_losses_do_not_depend_on_how_it_runs": 7,
        "test_bfloat16_differs_by_its_rounding_alone": 0,
        "test_other_parts_of_the_model_run_alike": 0,
        "test_losses_of_layers_that_differ_do_not_depend_on_how_it_runs": 0,
        "test_sequences_of_any_length_have_the_loss_of_one_device": 0,
        "test_program_does_not_grow_with_the_depth_of_a_pattern": 0,
    },
    "trainer/test_step_collectives.py": {
        "test_hybrid_sums_parts_over_the_other_axes": 2,
        "test_level_1_sums_after_all_parts_and_level_2_within": 0,
    },
    "trainer/test_trackers.py": {
        "test_weights_and_biases_gets_one_run_of_a_folder": 0,
        "test_mlflow_gets_one_run_of_a_folder": 0,
        "test_weights_and_biases_without_a_key_says_so_and_asks_nobody": 0,
    },
    "trainer/test_train.py": {
        "test_profile_traces_the_steps": 0,
        "test_an_interrupted_run_goes_on_as_if_nothing_had_been": 0,
    },
    "trainer/test_train_errors.py": {
        "test_token_beyond_the_vocabulary_that_training_meets_costs_no_step": 0,
        "test_disk_that_fills_up_leaves_the_last_checkpoint": 0,
        "test_sigterm_saves_and_exits_with_status_0": 0,
        "test_loss_that_is_not_finite_stops_and_can_be_skipped": 0,
    },
}


def add_option(parser):
    """Declares --part."""
    parser.addoption(
        "--part",
        choices=PARTS,
        help="the part of the tests to run (tests/parts.py); the default is all that a path, -k or "
        "-m selects, and the first part without any of them, or with -m quick alone",
    )


def settle(config):
    """Decides what runs where --part is not given. The processes of `-n 2` get the decision."""
    if config.option.part is None:
        everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        selected = config.option.keyword or config.option.markexpr not in ("", "quick")
        config.option.part = "first" if everything and not selected else "all"


def of_part(part, items):
    """The tests of a part, in their order."""
    if part == "all":
        return items
    rows, first = {}, []
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        rows[name] = rows.get(name, -1) + 1
        module, _, test = name.partition("::")
        every = FIRST_OF_EVERY.get(module, {}).get(test, 1)
        first.append(every > 0 and rows[name] % every == 0)
    return [item for item, is_first in zip(items, first, strict=True)
            if is_first == (part == "first")]  # fmt: skip
