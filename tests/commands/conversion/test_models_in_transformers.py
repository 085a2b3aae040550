"""One model, two programs: the logits of Megatron are those of transformers, both ways."""

import pytest
import torch

from moe_optim.commands.conversion.model_conversion import convert_model
from moe_optim.commands.conversion.model_plan import ModelRequest, plan_model
from moe_optim.commands.conversion.opening import open_checkpoint
from tests.support.bytes import assert_same_tensors
from tests.support.checkpoints import hf_models
from tests.support.checkpoints.hf_models import AT_ONCE, MODELS, PREDICTING, Job, run_jobs
from tests.support.checkpoints.stored_checkpoints import read_with_torch
from tests.support.ranks import run_ranks

TOLERANCE = 5e-6
"""Of logits up to 3 in fp32: the two programs add up in other orders."""


LOCAL = {"transformer_impl": "local"}


def convert(source, target, to, **request):
    convert_model(plan_model(open_checkpoint(source), ModelRequest(to=to, **request)), target)
    return target


def _folder(name):
    return f"model{list(MODELS).index(name)}"


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([hf_models.tokens()])).logits[0].float()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Models that transformers has drawn, and what they give: folder and logits, by name."""
    folder = tmp_path_factory.mktemp("drawn")
    made = {}
    for name in MODELS:
        model = hf_models.draw_in_transformers(name)
        model.save_pretrained(folder / _folder(name))
        made[name] = (folder / _folder(name), logits_of(model))
    return made


@pytest.fixture(scope="module")
def megatron(drawn, tmp_path_factory):
    """One process of Megatron: models that it draws and saves, and those of transformers loaded.

    Returns folders of the former, and the logits of both, by name.
    """
    root = tmp_path_factory.mktemp("megatron")
    loaded = {
        name: convert(folder, root / f"{_folder(name)}-loaded", "megatron", **LOCAL)
        for name, (folder, _) in drawn.items()
    }
    jobs = [Job(name, save=str(root / _folder(name))) for name in MODELS]
    jobs += [Job(name, load=str(loaded[name])) for name in MODELS]
    (logits,) = run_ranks(1, run_jobs, jobs)
    count = len(MODELS)
    return (
        {name: root / _folder(name) for name in MODELS},
        dict(zip(MODELS, logits[:count], strict=True)),
        dict(zip(MODELS, logits[count:], strict=True)),
    )


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_the_logits_of_the_model_that_megatron_saved(name, megatron, tmp_path):
    """From the checkpoint and the arguments in it alone; nothing is missing or left over."""
    from transformers import AutoModelForCausalLM

    folders, logits, _ = megatron
    hf = convert(folders[name], tmp_path / "hf", "hf")
    model, said = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    assert model.config.model_type == name.partition(",")[0]
    assert not any(said.values()), said
    torch.testing.assert_close(logits_of(model), logits[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_megatron_gives_the_logits_of_the_model_that_transformers_drew(name, drawn, megatron):
    _, _, logits = megatron
    torch.testing.assert_close(logits[name], drawn[name][1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_gives_every_tensor_of_megatron_again_to_the_bit(name, megatron, tmp_path):
    """Under the names that Megatron itself has stored them, stacked where it stacks them."""
    saved = megatron[0][name]
    hf = convert(saved, tmp_path / "hf", "hf")
    back = convert(hf, tmp_path / "back", "megatron", **LOCAL)
    want = read_with_torch(open_checkpoint(saved).path)
    assert_same_tensors(read_with_torch(open_checkpoint(back).path), want)
    again = convert(back, tmp_path / "again", "hf")
    assert (again / "config.json").read_bytes() == (hf / "config.json").read_bytes()


def test_layers_that_predict_further_tokens_come_back_to_megatron(tmp_path):
    """What Megatron saves, in its own names, is what it loads again, strictly, to the bit.

    transformers leaves them out, and gives the logits of the others.
    """
    from transformers import AutoModelForCausalLM

    saved, back = tmp_path / "saved", tmp_path / "back"
    (logits,) = run_ranks(1, run_jobs, [Job(PREDICTING, save=str(saved))])[0]
    hf = convert(saved, tmp_path / "hf", "hf")
    model, said = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    left_out = said.pop("unexpected_keys")
    assert left_out and all(name.startswith("model.layers.2.") for name in left_out)
    assert not any(said.values()), said
    torch.testing.assert_close(logits_of(model), logits, rtol=0, atol=TOLERANCE)
    convert(hf, back, "megatron", **LOCAL)
    want = read_with_torch(open_checkpoint(saved).path)
    assert any(name.startswith("mtp.layers.0.transformer_layer.mlp.experts.") for name in want)
    assert_same_tensors(read_with_torch(open_checkpoint(back).path), want)
    (again,) = run_ranks(1, run_jobs, [Job(PREDICTING, load=str(back))])[0]
    assert torch.equal(again, logits)


def test_queries_projected_at_once_give_the_same_logits(tmp_path):
    """As of Moonlight, ``q_lora_rank: null``, where Megatron has no norm in front of queries."""
    from transformers import AutoModelForCausalLM

    (logits,) = run_ranks(1, run_jobs, [Job(AT_ONCE, save=str(tmp_path / "saved"))])[0]
    hf = convert(tmp_path / "saved", tmp_path / "hf", "hf")
    model, said = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    assert model.config.q_lora_rank is None
    assert not any(said.values()), said
    torch.testing.assert_close(logits_of(model), logits, rtol=0, atol=TOLERANCE)
