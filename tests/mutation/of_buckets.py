"""Bugs of buckets and buffers: what is gathered when, what a replay may do, what has moved."""

from tests.mutation import Mutant

TESTS = "tests/buckets"
BUCKET = "buckets/managed_bucket.py"
BUFFER = "buckets/buffer.py"
GATHER = "buckets/gather.py"
GROUP = "buckets/bucket_group.py"
OFFLOAD = "buckets/offload.py"
REPLAY = "buckets/replay.py"
STATES = "buckets/states.py"


def _mutant(file: str, old: str, new: str, killer: str) -> Mutant:
    return Mutant(file, old, new, (f"{TESTS}/{killer}",))


TWO_WRAPPERS = (
    "test_offloaded_buffers.py::test_buffers_of_a_first_wrapper_leave_the_weights_of_a_second_alone"
)
SHARED_GRADIENTS = (
    "test_bucket_group.py::"
    "test_gradients_that_others_share_or_something_scales_are_reduced_before_they_are_read"
)
LAYOUTS = (
    "test_layout.py::"
    "test_each_of_several_buckets_ends_where_it_would_alone_and_begins_where_the_last_ends"
)

MUTANTS = (
    _mutant(  # what a step has encoded is never gathered
        GROUP,
        "behind = (Weights.STALE, Weights.ENCODED)\n",
        "behind = (Weights.STALE,)\n",
        "test_bucket_group.py::test_a_gather_is_due_where_some_weights_are_behind_and_here[ENCODED]",
    ),
    _mutant(
        GROUP,
        "current = (Weights.FRESH, Weights.OFFLOADED)\n",
        "current = (Weights.FRESH,)\n",
        TWO_WRAPPERS,
    ),
    _mutant(
        GROUP,
        "is_part = len(self.per_param_grad_ready_counts) < len(self.params)",
        "is_part = len(self.per_param_grad_ready_counts) <= len(self.params)",
        "test_unmanaged_groups.py::test_a_first_pass_counts_once_it_has_reached_all_parameters",
    ),
    _mutant(
        GROUP,
        "return all(\n        bucket.param_data is not None\n",
        "return any(\n        bucket.param_data is not None\n",
        "test_bucket_group.py::"
        "test_weights_that_share_memory_with_gradients_are_not_gathered_for_a_reader",
    ),
    _mutant(
        GROUP,
        "whole = alone and bucket.gradient_scaling_factor == 1\n",
        "whole = alone\n",
        SHARED_GRADIENTS,
    ),
    _mutant(
        GROUP,
        "            and self.ddp_config.num_distributed_optimizer_instances == 1\n",
        "",
        SHARED_GRADIENTS,
    ),
    _mutant(
        GROUP,
        "return max(index[param] for param in bucket.params_list)",
        "return min(index[param] for param in bucket.params_list)",
        "test_life_cycle.py::test_dense_buckets_are_not_dragged_into_the_group_of_quantized_ones",
    ),
    _mutant(  # masters written after a step has encoded them travel as they were
        BUCKET,
        "encoded = encoded and self._master_places.count_writes() == self._master_writes\n",
        "pass\n",
        "test_managed_bucket.py::"
        "test_masters_that_are_written_after_a_step_has_encoded_them_are_encoded_anew[written]",
    ),
    _mutant(
        BUCKET,
        "        self.version = next(VERSIONS)\n        if self._has_initial:",
        "        if self._has_initial:",
        "test_managed_bucket.py::test_a_gather_brings_weights_of_another_version",
    ),
    _mutant(
        BUCKET,
        "any(map(_HAVE_MOVED, (self._master_places, *self._weight_places)))\n",
        "self._master_places.have_moved\n",
        "test_managed_bucket.py::"
        "test_a_weight_of_transformer_engine_is_written_where_it_was_given_another_tensor",
    ),
    _mutant(
        BUCKET,
        "        self._plans += 1\n",
        "",
        "test_managed_bucket.py::test_a_replay_is_refused_once_masters_were_planned_anew",
    ),
    _mutant(
        BUCKET,
        "if begins_with.weights is not leaves.weights:\n            self.version",
        "if False:\n            self.version",
        "test_managed_bucket.py::"
        "test_a_replay_brings_another_version_where_its_capture_has_gathered",
    ),
    _mutant(
        BUCKET,
        "if not all(storage.is_fresh for storage in self.storages):\n",
        "if False:\n",
        "test_managed_bucket.py::test_a_bucket_over_weights_that_are_behind_knows_it[behind]",
    ),
    _mutant(
        BUCKET,
        "if self.plan_number != plan_number or self.has_moved:\n",
        "if self.plan_number != plan_number:\n",
        "test_managed_bucket.py::test_a_replay_is_refused_once_a_master_lies_elsewhere",
    ),
    _mutant(
        BUCKET,
        "        self._has_initial = True  # weights may have been replaced\n",
        "",
        "test_managed_bucket.py::"
        "test_initial_values_that_came_with_other_tensors_are_dropped_by_the_next_gather",
    ),
    _mutant(
        OFFLOAD,
        "if not self._away and size == 0:\n",
        "if size == 0:\n",
        "test_param_data.py::test_what_it_cannot_be_asked_for_is_refused",
    ),
    _mutant(
        OFFLOAD,
        "return list({m.data_ptr(): m for one in self._storages for m in one.memories()}.values())",
        "return [m for one in self._storages for m in one.memories()]",
        "test_param_data.py::test_every_byte_leaves_and_comes_back[mxfp8]",
    ),
    _mutant(
        STATES,
        "accepted += [Weights.FRESH, Weights.ENCODED]\n",
        "accepted += [Weights.FRESH]\n",
        "test_states.py::"
        "test_weights_that_a_capture_has_gathered_may_be_gathered_or_encoded_at_its_replay[ENCODED]",
    ),
    _mutant(  # stale weights come back from the host as if they were current
        STATES,
        "_ENCODED: Weights.STALE_OFFLOADED,\n",
        "_ENCODED: Weights.OFFLOADED,\n",
        "test_states.py::test_an_event_leaves_what_the_table_says_or_is_refused[own-OFFLOAD]",
    ),
    _mutant(
        STATES,
        "if gradients is not leaves.gradients and gradients is not self.gradients:\n",
        "if gradients is not self.gradients:\n",
        "test_states.py::test_gradients_that_a_capture_has_left_alone_may_be_any_at_its_replay[ZERO]",
    ),
    _mutant(
        BUFFER,
        "first, last = first - stock_start, last - stock_start\n",
        "first, last = first, last\n",
        LAYOUTS,
    ),
    _mutant(BUFFER, "end = start + aligned_end(", "end = aligned_end(", LAYOUTS),
    _mutant(
        REPLAY,
        "if training and self.curr_iter(stage) == self.cuda_graph_warmup_steps:\n",
        "if self.curr_iter(stage) == self.cuda_graph_warmup_steps:\n",
        "test_replay.py::test_only_a_capture_of_training_gathers_anew",
    ),
    _mutant(
        REPLAY,
        "managed = [bucket for group in _groups(chunks) for bucket in group.managed]",
        "managed = [bucket for group in _groups(chunks[:1]) for bucket in group.managed]",
        "test_replay.py::test_a_replay_looks_at_the_buckets_of_all_chunks[1]",
    ),
    _mutant(
        GATHER,
        "self._is_encoded = encoded and self._table is not None\n",
        "self._is_encoded = encoded\n",
        "test_managed_bucket.py::"
        "test_masters_that_move_after_a_step_has_encoded_them_are_encoded_anew",
    ),
    _mutant(
        GATHER,
        "        for buffer in self.reduced:\n            buffer.zero_()\n",
        "        for buffer in ():\n            buffer.zero_()\n",
        "test_managed_bucket.py::test_amaxes_of_other_ranks_are_zero_before_the_maximum_over_ranks",
    ),
    _mutant(
        GATHER,
        "if self._table is None or self._table.has_moved:",
        "if self._table is None:",
        "test_managed_bucket.py::test_a_gather_makes_no_launch_over_gradient_memory_that_has_moved",
    ),
    _mutant(
        BUFFER,
        "if not any(type(hook) is GradientNote for hook in "
        "(weight._backward_hooks or {}).values()):\n",
        "if True:\n",
        TWO_WRAPPERS,
    ),
)
