"""Bugs of the optimizer: masters, what follows a load or a move, and what is refused."""

from tests.mutation import Mutant

TESTS = "tests/optimizer"
DELAYED = (
    "tests/experts/test_module_delayed_wgrad.py::"
    "test_training_without_its_delayed_gradients_is_stopped",
)
BOOK = "optimizer/address_book.py"
DISTRIBUTED = "optimizer/distributed.py"
FACTORY = "optimizer/factory.py"
HOST_STATES = "optimizer/host_states.py"
REQUIREMENTS = "optimizer/requirements.py"
RULES = "rules.py"
EXCHANGES = (
    f"{TESTS}/test_host_calls.py::"
    "test_what_was_exchanged_before_a_gather_holds_the_weights_of_the_masters",
)

MUTANTS = (
    Mutant(  # every rank takes the front of a loaded value
        DISTRIBUTED,
        "loaded.reshape(-1)[one.start : one.start + one.master.numel()]",
        "loaded.reshape(-1)[: one.master.numel()]",
        (
            f"{TESTS}/test_master_origin.py::test_each_rank_makes_masters_of_its_own_part_of_what_was_loaded",
        ),
    ),
    Mutant(  # delayed gradients of a step that was dropped count in the next
        DISTRIBUTED,
        "            linear.drop_delayed_wgrads()\n",
        "            pass\n",
        DELAYED,
    ),
    Mutant(  # a step goes on without gradients that are still delayed
        DISTRIBUTED,
        "            linear.require_wgrads_taken()\n",
        "            pass\n",
        DELAYED,
    ),
    Mutant(  # an optimizer that was replaced steps masters that nobody gathers
        DISTRIBUTED,
        "if bucket.owner is not self:",
        "if bucket.owner is None:",
        (
            "tests/buckets/test_life_cycle.py::test_an_optimizer_takes_the_place_of_the_one_before_it",
        ),
    ),
    Mutant(  # a step takes weights and masters for those that it has planned with
        BOOK,
        "if bucket.has_moved:\n",
        "if False:\n",
        EXCHANGES,
    ),
    Mutant(  # an update reads gradients that the norm no longer does
        BOOK,
        "return self._masters.generation + self._gradients.generation + states",
        "return self._masters.generation + states",
        (f"{TESTS}/test_read_anew.py::test_a_gradient_is_the_tensor_that_main_grad_is_now",),
    ),
    Mutant(  # masters that no step encodes are stepped where they were
        DISTRIBUTED,
        "return generation, bucket.plan_number, members",
        "return (members,)",
        (f"{TESTS}/test_host_calls.py::test_a_plan_is_void_once_masters_lie_elsewhere",),
    ),
    Mutant(  # Megatron's configuration is changed for everybody
        FACTORY,
        "        config = copy.copy(config)\n",
        "",
        (f"{TESTS}/test_factory.py",),
    ),
    Mutant(  # Megatron's own offloading steps beside ours
        FACTORY,
        '    "optimizer_cpu_offload",\n',
        "",
        (f"{TESTS}/test_factory.py",),
    ),
    Mutant(  # Adam is built capturable for a graph of ours
        FACTORY,
        '    "optimizer_cuda_graph",\n',
        "",
        (f"{TESTS}/test_factory.py",),
    ),
    Mutant(  # the states of a later checkpoint keep the dtype of the first
        HOST_STATES,
        "if home is None or home.on_host.dtype != values.dtype:",
        "if home is None:",
        (f"{TESTS}/test_host_states.py::test_moments_that_come_back_in_another_dtype_keep_it",),
    ),
    Mutant(  # what somebody has moved is called the host's
        HOST_STATES,
        "                if tensors[name].data_ptr() == home.on_host.data_ptr():\n",
        "                if name in tensors:\n",
        (f"{TESTS}/test_host_states.py::test_what_is_elsewhere_by_now_is_left_alone",),
    ),
    Mutant(  # a format that one rank lacks is wanted of all
        REQUIREMENTS,
        "dist.all_reduce(found, dist.ReduceOp.MAX)",
        "dist.all_reduce(found, dist.ReduceOp.MIN)",
        ("tests/integration/test_auto_format.py",),
    ),
    Mutant(  # masters in half precision are refused in bf16 alone
        RULES,
        'or dtype == "float32":',
        'or dtype != "bfloat16":',
        ("tests/test_rules.py::test_what_is_refused_is_told_by_what_the_user_has_set",),
    ),
    Mutant(  # a step that was asked for is Megatron's in its layout
        RULES,
        's.config.step == "auto" and s.config.layout == "stock"',
        's.config.layout == "stock"',
        ("tests/test_rules.py",),
    ),
    Mutant(  # quantized experts are looked for in one chunk of the model
        REQUIREMENTS,
        "for param in (param for chunk in model_chunks for param in chunk.parameters()):",
        "for param in model_chunks[0].parameters():",
        (
            f"{TESTS}/test_programmatic.py::test_all_that_a_built_model_is_refused_for_is_named_at_once",
        ),
    ),
)
