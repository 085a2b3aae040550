"""One small model as Megatron stores it, and the same as transformers has it."""

import pytest

from moe_optim.commands.conversion.model_conversion import ModelRequest, plan_model
from moe_optim.commands.conversion.opening import open_checkpoint
from tests.support.checkpoints.exported_models import stored, write


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "c"
    return write(folder, stored())


@pytest.fixture(scope="module")
def hf(source, tmp_path_factory):
    """In bf16."""
    folder = tmp_path_factory.mktemp("hf") / "hf"
    plan_model(open_checkpoint(source), ModelRequest(to="hf")).write(folder)
    return folder
