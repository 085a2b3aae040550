"""Bugs of Muon: momentum, batches of matrices, what ranks sum, owners, scales, and states."""

from tests.mutation import Mutant

LAYOUT = ("tests/buckets/test_matrix_layout.py::test_no_matrix_crosses_a_shard_boundary",)
MOMENTUM = ("tests/kernels/test_momentum.py::test_a_launch_updates_momentum_as_torchs_lerp_does",)
PACKING = ("tests/kernels/test_momentum.py::test_a_batch_holds_directions_divided_by_their_norms",)
STEP = ("tests/optimizer/test_muon_step.py::test_a_step_is_that_of_emerging_optimizers",)
SUMS = (
    "tests/optimizer/test_muon_weights.py::"
    "test_ranks_exchange_the_norms_of_all_their_matrices_at_once",
)
RANKS = ("tests/optimizer/test_muon_ranks.py::test_parts_of_matrices_move_as_the_whole_ones",)
ROWS = (
    "tests/optimizer/test_muon_weights.py::"
    "test_gate_and_up_of_routed_experts_alone_alternate_in_blocks",
)

MUTANTS = (
    Mutant(  # momentum takes gradients that are not clipped
        "kernels/momentum.py",
        "shard.momentum.lerp_(shard.gradient.float() * clip, row[1])",
        "shard.momentum.lerp_(shard.gradient.float(), row[1])",
        MOMENTUM,
    ),
    Mutant(  # momentum decays with the rate of the group that has the number of the clip factor
        "kernels/momentum.py",
        "    row, clip = hyper[shard.group], clips[shard.norm]\n    if not clip < 0:\n",
        "    row, clip = hyper[shard.norm], clips[shard.norm]\n    if not clip < 0:\n",
        MOMENTUM,
    ),
    Mutant(  # Nesterov's direction looks back at the momentum before the step
        "kernels/momentum.py",
        "    if not clip < 0:\n"
        "        shard.momentum.lerp_(shard.gradient.float() * clip, row[1])\n"
        "    direction = _direction_of(shard, slice(None), row, clip, nesterov)\n",
        "    direction = _direction_of(shard, slice(None), row, clip, nesterov)\n"
        "    if not clip < 0:\n"
        "        shard.momentum.lerp_(shard.gradient.float() * clip, row[1])\n",
        MOMENTUM,
    ),
    Mutant(  # a skipped step moves momentum
        "kernels/momentum.py",
        "    if not clip < 0:\n",
        "    if True:\n",
        ("tests/optimizer/test_muon_step.py::test_a_negative_clip_factor_changes_nothing",),
    ),
    Mutant(  # all matrices of a weight are divided by the norm of its first one
        "kernels/momentum.py",
        "norms = per_weight[:, index].sqrt()",
        "norms = per_weight[:, 0].sqrt()",
        PACKING,
    ),
    Mutant(  # value, key and query in the rows of query, key and value
        "kernels/matrices.py",
        "first=end - span,",
        "first=stride - end,",
        ("tests/kernels/test_matrices.py::test_query_key_and_value_are_megatrons_split",),
    ),
    Mutant(  # blocks of gate and up are halves
        "optimizer/muon.py",
        "interleave = model.moe_mlp_glu_interleave_size if is_expert else None",
        "interleave = None",
        ROWS,
    ),
    Mutant(  # experts are put together from the ranks that cut dense weights
        "optimizer/muon.py",
        "group = groups.expt_tp if is_expert else groups.tp",
        "group = groups.tp",
        (
            "tests/optimizer/test_muon_weights.py::"
            "test_ranks_of_experts_cut_routed_experts_and_the_others_all_else",
        ),
    ),
    Mutant(  # keys and values have the scale of queries
        "optimizer/muon_step.py",
        "scale_of(weight, batch.rows or 0, self.settings)",
        "scale_of(weight, 0, self.settings)",
        STEP,
    ),
    Mutant(  # of weights that hold several matrices the last norms are not summed
        "optimizer/muon_step.py",
        "sum(one.count * len(one.matrix.rows) for one in members)",
        "sum(one.count for one in members)",
        SUMS,
    ),
    Mutant(  # every rank keeps the result of the first one's part
        "optimizer/muon_step.py",
        "weight.group.rank() * size, size)",
        "0, size)",
        RANKS,
    ),
    Mutant(  # masters move at the rate of the group that has the number of the clip factor
        "kernels/adam_state.py",
        "            group=self.group,\n",
        "            group=self.norm,\n",
        STEP,
    ),
    Mutant(  # the third tensor in the workspace lies in the second
        "kernels/cutting.py",
        "self._end = round_up(start + nbytes, self._alignment)",
        "self._end = round_up(nbytes, self._alignment)",
        STEP,
    ),
    Mutant(  # masters are encoded before they are stepped
        "optimizer/muon_step.py",
        "        calls += [chunk.launch for chunk in chunks]\n"
        "        calls += updates.finish.calls\n",
        "        calls += updates.finish.calls\n"
        "        calls += [chunk.launch for chunk in chunks]\n",
        (
            "tests/optimizer/test_muon_step.py::"
            "test_quantized_weights_come_from_the_stepped_masters",
        ),
    ),
    Mutant(  # masters decay after the update
        "formats/reference/muon.py",
        "    p = master if minus_decay == 0 else fma(minus_decay, master, master)\n"
        "    update = direction.float() * scale * extra\n"
        "    master.copy_(fma(minus_lr, update, p))\n",
        "    p = fma(minus_lr, direction.float() * scale * extra, master)\n"
        "    master.copy_(p if minus_decay == 0 else fma(minus_decay, p, p))\n",
        ("tests/formats/reference/test_muon.py::test_the_update_is_addition_of_torch",),
    ),
    Mutant(  # a weight goes on past the end of a shard, whatever is cut there
        "buckets/matrix_layout.py",
        "return None if crosses_another and shard_numel % weight.matrix_numel else start",
        "return start",
        LAYOUT,
    ),
    Mutant(  # matrices share a buffer with what Adam steps
        "buckets/matrix_buffers.py",
        "        tag_matrices(params)\n    groups:",
        "        pass\n    groups:",
        (
            "tests/buckets/test_matrix_buffers.py::"
            "test_buffers_are_apart_where_muon_is_installed[muon]",
        ),
    ),
    Mutant(  # masters of stock's layer-wise optimizer are looked for, and momentum is not
        "checkpoint/loading.py",
        "        request.key = found.get((kind, name), request.key)\n",
        "        if kind == MASTER:\n            request.key = found[kind, name]\n",
        (
            "tests/checkpoint/test_muon_keys.py::"
            "test_masters_and_momentum_are_requested_as_they_were_saved",
        ),
    ),
    Mutant(  # Muon goes on from states of Adam
        "checkpoint/state_manifest.py",
        "or (is_muon and not has_matrices):",
        "or is_muon:",
        ("tests/checkpoint/test_state_kinds.py::test_states_of_the_other_optimizer_are_refused",),
    ),
)
