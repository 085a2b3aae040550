"""Experts trained in four bits reach an engine as what their GEMMs multiply.

The model steps, its live export is decompressed by compressed-tensors itself as the exported
configuration says, and the values are those of the GEMM operands of both directions.
"""

from importlib.util import find_spec

import pytest
import torch

from moe_optim.commands.export.engine_config import quantization_config
from moe_optim.formats import get_format
from moe_optim.rollout.conventions import find_convention
from tests.rollout.test_cut_experts import linears
from tests.rollout.test_export_weights import Setup, build, exported, initialize, step
from tests.support.bytes import assert_bytes_equal
from tests.support.ranks import on_ranks

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(  # not imported here: that takes each worker seconds
    find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
)

FORMATS = ("mxfp4", "int4")
PROJECTIONS = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}


def _decompress(format, tensors):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    convention = find_convention(get_format(format), "compressed_tensors")
    config = QuantizationConfig.model_validate(quantization_config(convention, ["lm_head"]))
    compressor = BaseCompressor.get_value_from_registry(config.format)
    return compressor.decompress(tensors, config.config_groups["group_0"])["weight"].bfloat16()


@on_ranks(1)
def test_an_engine_decompresses_what_the_gemms_of_training_multiply():
    initialize()
    compared = {}
    for format in FORMATS:
        chunks, optimizer = build(Setup(knobs={"format": format}))
        for _ in range(3):
            step(chunks, optimizer)
        given = exported(chunks, convention="compressed_tensors")
        for number, linear in enumerate(linears(chunks)):
            layer, kind = divmod(number, 2)
            which = list(PROJECTIONS)[kind]
            assert linear.name.endswith(which)
            operand = linear.operand("rowwise")
            assert_bytes_equal(linear.operand("columnwise"), operand)
            for expert, want in enumerate(operand):
                rows = []
                for projection in PROJECTIONS[which]:
                    stem = f"model.layers.{layer}.mlp.experts.{expert}.{projection}."
                    parts = {
                        k.removeprefix(stem): t for k, t in given.items() if k.startswith(stem)
                    }
                    rows.append(_decompress(format, parts))
                assert_bytes_equal(torch.cat(rows), want, what=f"{format} {stem}")
                compared[format] = compared.get(format, 0) + 1
    assert compared == dict.fromkeys(FORMATS, 2 * 2 * 4)
