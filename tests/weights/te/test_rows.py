"""The ten rows of ``test_ten_rows.py`` on Transformer Engine's modules, and through its operations.

Five ways to store and multiply experts, weight gradients accumulated by products or by autograd:
one parameter an expert and one for all are the same run to the bit, and so are evaluations in
between and none. Gradients are clipped, so that a norm is part of every step. Kernels and devices
are those of ``test_modules.py``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optim.environment import satisfies
from moe_optim.formats import get_format
from tests.support.bytes import assert_bytes_equal
from tests.weights.te import test_modules
from tests.weights.te.test_modules import OVERLAP, Run, Seen, folder_of, later, launch
from tests.weights.te.test_storage import assert_holds
from tools.upstream.engine_version import find_version

pytestmark = [
    *test_modules.pytestmark,
    pytest.mark.slow,
    pytest.mark.skipif(
        not satisfies(find_version() or "", ">=2.20"),
        reason="the op fuser's products are replaced as Transformer Engine 2.20 calls them",
    ),
]

FORMATS: Mapping[str, tuple[str, dict[str, str]]] = {  # of weights, and of products
    "bf16": ("bf16", {}),
    "bf16 in mxfp8": ("bf16", {"products": "mxfp8"}),
    "bf16 in nvfp4": ("bf16", {"products": "nvfp4"}),
    "mxfp8": ("mxfp8", {}),
    "nvfp4": ("nvfp4", {}),
}
FIRST = "mxfp8, fused"
"""The row that always runs; the others are marked extended."""
CLIPPED = ("--clip-grad", "1.0", *OVERLAP)
ONLY = ("--eval-interval", "1000000")
EXPERT = re.compile(r"(.+\.experts\.linear_fc[12]\.(?:weight|bias))(\d*)")
OVERLAPPED = ("--overlap-moe-expert-parallel-comm", "--expert-model-parallel-size", "2")


@dataclass(frozen=True)
class Option:
    """What a row is trained with beside its format."""

    experts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that experts get."""
    if_single: Mapping[str, Any] = field(default_factory=dict)
    """More of them, where one tensor has the weights of all."""
    flags: tuple[str, ...] = ()
    delays: bool = False


BIASES = {"add_bias_linear": True, "bias_dropout_fusion": False}
OPTIONS: Mapping[str, Option] = {
    "biases": Option(BIASES),
    "one bias": Option(BIASES, if_single={"moe_single_grouped_bias": True}),
    "clamped GeGLU": Option({"activation_func": "quick_gelu", "activation_func_clamp_value": 0.5}),
    "interleaved rows": Option({"moe_mlp_glu_interleave_size": 16}),
    "overlapped": Option(flags=OVERLAPPED),
    "delayed wgrad": Option(flags=OVERLAPPED, delays=True),
}

Given = Callable[..., Seen]


def row(name: str) -> Any:
    return pytest.param(name, id=name, marks=[pytest.mark.extended] * (name != FIRST))


ROWS = [row(f"{name}, {how}") for name in FORMATS for how in ("fused", "through autograd")]


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> tuple[Path, dict[str, Seen]]:
    """Return the folder of all runs, and what their ranks saw."""
    return tmp_path_factory.mktemp("rows"), {}


