"""Names of experts do not depend on layouts of parameters, ranks or wrappers."""

from types import SimpleNamespace

import pytest
import torch

from moe_optim.formats import FORMATS
from moe_optim.health.rows import ExpertName, expert_names

BUCKET = object()
NAMES = {  # parameter, experts in it -> layer, expert numbers; layer 5 is this stage's layers.2
    "grouped": ("decoder.layers.2.mlp.experts.linear_fc1.weight", 4, "layers.5.fc1", (4, 5, 6, 7)),
    "indexed": ("decoder.layers.2.mlp.experts.linear_fc2.weight3", 1, "layers.5.fc2", (7,)),
    "one module an expert": (
        "decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight",
        1,
        "layers.5.fc1",
        (5,),
    ),
    "multi-token prediction": (
        "mtp.layers.2.mtp_model_layer.mlp.experts.linear_fc2.weight",
        4,
        "mtp.layers.5.mtp_model_layer.fc2",
        (4, 5, 6, 7),
    ),
    "attention": (
        "decoder.layers.2.self_attention.linear_qkv.weight",
        1,
        "layers.5.self_attention.qkv",
        (0,),
    ),
    "wrapped": (
        "module.module.decoder.layers.2.mlp.experts.linear_fc1.weight",
        4,
        "layers.5.fc1",
        (4, 5, 6, 7),
    ),
}


class Chunk(torch.nn.Module):
    """A model with one quantized weight under a dotted name."""

    def __init__(self, name: str, num_experts: int) -> None:
        super().__init__()
        *path, last = name.split(".")
        module: torch.nn.Module = self
        for part in path:
            below = torch.nn.Module()
            module.add_module(part, below)
            module = below
            if part == "2":
                module.layer_number = 6  # type: ignore[assignment]
            if part == "mlp":
                module.local_expert_indices = [4, 5, 6, 7]  # type: ignore[assignment]
        self.weight = torch.nn.Parameter(torch.zeros(num_experts, 16, 16))
        self.weight.quantized_storage = SimpleNamespace(  # type: ignore[attr-defined]
            bucket=BUCKET, shape=(num_experts, 16, 16), format=FORMATS["nvfp4"]
        )
        module.register_parameter(last, self.weight)
        del self.weight


@pytest.mark.parametrize(
    ("name", "num_experts", "layer", "experts"), NAMES.values(), ids=NAMES.keys()
)
def test_an_expert_is_called_by_its_layer_in_the_model_and_its_number_among_all(
    name, num_experts, layer, experts
):
    (names,) = expert_names([Chunk(name, num_experts)]).values()
    assert names == [ExpertName(layer, expert, "nvfp4") for expert in experts]
