"""Amaxes of experts exchanged with NVIDIA ModelOpt's own modules, calibrated by its own code.

ModelOpt is no dependency: without it on the path these tests are skipped. On any CPU::

    pip install --no-deps --target DIR nvidia-modelopt==0.47.0 requests certifi idna urllib3 \
        charset_normalizer scipy pulp regex nvidia-ml-py tqdm huggingface_hub httpx2 orloge \
        cpsat_logutils
    PYTHONPATH=DIR python -m pytest tests/calibration/test_modelopt_exchange.py

Its quantizers are their own: what loads here was calibrated there, and the other way round.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_optim import ops
from moe_optim.calibration.modelopt_amaxes import amaxes_from_modelopt, amaxes_to_modelopt
from moe_optim.config import MoEOptimConfig
from moe_optim.experts.keys.conversion import convert_state_dict
from moe_optim.formats import NVFP4
from moe_optim.rollout.conventions import find_convention
from moe_optim.rollout.expert_tensors import export_experts
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights
from tests.support.modules import experts
from tests.support.modules.amax import amax_of
from tests.support.ranks import on_ranks
from tests.support.te.grouped_gemm import GroupedGemm
from tests.support.te.te_experts import GroupedLinear

pytestmark = pytest.mark.skipif(
    find_spec("modelopt") is None, reason="needs nvidia-modelopt 0.47 on the path, see above"
)

PREFIX = "decoder.layers.0.mlp.experts."
LINEARS = {
    "linear_fc1": (2 * experts.FFN, experts.HIDDEN),
    "linear_fc2": (experts.HIDDEN, experts.FFN),
}


class Quantized(torch.nn.Module):
    """Experts of one layer with ModelOpt's quantizers of their weights, and no weights."""

    def __init__(self, form: str) -> None:
        from modelopt.torch.quantization.config import QuantizerAttributeConfig
        from modelopt.torch.quantization.nn import GroupedQuantizer, TensorQuantizer

        super().__init__()
        for name in LINEARS:
            linear = torch.nn.Module()
            axis = 0 if form == "grouped" else None
            config = QuantizerAttributeConfig(num_bits=8, axis=axis)
            if form == "indexed":
                quantizers = [TensorQuantizer(config) for _ in range(experts.EXPERTS)]
                linear.weight_quantizer = GroupedQuantizer(*quantizers)
            else:
                linear.weight_quantizer = TensorQuantizer(config)
            linear.input_quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=8))
            linear.input_quantizer.amax = torch.tensor(2.5)
            self.add_module(name, linear)

    def calibrate(self, weights: dict[str, torch.Tensor]) -> "Quantized":
        """Have every quantizer find its amax, of a weight an expert or of one of all."""
        for name, values in weights.items():
            quantizer = self.get_submodule(name).weight_quantizer
            grouped = isinstance(quantizer, torch.nn.ModuleList)
            for one, part in (
                zip(quantizer, values, strict=True) if grouped else [(quantizer, values)]
            ):
                one.disable_quant()
                one.enable_calib()
                one(part)
                one.load_calib_amax()
                one.disable_calib()
                one.enable_quant()
        return self

    def quantize(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights as ModelOpt's fake quantization has them."""
        found = {}
        for name, values in weights.items():
            quantizer = self.get_submodule(name).weight_quantizer
            if isinstance(quantizer, torch.nn.ModuleList):
                parts = zip(quantizer, values, strict=True)
                found[name] = torch.stack([one(part) for one, part in parts])
            else:
                found[name] = quantizer(values)
        return found


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return bf16 weights [E, R, C] of each linear, of which every expert has its own amax."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.arange(1.0, experts.EXPERTS + 1).view(-1, 1, 1)
    return {
        name: (torch.randn(experts.EXPERTS, *shape, generator=generator) * scale).bfloat16()
        for name, shape in LINEARS.items()
    }


def make_calibrated(weights: dict[str, torch.Tensor], axis: int | None = 0) -> torch.nn.Module:
    """Return portable experts with these weights, calibrated here."""
    import moe_optim

    module = experts.make_ours(experts.make_config())
    for name, values in weights.items():
        module.get_submodule(name).load_values(values)
    moe_optim.calibrate([module], axis=axis)
    return module


def with_prefix(state: dict[str, Any]) -> dict[str, Any]:
    return {PREFIX + key: value for key, value in state.items()}


def without_prefix(state: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(PREFIX): value for key, value in state.items()}


FORMS = {"indexed": 0, "grouped": 0, "of all": None}
"""Form -> axis; ``of all`` is a quantizer of one amax."""


@on_ranks(1)
def test_quantizers_of_modelopt_and_our_linears_exchange_amaxes():
    """One quantizer an expert, one with axis 0 over all, and one of a single amax: each finds what
    :func:`moe_optim.calibrate` finds, and quantizes the same after an exchange either way."""
    import moe_optim

    experts.start_ranks()
    for form, axis in FORMS.items():
        weights, others = make_weights(1), make_weights(2)
        theirs, ours = Quantized(form).calibrate(weights), make_calibrated(weights, axis)
        want = {
            n: amax_of(v) if axis == 0 else amax_of(v).amax().view(1) for n, v in weights.items()
        }
        # what ModelOpt has found is what is found here, and loads
        loaded = make_calibrated(others)
        plain = {key: v for key, v in ours.state_dict().items() if key.endswith("weight")}
        state = amaxes_from_modelopt(with_prefix({**plain, **theirs.state_dict()}))
        loaded.load_state_dict(without_prefix(state), strict=True)
        for name, amax in want.items():
            for module in (ours, loaded):
                got = moe_optim.calibrated_amax(module.get_submodule(name))
                assert_bytes_equal(got, amax.view(-1, 1, 1), what=f"{form} {name}")
            got = moe_optim.calibrated_input_amax(loaded.get_submodule(name))
            assert_bytes_equal(got, torch.full((1, 1, 1), 2.5), what=f"{form} inputs of {name}")
            moe_optim.set_calibrated_input_amax(ours.get_submodule(name), torch.tensor(3.5))
        # what is found here loads there, where other weights had been calibrated
        back = amaxes_to_modelopt(
            with_prefix(ours.state_dict()), "indexed" if form == "indexed" else "grouped"
        )
        back = without_prefix({key: v for key, v in back.items() if key.endswith("_amax")})
        receiving = Quantized(form).calibrate(others)
        receiving.load_state_dict(back, strict=True)
        assert receiving.linear_fc1.input_quantizer.amax == 3.5
        quantized, expected = receiving.quantize(weights), theirs.quantize(weights)
        for name, values in expected.items():
            assert_bytes_equal(quantized[name], values, what=f"{form} {name} quantized")
            assert not torch.equal(values, weights[name])


def _run(module: torch.nn.Module) -> None:
    """Send tokens through experts, of which the last one alone gets the largest."""
    tokens = torch.randn(9, experts.HIDDEN, generator=torch.Generator().manual_seed(4))
    tokens[-1, 3] = -11.0
    module(tokens.bfloat16(), torch.tensor([4, 3, 2]), torch.linspace(0.5, 1, 9))


def _quantize(module: torch.nn.Module) -> torch.nn.Module:
    """Have ModelOpt put quantizers into Megatron's experts, and calibrate weights and inputs."""
    import modelopt.torch.quantization as mtq

    return mtq.quantize(module, mtq.FP8_DEFAULT_CFG, forward_loop=_run)


@on_ranks(1)
def test_megatrons_sequential_experts_under_modelopt_load_here_and_back():
    """Weights and amaxes in one state dict; doubled here, they arrive there. What ModelOpt finds of
    inputs is found here, too, by the same configuration and loop."""
    import modelopt.torch.quantization as mtq

    import moe_optim

    experts.start_ranks()
    config = experts.make_config()
    stock = experts.make_stock(config)
    weights = make_weights(3)
    for key, value in experts.values_of(stock).items():
        index, linear, _ = key.split(".")
        value.copy_(weights[linear][int(index)])
    theirs = {key: value.clone() for key, value in _quantize(stock).state_dict().items()}
    assert any(key.endswith("local_experts.0.linear_fc1.weight_quantizer._amax") for key in theirs)
    ours = experts.make_ours(config)
    ours.load_state_dict(without_prefix(amaxes_from_modelopt(with_prefix(theirs))), strict=True)
    own = experts.make_ours(config)
    own.load_state_dict(ours.state_dict())
    moe_optim.calibrate([own], quant_cfg=mtq.FP8_DEFAULT_CFG["quant_cfg"], forward_loop=_run)
    for name, values in weights.items():
        linear = ours.get_submodule(name)
        assert_bytes_equal(linear.weight, values, what=name)
        got = moe_optim.calibrated_amax(linear)
        assert_bytes_equal(got, amax_of(values).view(-1, 1, 1), what=f"amax of {name}")
        of_inputs = moe_optim.calibrated_input_amax(own.get_submodule(name))
        assert_bytes_equal(moe_optim.calibrated_input_amax(linear), of_inputs, what=f"in {name}")
        linear.calibrated_amax.mul_(2)
        linear.calibrated_input_amax.mul_(2)
    state = convert_state_dict(with_prefix(ours.state_dict()), "sequential")
    back = without_prefix(amaxes_to_modelopt(state, "sequential"))
    missing, unexpected = stock.load_state_dict(back, strict=False)
    assert not unexpected and all("_extra_state" in key for key in missing)
    for key, value in stock.state_dict().items():
        if key.endswith(("weight_quantizer._amax", "input_quantizer._amax")):
            assert torch.equal(value, 2 * theirs[key]), key
            assert_bytes_equal(value.float(), back[key], what=key)


class _GroupedLinear(GroupedGemm):
    """The autograd function whose arguments ModelOpt replaces, under Transformer Engine's names."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, m_splits: list[int], *both: torch.Tensor) -> Any:
        weights = both[: len(both) // 2]  # biases follow
        return GroupedGemm.forward(ctx, inp, m_splits, False, None, *weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        dgrad, _, _, _, *wgrads = GroupedGemm.backward(ctx, grad)
        return dgrad, None, *wgrads, *(None for _ in wgrads)


class Linear(GroupedLinear):
    """A grouped linear that calls the function as Transformer Engine's does."""

    def forward(self, tokens: torch.Tensor, splits: list[int]) -> torch.Tensor:
        weights = self._get_weight_tensors()
        return _GroupedLinear.apply(tokens, splits, *weights, *(torch.empty(0) for _ in weights))


def _stand_in_for_transformer_engine() -> None:
    """Let ModelOpt's plug-in find these classes where Transformer Engine has its own."""
    names = ["", ".pytorch", ".pytorch.module"]
    names += [f".pytorch.module.{kind}linear" for kind in ("grouped_", "layernorm_", "")]
    modules = {name: ModuleType(f"transformer_engine{name}") for name in names}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
        if name:
            parent, _, own = name.rpartition(".")
            setattr(modules[parent], own, module)
    modules[""].__version__ = "2.20.2"
    for own in ("Linear", "LayerNormLinear"):
        setattr(modules[".pytorch"], own, type(own, (torch.nn.Module,), {}))
    modules[".pytorch.module.linear"]._Linear = modules[".pytorch.module.layernorm_linear"]
    grouped = modules[".pytorch.module.grouped_linear"]
    grouped.GroupedLinear, grouped._GroupedLinear = Linear, _GroupedLinear
    import_module("modelopt.torch.quantization.plugins.transformer_engine")


def _run_layer(layer: torch.nn.Module, seed: int) -> list[torch.Tensor]:
    """Return output and gradients of a forward and a backward pass."""
    splits = [5, 0, 4]
    tokens = normal_weights(sum(splits), experts.HIDDEN, seed=seed).bfloat16().requires_grad_()
    output = layer.linear(tokens, splits)
    output.backward(normal_weights(*output.shape, seed=seed + 1).bfloat16())
    gradients = [weight.grad for weight in layer.linear.parameters()]
    layer.zero_grad()
    return [output.detach(), tokens.grad, *gradients]


def _make_layer() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.linear = Linear(
        *(3, experts.HIDDEN, experts.FFN),
        config=SimpleNamespace(expert_model_parallel_size=1),
        init_method=torch.nn.init.normal_,
        pg_collection=SimpleNamespace(expt_tp=dist.group.WORLD),
        cut_along=0,
    )
    return layer


@on_ranks(1)
def test_copies_train_as_modelopt_trains_the_same_linear():
    """Weights on one grid an expert: outputs and gradients, with clipped ones and without."""
    import moe_optim
    from moe_optim.experts.weight_copies import copy_weights

    experts.start_ranks()
    _stand_in_for_transformer_engine()
    import modelopt.torch.quantization as mtq

    for compute, num_bits in (("int8_per_expert", 8), ("e4m3_per_expert", (4, 3))):
        theirs, ours = _make_layer(), _make_layer()
        ours.load_state_dict(theirs.state_dict())
        copy_weights(ours, MoEOptimConfig(format="bf16", compute=compute), "experts")
        config = {"num_bits": num_bits, "axis": None, "pass_through_bwd": False}
        weights = {"quantizer_name": "*weight_quantizer", "cfg": config, "enable": True}
        chosen = [{"quantizer_name": "*", "enable": False}, weights]
        mtq.quantize(theirs, {"quant_cfg": chosen, "algorithm": "max"}, forward_loop=None)
        for factor in (1.0, 0.25):
            for quantizer in theirs.linear.weight_quantizer:
                quantizer.amax = quantizer.amax * factor
            amaxes = torch.stack([one.amax for one in theirs.linear.weight_quantizer])
            moe_optim.set_calibrated_amax(ours.linear, amaxes)
            got, want = _run_layer(ours, 7), _run_layer(theirs, 7)
            for number, pair in enumerate(zip(got, want, strict=True)):
                assert_bytes_equal(*pair, what=f"{compute}, {factor} of amaxes, tensor {number}")
        assert (got[2] == 0).float().mean() > 0.2  # clipped


def test_scales_of_exported_inputs_are_modelopts():
    """Of ``NVFP4QTensor``, which its checkpoints are made by, on a CPU: a GPU divides otherwise."""
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    blocks = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
    settings = QuantizerAttributeConfig(num_bits=(2, 1), block_sizes=blocks, axis=None)
    quantizer, weights = TensorQuantizer(settings), ops.quantize(torch.ones(1, 16, 16), "nvfp4")
    drawn = torch.rand(200, generator=torch.Generator().manual_seed(1))
    for amax in (drawn * torch.logspace(-8, 8, 200)).tolist():
        quantizer.amax = torch.tensor(amax)
        theirs = NVFP4QTensor.get_activation_scaling_factor(quantizer)
        ((ours,),) = export_experts(weights, find_convention(NVFP4), input_amax=amax)
        assert_bytes_equal(ours["input_scale"], theirs)