@pytest.fixture
def train(launched, record_property) -> Given:
    """Return what launches a run of a row, once, and returns what its ranks saw."""
    root, seen = launched

    def launch_once(
        row: str,
        *,
        single: bool = False,
        operations: bool = True,
        evaluates: bool = False,
        goes_on_from_single: bool | None = None,
        own_kernels: bool = False,
    ) -> Seen:
        chosen = {"row": row, "single": single, "operations": operations, "evaluates": evaluates}
        chosen |= {"goes_on_from_single": goes_on_from_single, "own_kernels": own_kernels}

        def named(**others: Any) -> str:
            return re.sub(r"\W+", "-", " ".join(map(str, (chosen | others).values())))

        name = named()
        if name not in seen:
            kind, how, *option = row.split(", ")
            weights, products = FORMATS[kind]
            chosen_option = OPTIONS[option[0]] if option else Option()
            experts = {
                "moe_single_grouped_weight": single,
                "use_transformer_engine_op_fuser": operations,
                "gradient_accumulation_fusion": how == "fused",
                **chosen_option.experts,
                **(chosen_option.if_single if single else {}),
            }
            flags = CLIPPED + chosen_option.flags + (() if evaluates else ONLY)
            if weights == "mxfp8":
                flags += ("--reuse-grad-buf-for-mxfp8-param-ag",)
            start = None
            if goes_on_from_single is not None:
                launch_once(row, single=goes_on_from_single, operations=operations)
                start = named(single=goes_on_from_single, goes_on_from_single=None)
            knobs = (*products.items(), ("experts", experts), ("step", "fused"))
            knobs += (("delays", chosen_option.delays), ("own_kernels", own_kernels))
            launch(root, name, Run(weights, flags, knobs, start))
            seen[name] = Seen(folder_of(root, name))
            first, *others = seen[name].ranks
            figures = {"losses": first["losses"], "norms": first["norms"]}
            record_property("run", {**chosen, "ranks": 1 + len(others), **figures})
        return seen[name]

    return launch_once


