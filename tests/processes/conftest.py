"""Two jobs, in which every case runs once: starting the processes is what takes long."""

from __future__ import annotations

import pytest
from tests.processes.launcher import Job, run_once

CASES = (
    "saves_and_restores",
    "orbax_reads",
    "orbax_v1_reads",
    "orbaxs_names_save_together",
    "orbaxs_names_refuse_what_they_cannot",
    "orbaxs_names_tell_of_a_failure",
    "trees_that_differ_are_refused",
    "a_failure_ends_it_for_all",
    "a_cancellation_ends_it_for_all",
    "saves_in_opposite_order_do_not_cross",
    "calls_and_keys_stay_few",
    "the_budget_is_kept",
    "every_format_can_be_written",
    "one_codec_is_chosen_for_all_parts_of_a_leaf",
    "safetensors_are_written_together",
    "handlers_write_files_of_their_own",
    "steps_and_items",
    "saves_large_arrays",
    "reads_what_its_devices_hold",
    "what_orbax_saved_from_two_is_read",
    "handlers_are_called_directly",
    "each_process_is_primary",
    "one_replica_reads",
    "two_restores_at_once_take_turns",
    "orbaxs_handler_reads_one_replica",
    "who_cannot_read_tells_all",
    "what_is_replicated_is_divided",
    "each_keeps_its_own",
    "what_is_of_one_process_is_checked",
    "what_a_base_holds_is_linked",
    "what_has_the_same_bytes_is_linked",
    "what_differs_in_a_base_is_written",
    "what_cannot_be_linked_is_written",
    "one_is_stopped_and_wakes",
    "one_dies_in_the_middle",
)
ORBAX_CASES = (
    "orbaxs_names_save_items",
    "orbaxs_items_that_differ_are_refused",
    "a_handler_fails_in_one_process",
    "orbaxs_array_options_hold_together",
    "orbaxs_manager_saves_steps",
    "orbaxs_manager_links_steps",
    "orbaxs_manager_decides_once",
    "orbaxs_emergency_manager_saves",
    "orbaxs_replicator_manager_saves",
    "orbaxs_v1_saves",
    "orbaxs_names_save_to_a_bucket",
    "orbaxs_managers_save_to_a_bucket",
    "orbaxs_parts_are_put_together",
    "a_part_is_damaged_for_one_process",
)


@pytest.fixture(
    scope="session",
    params=[(2, "asyncio"), pytest.param((4, "trio"), marks=pytest.mark.slow)],
    ids=["two", "four"],
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two processes on asyncio, or four on trio."""
    count, backend = request.param
    return run_once(tmp_path_factory, count, CASES, backend=backend)


@pytest.fixture(scope="session", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["two", "four"])
def orbax_job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two processes, or four, which save items and steps under Orbax's names."""
    return run_once(tmp_path_factory, request.param, ORBAX_CASES, about=", under Orbax's names")
