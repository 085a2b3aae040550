"""One model, two programs: the logits of Megatron are those of transformers, both ways."""

import pytest
import torch

from moe_optim.commands.conversion.model_conversion import ModelRequest, plan_model
from moe_optim.commands.conversion.opening import open_checkpoint
from tests.support.bytes import assert_same_tensors
from tests.support.checkpoints import hf_models
from tests.support.checkpoints.hf_models import AT_ONCE, MODELS, PREDICTING, Job, run_jobs
from tests.support.checkpoints.stored_checkpoints import read_with_torch
from tests.support.ranks import run_ranks

TOLERANCE = 5e-6
"""Of logits up to 3 in fp32: the two programs add up in other orders."""


LOCAL = {"transformer_impl": "local"}
SAVED = [*MODELS, PREDICTING, AT_ONCE]


def convert(source, target, to, **request):
    plan_model(open_checkpoint(source), ModelRequest(to=to, **request)).write(target)
    return target


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([hf_models.tokens()])).logits[0].float()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Models that transformers has drawn, and what they give: folder and logits, by name."""
    root = tmp_path_factory.mktemp("drawn")
    made = {}
    for number, name in enumerate(MODELS):
        folder, model = root / f"model{number}", hf_models.draw_in_transformers(name)
        model.save_pretrained(folder)
        made[name] = (folder, logits_of(model))
    return made


@pytest.fixture(scope="module")
def megatron(drawn, tmp_path_factory):
    """One process of Megatron: models that it draws and saves, and those of transformers loaded.

    Returns folders and logits of the former, and logits of the latter, by name.
    """
    root = tmp_path_factory.mktemp("megatron")
    saved = {name: root / f"model{number}" for number, name in enumerate(SAVED)}
    jobs = [Job(name, save=str(folder)) for name, folder in saved.items()]
    for name, (folder, _) in drawn.items():
        loaded = convert(folder, root / f"{folder.name}-loaded", "megatron", **LOCAL)
        jobs.append(Job(name, load=str(loaded)))
    (logits,) = run_ranks(1, run_jobs, jobs)
    count = len(saved)
    return (
        saved,
        dict(zip(saved, logits[:count], strict=True)),
        dict(zip(drawn, logits[count:], strict=True)),
    )


@pytest.mark.parametrize("name", SAVED)
def test_transformers_gives_the_logits_of_the_model_that_megatron_saved(name, megatron, tmp_path):
    """From the checkpoint and the arguments in it alone; nothing is missing or left over.

    transformers leaves out layers that predict further tokens. Queries projected at once are those
    of Moonlight, ``q_lora_rank: null``, where Megatron has no norm in front of queries.
    """
    from transformers import AutoModelForCausalLM

    folders, logits, _ = megatron
    hf = convert(folders[name], tmp_path / "hf", "hf")
    model, said = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    assert model.config.model_type == name.partition(",")[0]
    left_out = said.pop("unexpected_keys")
    assert bool(left_out) == (name == PREDICTING)
    assert all(key.startswith("model.layers.2.") for key in left_out)
    assert not any(said.values()), said
    torch.testing.assert_close(logits_of(model), logits[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_megatron_gives_the_logits_of_the_model_that_transformers_drew(name, drawn, megatron):
    _, _, logits = megatron
    torch.testing.assert_close(logits[name], drawn[name][1], rtol=0, atol=TOLERANCE)


def test_there_and_back_gives_every_tensor_of_megatron_again_to_the_bit(megatron, tmp_path):
    """Under the names that Megatron itself has stored them, stacked where it stacks them, so that
    it loads them again, strictly."""
    folders, logits, _ = megatron
    hf = convert(folders[PREDICTING], tmp_path / "hf", "hf")
    back = convert(hf, tmp_path / "back", "megatron", **LOCAL)
    want = read_with_torch(open_checkpoint(folders[PREDICTING]).path)
    assert_same_tensors(read_with_torch(open_checkpoint(back).path), want)
    assert any(key.startswith("mtp.layers.0.transformer_layer.mlp.experts.") for key in want)
    (again,) = run_ranks(1, run_jobs, [Job(PREDICTING, load=str(back))])[0]
    assert torch.equal(again, logits[PREDICTING])
