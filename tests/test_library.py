"""Operations are sound for torch's compiler, and have the results and gradients of their bodies."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

import moe_optim.calibration.fake_operations  # noqa: F401  # register operations
import moe_optim.experts.module  # noqa: F401
from moe_optim.formats import FORMATS, MXFP8, reference
from moe_optim.library import as_written
from tests.support.bytes import assert_same_tensors
from tests.support.modules.compiling import Compiled, compiling, make_linear, make_tokens

operations = torch.ops.moe_optim
LINEAR = make_linear(MXFP8)
SCALES = LINEAR.storage.quantized.rowwise_scale
STORAGE = LINEAR.weight.storage_handle


def make(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def buffer_arguments(name):
    quantized = reference.quantize(make(2, 128, 128), FORMATS[name])
    buffers = quantized.rowwise_data, quantized.rowwise_scale, quantized.global_amax
    return *buffers, name, "rowwise"


def product_arguments():
    tokens, ends = make_tokens(LINEAR, (5, 8, 3))
    arguments = tokens, ends, [LINEAR.storage.quantized.rowwise_data], LINEAR.handle
    return arguments, operations.grouped_product(*arguments)[1]


(TOKENS, ENDS, BUFFERS, HANDLE), VERSION = product_arguments()
OUTPUT_GRAD = make(16, 64)
COUNTS = torch.tensor([1, 0, 3])
BIASES = [make(8).requires_grad_() for _ in COUNTS]
HIDDEN, PROBS = make(4, 64).requires_grad_(), torch.rand(4, 1).requires_grad_()
EXPERTS, AMAX = [make(2, 4, 32), make(3, 32)], torch.tensor([1.0, 2.0, 0.5])
KINDS = ("mxfp8", "mxfp8_2d", "nvfp4", "int4")
"""A format of each kind of columnwise copy."""
CASES = {
    **{f"quantize {name}": ("quantize", ([make(2, 128, 128)], name, "auto")) for name in KINDS},
    "reference_quantize": ("reference_quantize", (make(2, 128, 128), "nvfp4", "weight")),
    **{f"dequantize {n}": ("dequantize_bf16", buffer_arguments(n)) for n in KINDS},
    "reference_dequantize": ("reference_dequantize", buffer_arguments("nvfp4")),
    "read_weight": ("read_weight", (BUFFERS[0], SCALES, None, "mxfp8", "rowwise", STORAGE)),
    "grouped_product": ("grouped_product", (TOKENS, ENDS, BUFFERS, HANDLE)),
    "grouped_dgrad": ("grouped_dgrad", (OUTPUT_GRAD, ENDS, HANDLE, VERSION, 32)),
    "grouped_wgrad": ("grouped_wgrad", (OUTPUT_GRAD, TOKENS.detach(), ENDS, HANDLE, VERSION)),
    "gate": ("gate", (HIDDEN, make(4, 64), PROBS, "silu", 0.5, 1.0, 16)),
    "fused_gate": ("fused_gate", (HIDDEN, None, PROBS, "quick_gelu", False, 1.0, 0.5)),
    "spread_biases": ("spread_biases", (BIASES, COUNTS, torch.float32, torch.zeros(4, 8).int())),
    "fake_quantize": ("fake_quantize", (EXPERTS, AMAX, 8, False, "auto")),
    "clip_gradient": ("clip_gradient", (EXPERTS, AMAX, EXPERTS, "auto")),
    "fake_blocks": ("fake_blocks", (EXPERTS, "mxfp4", "reference")),
    "add_scaled": ("add_scaled", (make(4, 8), torch.zeros(4, 8), PROBS)),
}


@pytest.fixture(autouse=True)
def compiler():
    """Let this process compile, and start each test without graphs of another."""
    with compiling():
        yield


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        # Megatron compiles its fused activations by itself, which takes a minute here
        pytest.param(*case, id=name, marks=[pytest.mark.extended] * (name == "fused_gate"))
        for name, case in CASES.items()
    ],
)
def test_an_operation_is_what_it_says(name, arguments):
    """Schema, results without values, and gradients, by torch's own check."""
    torch.library.opcheck(getattr(operations, name).default, arguments)


# A function of steps that a compiler would fuse, and one gradient that two arguments share


@as_written
def _steps_of_the_test(
    first: torch.Tensor,
    others: list[torch.Tensor],
    mask: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    total = first + others[0] + others[1].to(first.dtype) * scale
    total = total if bias is None else total + bias
    return F.silu(total) * mask


@pytest.mark.parametrize("bias", [None, make(1, 8, seed=4)], ids=["no bias", "bias"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_those_of_the_function(bias, backend):
    """Of tensors alone and in lists, of each dtype, and of what is broadcast."""
    found = []
    compiled = Compiled(_steps_of_the_test, backend)
    for call in (compiled, _steps_of_the_test):
        first, second = make(6, 8).requires_grad_(), make(6, 8, seed=1).requires_grad_()
        third = make(6, 8, seed=2).float().requires_grad_()
        leaves = {"first": first, "second": second, "third": third}
        if bias is not None:
            leaves["bias"] = bias.clone().requires_grad_()
        mask = torch.arange(48).view(6, 8) % 3
        output = call(first, [second, third], mask, leaves.get("bias"), 0.3)
        output.backward(make(6, 8, seed=3))
        grads = {name: leaf.grad for name, leaf in leaves.items()}
        found.append({"output": output.detach(), **grads})
    assert_same_tensors(*found)
    assert compiled.graphs == 1
