"""Transformer Engine's own tensor classes behind our storage, and training with them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_optim.cli import main as cli
from moe_optim.formats import FP8_BLOCK, MXFP8, MXFP8_2D
from moe_optim.megatron import te_cast
from moe_optim.megatron.te_storage import TransformerEngineStorage, te_formats_of
from tests.megatron.test_te_storage import assert_holds, requantize
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(te_cast.import_error() is not None, reason="needs Transformer Engine"),
]
RECIPE = Path(__file__).parents[2] / "recipes" / "hopper_fp8_block.yaml"
FIELDS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")


def e4m3():
    import transformer_engine_torch as tex

    return tex.DType.kFloat8E4M3


@pytest.mark.parametrize("shape", [(256, 384), (1536, 2048), (144, 272)], ids=str)
def test_requantizing_fp8_blocks_gives_what_their_own_quantizer_makes(shape):
    """Every field that products read, bit by bit, of the real class; views stay valid."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        fp8_dtype=e4m3(), rowwise=True, columnwise=True, force_pow_2_scales=True
    )
    first, second = (normal_weights(*shape, seed=seed).cuda() for seed in (1, 2))
    weight, want = quantizer(first.bfloat16()), quantizer(second.bfloat16())
    assert te_formats_of(weight) == (FP8_BLOCK,)
    storage = TransformerEngineStorage(weight, FP8_BLOCK)
    storage.bind({"rowwise_data": torch.zeros_like(storage.quantized.rowwise_data)})
    view = weight.detach()
    requantize(storage, second)
    for holder in (weight, view):
        for field in FIELDS:
            got, expected = getattr(holder, field), getattr(want, field)
            if field.endswith("scale_inv"):  # the quantizer does not write all of the padding
                direction = "columnwise" if "column" in field else "rowwise"
                _, down, across = FP8_BLOCK.scale_shape(storage.shape, direction)
                got, expected = got[:down, :across], expected[:down, :across]
            assert_bytes_equal(got, expected, what=field)
    assert torch.equal(weight.dequantize(), want.dequantize())


@pytest.mark.parametrize("format", [MXFP8, MXFP8_2D], ids=lambda format: format.name)
def test_requantizing_reaches_every_field_of_an_mxfp8_weight(format):
    """The real class, whose own quantizer has no kernel for Hopper: the reference is the oracle."""
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    master = normal_weights(256, 384, seed=1)
    weight = MXFP8Quantizer(fp8_dtype=e4m3()).make_empty(
        (256, 384), dtype=torch.bfloat16, device="cuda"
    )
    for field in FIELDS:
        getattr(weight, field).zero_()
    storage = TransformerEngineStorage(weight, format)
    storage.bind({"rowwise_data": torch.zeros_like(storage.quantized.rowwise_data)})
    requantize(storage, master.cuda())
    assert_holds(SimpleNamespace(**{f: getattr(weight, f).cpu() for f in FIELDS}), master, format)


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