def by_expert(rank: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the master and every field of each expert."""
    found = {}
    for name, weight in rank["weights"].items():
        linear, number = EXPERT.fullmatch(name).groups()
        for expert, (master, fields) in enumerate(
            zip(weight["master"], weight["fields"], strict=True), start=int(number or 0)
        ):
            found[f"{linear}{expert} master"] = master
            found |= {f"{linear}{expert} {field}": value for field, value in fields.items()}
    return found


def assert_same(got: Seen, want: Seen, *, validated: bool = True) -> None:
    """Losses, norms, masters and everything that products read are equal on every rank."""
    for one, other in zip(got.ranks, want.ranks, strict=True):
        assert len(other["losses"]) == 4
        assert all(norm is not None and norm > 1 for norm in other["norms"].values())  # clipped
        assert one["losses"] == other["losses"]
        assert one["norms"] == other["norms"]
        if validated:
            assert one["validation_losses"] == other["validation_losses"]
        mine, theirs = by_expert(one), by_expert(other)
        assert mine.keys() == theirs.keys() != set()
        for name, value in theirs.items():
            assert_bytes_equal(mine[name].view(-1), value.view(-1), what=name)


@pytest.mark.parametrize("name", ROWS)
def test_one_tensor_of_all_experts_trains_as_one_an_expert(name: str, train: Given):
    """Through the operations, by which alone megatron-core 0.19 lets one tensor train."""
    assert_same(train(name, single=True), train(name))


DELAYED = [row(f"{name}, delayed wgrad") for name in (FIRST, "mxfp8, through autograd")]
WITH_OPTIONS = [
    row(f"{name}, {option}")
    for option in OPTIONS
    for name in (FIRST, "bf16, fused")
    if option not in ("overlapped", "delayed wgrad")
]


@pytest.mark.parametrize("name", [*WITH_OPTIONS, *DELAYED])
def test_options_train_one_tensor_as_one_an_expert(name: str, train: Given):
    """With evaluations in between, which change nothing either."""
    evaluated = train(name, single=True, evaluates=True)
    assert_same(evaluated, train(name, evaluates=True))
    assert_same(evaluated, train(name, single=True), validated=False)


@pytest.mark.parametrize("name", DELAYED)
def test_delayed_wgrad_is_added_once(name: str, train: Given):
    """By the hooks of the modules, into ``main_grad``: the run is that without delay."""
    undelayed = name.replace("delayed wgrad", "overlapped")
    assert_same(train(name, single=True), train(undelayed, single=True))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("single", [True, False], ids=["one tensor", "one an expert"])
def test_train_eval_train_equals_train_only(name: str, single: bool, train: Given):
    """MXFP8 weights with ``--reuse-grad-buf-for-mxfp8-param-ag``."""
    evaluated, only = train(name, single=single, evaluates=True), train(name, single=single)
    counts = [len(run.ranks[0]["validation_losses"]) for run in (evaluated, only)]
    assert counts[0] > counts[1]
    assert_same(evaluated, only, validated=False)  # an evaluation reads on in its data


@pytest.mark.extended
@pytest.mark.parametrize("name", [f"{kind}, fused" for kind in FORMATS])
@pytest.mark.parametrize("operations", [True, False], ids=["operations", "modules"])
def test_wgrad_through_autograd_equals_fused(name: str, operations: bool, train: Given):
    """One micro-batch a step: nothing is added to what autograd has rounded to bf16."""
    through_autograd = name.replace("fused", "through autograd")
    assert_same(train(through_autograd, operations=operations), train(name, operations=operations))


@pytest.mark.extended
@pytest.mark.parametrize("name", ROWS)
def test_modules_train_one_tensor_as_one_an_expert(name: str, train: Given):
    """Megatron's ``parity_module_grouped_linear`` to the bit, with an evaluation in between."""
    single = train(name, single=True, operations=False, evaluates=True)
    assert_same(single, train(name, operations=False, evaluates=True))


@pytest.mark.gpu
@pytest.mark.extended
@pytest.mark.parametrize("name", ROWS)
def test_modules_train_one_tensor_with_the_kernels_of_transformer_engine(name: str, train: Given):
    """Losses within the tolerances of Megatron's test; weights are the reference of the masters."""
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.module import grouped_linear

    weights, products = FORMATS[name.partition(", ")[0]]
    format = products.get("products", weights)
    recipes = {"mxfp8": recipe.MXFP8BlockScaling, "nvfp4": recipe.NVFP4BlockScaling}
    made = recipes[format]() if format in recipes else None
    if not grouped_linear.is_module_grouped_tensor_path_supported(made, torch.bfloat16):
        pytest.skip(f"no grouped GEMMs in {format} on this GPU, or with its cuBLAS")
    single, apart = (
        train(name, single=single, operations=False, own_kernels=True) for single in (True, False)
    )
    tolerance = 5e-3 if format == "bf16" else 2e-2
    for one, other in zip(single.ranks, apart.ranks, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=tolerance, abs=tolerance)
        for weight in one["weights"].values():
            for fields, master in zip(weight["fields"], weight["master"], strict=True):
                if weights == "bf16":
                    assert_bytes_equal(fields["values"], master.bfloat16(), what=name)
                else:
                    assert_holds(SimpleNamespace(**fields), master, get_format(weights))


@pytest.mark.extended
@pytest.mark.parametrize("name", ROWS)
def test_modules_train_eval_train_equals_train_only(name: str, train: Given):
    """Of modules, without operations."""
    runs = [train(name, operations=False, evaluates=evaluates) for evaluates in (True, False)]
    assert_same(*runs, validated=False)


@pytest.mark.parametrize("name", [row(f"{kind}, fused") for kind in FORMATS])
@pytest.mark.parametrize("single", [True, False], ids=["into one tensor", "into one an expert"])
def test_a_checkpoint_of_either_kind_goes_on_in_the_other(name: str, single: bool, train: Given):
    """As the uninterrupted run of either: losses, norms, and what products read in the end."""
    resumed = train(name, single=single, goes_on_from_single=not single)
    whole = train(name, single=single)
    assert resumed.losses == later(whole.losses)
    for one, other in zip(resumed.ranks, whole.ranks, strict=True):
        assert one["norms"] == {step: other["norms"][step] for step in (3, 4)}
        mine, theirs = by_expert(one), by_expert(other)
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_bytes_equal(mine[key].view(-1), value.view(-1), what=key)
