"""``format: auto`` is what is built: every object has the one format that is right."""

import dataclasses
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError
from moe_optim.formats import FORMATS, FP8_BLOCK, FP8_BLOCK_FP32, MXFP8, NVFP4
from moe_optim.integration import cpu_runtime, installation
from moe_optim.integration.argv import spell_format
from moe_optim.rules import FP32_SCALES, refusals
from moe_optim.weights import managed
from tests.support import training
from tests.support.ranks import on_ranks, run_ranks
from tests.support.te import te_stand_ins
from tests.support.training import Record, pretrain

AUTO = MoEOptimConfig()
BLOCKS = ("fp8_block", "fp8_block_fp32")
FLAGS = ["--train-iters", "2", "--eval-interval", "2"]


def test_auto_alone_takes_the_format_and_every_other_setting_stays():
    given = MoEOptimConfig(format="nvfp4", expert_layout="indexed")
    assert given.resolved("mxfp8") is given
    config = MoEOptimConfig(wire="bf16", save_nonfinite=True)
    assert config.resolved("nvfp4") == dataclasses.replace(config, format="nvfp4")
    with pytest.raises(ConfigError, match="^format: auto, bf16 here: record_amax: true"):
        MoEOptimConfig(record_amax=True).resolved("bf16")


# Transformer Engine: the weights say it


