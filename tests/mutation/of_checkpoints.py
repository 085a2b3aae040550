"""Bugs of checkpoints: checksums, checks before a load, and owners of states."""

from tests.mutation import Mutant

FILES = "tests/checkpoint"
INTEGRITY = f"{FILES}/test_integrity.py"
SESSION = f"{FILES}/test_load_session.py"
MEGATRON = "tests/checkpoint"
FROZEN = (
    "tests/commands/conversion/test_conversion.py::test_experts_that_were_frozen_in_one_layer_have_no_states_there",
)

MUTANTS = (
    Mutant(  # the first order that fits is taken for the one there is
        "checkpoint/states_without_manifest.py",
        "    if len(orders) == 1:",
        "    if orders:",
        (f"{MEGATRON}/test_journeys.py::test_states_whose_weights_fit_several_orders_are_refused",),
    ),
    Mutant(  # no checksums
        "checkpoint/saving.py",
        "*([] if folder is None else [partial(record_data, folder)]),",
        "",
        (
            f"{MEGATRON}/test_hooks.py::"
            "test_an_async_save_counts_as_incomplete_and_is_recorded_when_it_is_finalized",
        ),
    ),
    Mutant(
        "checkpoint/load_session.py",
        "    if why is not None:",
        "    if False:",
        (
            f"{MEGATRON}/test_hooks.py::test_what_would_run_code_is_refused_by_its_name_on_every_rank",
        ),
    ),
    Mutant(
        "checkpoint/saving.py",
        "if installed_config() is None and not any(states_with_manifests(sharded_state_dict)):",
        "if not any(states_with_manifests(sharded_state_dict)):",
        (f"{MEGATRON}/test_hooks.py::test_checksums_of_weights_alone_are_recorded_as_well",),
    ),
    Mutant(
        "checkpoint/load_session.py",
        '_compares = config_or_bf16().check_on_load != "quick"',
        "_compares = True",
        (f"{MEGATRON}/test_hooks.py::test_a_damaged_file_is_named_on_every_rank",),
    ),
    Mutant(
        "checkpoint/saving.py",
        "    from_first(lambda: record_checksums(folder), None)",
        "    pass",
        (f"{MEGATRON}/test_files_of_ranks.py",),
    ),
    Mutant(  # a load compares nothing
        "checkpoint/load_session.py",
        '_compares = config_or_bf16().check_on_load != "quick"',
        "_compares = False",
        (f"{SESSION}::test_damage_that_one_rank_reads_is_raised_on_every_rank",),
    ),
    Mutant(  # each rank unpickles its own .metadata
        "checkpoint/load_session.py",
        "vetted = from_first(partial(vet, folder), group)",
        "vetted = vet(folder)",
        (f"{SESSION}::test_every_rank_unpickles_the_metadata_that_the_first_one_vetted",),
    ),
    Mutant(
        "checkpoint/load_session.py",
        "if any([checkpoint_defect(other) is not None for other in newer]):",
        "if False:",
        (f"{SESSION}::test_everything_is_read_first_where_the_last_save_did_not_finish",),
    ),
    Mutant(  # everything is copied before the first byte is written
        "checkpoint/staging.py",
        "    if not _is_synchronous:\n        stock(",
        "    if True:\n        stock(",
        (f"{SESSION}::test_a_synchronous_save_holds_two_chunks_and_copies_no_master",),
    ),
    Mutant(  # an asynchronous save writes what a step has changed
        "checkpoint/staging.py",
        'entry.data.device.type == "cpu":',
        'entry.data.device.type == "cpu" and not entry.has_regular_grid:',
        (f"{FILES}/test_async_saves.py",),
    ),
    Mutant(  # ranks keep the plans of a save that failed, and not the same ones
        "checkpoint/saving.py",
        "        _forget_plans(sharded_strategy)\n",
        "        pass\n",
        (f"{FILES}/test_failed_saves.py",),
    ),
    Mutant(  # a rank that has read all of its own goes on
        "weights/partial_loads.py",
        "        if has_begun():",
        "        if False:",
        (f"{SESSION}::test_half_loaded_weights_are_neither_trained_nor_saved",),
    ),
    Mutant(  # a model that has taken a part of its state is trained
        "weights/partial_loads.py",
        "        if load.has_ended and not load.errors:",
        "        if True:",
        (
            f"{SESSION}::"
            "test_what_the_model_of_one_rank_fails_to_take_over_is_refused_on_every_rank",
        ),
    ),
    Mutant(  # the first rank fails where the others wait for it
        "checkpoint/saving.py",
        'replaced_in_writers("finish", finish),',
        'replaced_in_writers("none", finish),',
        (f"{FILES}/test_failed_saves.py",),
    ),
    Mutant(
        "checkpoint/loading.py",
        'if found == "torch":\n        expect_agreement()',
        'if found == "x":\n        expect_agreement()',
        (f"{MEGATRON}/test_files_of_ranks.py",),
    ),
    Mutant(
        "checkpoint/saving.py",
        "return any(trained & of_rank[False] for of_rank in of_ranks)",
        "return False",
        (f"{MEGATRON}/test_unusual_owners.py",),
    ),
    Mutant(  # files that are too long pass
        "checkpoint/integrity.py",
        "if end is not None and size != end:",
        "if end is not None and size < end:",
        (f"{INTEGRITY}::test_a_byte_behind_the_end_of_a_file_is_found_by_sizes_alone",),
    ),
    Mutant(
        "checkpoint/sealing.py",
        "    write_checksums(checkpoint, None)",
        "    pass",
        (
            f"{INTEGRITY}::"
            "test_files_of_ranks_count_as_incomplete_from_the_start_of_a_save_to_its_end",
        ),
    ),
    Mutant(
        "checkpoint/files/folders.py",
        "if content == {_UNFINISHED: True}:",
        "if False:",
        (
            f"{INTEGRITY}::"
            "test_files_of_ranks_count_as_incomplete_from_the_start_of_a_save_to_its_end",
        ),
    ),
    Mutant(
        "checkpoint/integrity.py",
        "if digests and digests[at : at + 8] != archive.table_checksum():",
        "if False:",
        (f"{INTEGRITY}::test_checksums_tell_a_file_from_that_of_another_checkpoint",),
    ),
    Mutant(
        "checkpoint/sealing.py",
        "for name in (CONFIG_FILE, MEGATRONS_MANIFEST, CHECKSUM_MANIFEST, COMMON_FILE):",
        "for name in (MEGATRONS_MANIFEST, CHECKSUM_MANIFEST, COMMON_FILE):",
        (f"{INTEGRITY}::test_a_checkpoint_that_is_written_over_counts_as_incomplete",),
    ),
    Mutant(
        "checkpoint/files/metadata.py",
        "    if dict.__ne__(*corners):",
        "    if False:",
        (f"{INTEGRITY}::test_chunks_pass_exactly_if_they_hold_every_element_once",),
    ),
    Mutant(
        "commands/conversion/expert_finding.py",
        'or key[state.end() :].removesuffix("router.weight") in trained',
        "or True",
        FROZEN,
    ),
    Mutant(
        "commands/conversion/conversion.py",
        "{prefix[match.end() :] for prefix, match in found.items()} & by_prefix.keys()",
        "by_prefix.keys() - found.keys()",
        FROZEN,
    ),
    Mutant(
        "checkpoint/files/pickles.py",
        "            if self._allows is not None and not self._allows(named):",
        "            if False:",
        (
            f"{FILES}/test_hostile_files.py::test_objects_that_may_run_code_are_named_where_they_are_copied",
        ),
    ),
    Mutant(
        "checkpoint/files/pickles.py",
        "if place > len(content):",
        "if False:",
        (
            f"{FILES}/test_pickles.py::"
            "test_a_far_memo_place_is_refused_for_the_readers_that_reserve_all_before_it",
        ),
    ),
    Mutant(
        "checkpoint/files/folders.py",
        'glob("mp_rank_*/*.pt")',
        'glob("mp_rank_00/*.pt")',
        (
            "tests/commands/cli/test_inspect.py::test_files_of_ranks_are_looked_at_without_being_loaded",
        ),
    ),
)
