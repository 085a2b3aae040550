"""Transformer Engine's own tensor classes behind our storage, and training with them."""

import json
from pathlib import Path

import pytest
import torch

from moe_optim.cli import main as cli
from moe_optim.formats import FP8_BLOCK, MXFP8
from moe_optim.megatron import te_cast
from moe_optim.megatron.te_storage import TransformerEngineStorage, te_formats_of
from tests.megatron.test_te_storage import requantize
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(te_cast.import_error() is not None, reason="needs Transformer Engine"),
]
RECIPE = Path(__file__).parents[2] / "recipes" / "hopper_fp8_block.yaml"
FIELDS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
SHAPES = [(256, 384), (1536, 2048), (144, 272)]


def make_quantizer(format):
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    if format is MXFP8:
        return MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3)
    return Float8BlockQuantizer(
        fp8_dtype=tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=True
    )


@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8], ids=lambda format: format.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_requantizing_gives_the_weight_that_its_own_quantizer_makes(format, shape):
    """Every field that products read, bit by bit, for real tensor classes; views stay valid."""
    if format is MXFP8 and shape[0] % 32:
        shape = (shape[0] - shape[0] % 32, shape[1] - shape[1] % 32)
    quantizer = make_quantizer(format)
    first, second = (normal_weights(*shape, seed=seed).cuda() for seed in (1, 2))
    weight, want = quantizer(first.bfloat16()), quantizer(second.bfloat16())
    assert format in te_formats_of(weight)
    storage = TransformerEngineStorage(weight, format)
    storage.bind({"rowwise_data": torch.zeros_like(storage.quantized.rowwise_data)})
    view = weight.detach()
    requantize(storage, second)
    for holder in (weight, view):
        for field in FIELDS:
            got, expected = getattr(holder, field), getattr(want, field)
            if field.endswith("scale_inv"):  # its padding is not always written by the quantizer
                _, down, across = format.scale_shape(
                    storage.shape, "columnwise" if "column" in field else "rowwise"
                )
                got, expected = got[:down, :across], expected[:down, :across]
            assert_bytes_equal(got, expected, what=field)
    assert torch.equal(weight.dequantize(), want.dequantize())


@pytest.mark.parametrize("layout", ["stock", "aligned"])
def test_training_with_its_products_gives_stocks_losses(layout, tmp_path, monkeypatch):
    """FP8 blocks end to end: losses of every iteration equal stock Megatron's, to the bit, with
    algorithms that are deterministic in themselves."""
    for name, value in {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
    }.items():
        monkeypatch.setenv(name, value)
    report = tmp_path / "step.json"
    options = ["--rounds", "1", "--iterations", "6", "--json", str(report)]
    options += ["--set", f"moe_optim.layout={layout}"]
    argv = ["bench", "step", str(RECIPE), *options, "--", "--deterministic-mode"]
    assert cli.main([*argv, "--clip-grad", "0"]) == 0
    found = json.loads(report.read_text())
    assert found["losses"]["plugin"] == found["losses"]["stock"]