@pytest.mark.parametrize(
    ("weight", "stored", "format"),
    [
        (te_stand_ins.MXFP8Tensor, MXFP8, "mxfp8"),
        (te_stand_ins.NVFP4Tensor, NVFP4, "nvfp4"),
        (te_stand_ins.Float8BlockwiseQTensor, FP8_BLOCK, "fp8_block"),
        (te_stand_ins.Float8BlockwiseQTensor, FP8_BLOCK_FP32, "fp8_block_fp32"),
    ],
    ids=["mxfp8", "nvfp4", "fp8_block", "fp8_block_fp32"],
)
def test_weights_of_transformer_engine_are_managed_in_their_own_format(
    weight: Any, stored: Any, format: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(managed, "installed_config", lambda: AUTO)
    storage = managed.storage_of(weight(stored, torch.randn(128, 256)))
    assert storage.format.name == format


def test_a_tensor_that_transformer_engine_did_not_quantize_is_not_managed(
    monkeypatch: pytest.MonkeyPatch,
):
    """bf16 primary weights, and per-tensor scaling, which is refused as before."""
    monkeypatch.setattr(managed, "installed_config", lambda: AUTO)
    float8 = type("Float8Tensor", (), {})()
    assert managed.storage_of(torch.nn.Parameter(torch.ones(2, 2))) is None
    assert managed.storage_of(float8) is None


def _chunk(*params: Any) -> Any:
    """Return a wrapped chunk that holds some weights and no modules."""
    model = SimpleNamespace(qk_clip=False)
    return SimpleNamespace(
        parameters=lambda: params, modules=lambda: [], config=model, ddp_config=None
    )


def _find(config: MoEOptimConfig, *params: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    from moe_optim.optimizer import requirements

    flags = OptimizerConfig(use_distributed_optimizer=True)
    installation._config = config
    return requirements._find_setup(flags, [_chunk(*params)], config)


@on_ranks(1)
def test_weights_of_other_formats_than_the_one_requested_are_refused():
    """Whatever Transformer Engine's variable is by then: the quantizers of the weights decide."""
    from megatron.core.distributed import param_and_grad_buffer as upstream

    mixed = [
        te_stand_ins.MXFP8Tensor(MXFP8, torch.randn(32, 32)),
        te_stand_ins.NVFP4Tensor(NVFP4, torch.randn(32, 32)),
    ]
    two = refusals(dataclasses.replace(_find(AUTO, *mixed), quantized=False))
    upstream._param_uses_quantized_storage = lambda _: True  # as of Transformer Engine's classes
    told: dict[str, dict[str, list[str]]] = {}
    for stored, asked in product(BLOCKS, ("auto", *BLOCKS)):
        stand_in = te_stand_ins.Float8BlockwiseQTensor(FORMATS[stored], torch.randn(128, 128))
        setup = _find(MoEOptimConfig(format=asked), te_stand_ins.as_parameter(stand_in))
        told.setdefault(stored, {})[asked] = setup.stored or refusals(setup)
    (message,) = two
    assert message.startswith("format: auto with weights in mxfp8 and nvfp4: expected quantized")
    for stored, other, said in zip(BLOCKS, BLOCKS[::-1], ("without", "with"), strict=True):
        (message,) = told[stored].pop(other)
        assert told[stored] == {"auto": [stored], stored: [stored]}
        weights = f"weights that take {stored} ({said} {FP32_SCALES}=1)"
        assert message.startswith(f"format: {other} with {weights}: --fp8-recipe or --fp4-recipe")


def test_weights_with_one_scale_are_refused_under_another_format_on_every_rank():
    """Also by ranks that have none of them: a pipeline stage may lack what another holds."""
    for (message,) in run_ranks(2, _one_scale_on_one_rank):
        assert message.startswith("format: bf16 with weights that take auto: --fp8-recipe")
        assert "Set --moe-optim-set format=auto, or drop --fp8-param-gather" in message


def _one_scale_on_one_rank() -> list[str]:
    cpu_runtime.install()
    dist.init_process_group("gloo")
    quantizer = te_stand_ins.Float8CurrentScalingQuantizer()
    weight = te_stand_ins.Float8Tensor(torch.randn(32, 32), quantizer)
    params = [weight] if dist.get_rank() == 0 else []
    setup = _find(MoEOptimConfig(format="bf16"), *params)
    return refusals(dataclasses.replace(setup, tensorwise=False))


# Megatron's own loop: portable experts, and none


def _train(flags: list[str], *without: str) -> Record:
    """Train without some of the flags that all runs of these tests have."""
    training.MODEL = [flag for flag in training.MODEL if flag not in without]

    def formats(model: list[Any], _optimizer: Any) -> set[str]:
        params = [param for chunk in model for param in chunk.parameters()]
        storages = [p.quantized_storage for p in params if managed.is_managed(p)]
        return {storage.format.name for storage in storages}

    return pretrain([*FLAGS, *flags], AUTO, observe=formats)


def test_portable_experts_are_mxfp8_after_the_arguments_of_a_checkpoint(tmp_path: Path):
    """``--use-checkpoint-args`` brings ``--moe-grouped-gemm`` back, and with it the experts."""
    flags = ["--save", str(tmp_path), "--load", str(tmp_path), "--use-checkpoint-args"]
    (saved,) = run_ranks(1, _train, flags[:2])
    longer = ["--train-iters", "3", "--override-opt_param-scheduler"]
    (resumed,) = run_ranks(1, _train, [*flags, *longer], "--moe-grouped-gemm")
    assert saved.extra == resumed.extra == {"mxfp8"}
    assert list(resumed.losses) == [3]


def test_megatrons_own_experts_are_bf16_under_the_optimizer_of_this_package():
    (auto,) = run_ranks(1, _train, [], "--moe-grouped-gemm")
    assert (auto.extra, auto.classes) == (set(), {"GroupedDistributedOptimizer"})


# Messages before anything is built


@pytest.mark.parametrize(
    ("flags", "format"),
    [
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather", "mxfp8"),
        ("--fp4-format e2m1 --fp4-param-gather", "nvfp4"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "bf16"),
        ("--transformer-impl local --moe-grouped-gemm", "mxfp8"),
        ("--moe-grouped-gemm", "bf16"),
        ("--fp8-format hybrid --fp8-param-gather", "auto"),  # per-tensor scaling is refused later
    ],
)
def test_messages_name_what_flags_say(flags: str, format: str):
    assert spell_format("auto", flags.split()) == format
    assert spell_format("mxfp8_2d", flags.split()) == "mxfp8_2d"
