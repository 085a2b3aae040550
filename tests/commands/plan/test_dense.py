"""What a plan counts outside of experts is what Megatron builds."""

import shlex

import pytest

from moe_optim.commands.plan.dense import count_dense
from moe_optim.commands.plan.flags import parse_flags
from tests.support.ranks import run_ranks
from tests.support.training import MODEL, pretrain

LATENT = "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8"
LATENT += " --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm"
TWO_STAGES = "--pipeline-model-parallel-size 2 --num-layers 4"
MODELS = {  # flags added to MODEL -> number of ranks, words of MODEL to leave out
    "latent attention, a dense layer": (
        f"{LATENT} --moe-shared-expert-intermediate-size 48 --moe-layer-freq [0,1]",
        1,
        (),
    ),
    "cut in two": ("--tensor-model-parallel-size 2 --sequence-parallel", 2, ()),
    "tied, MTP, in stages": (
        f"{TWO_STAGES} --mtp-num-layers 1",
        2,
        ("--untie-embeddings-and-output-weights",),
    ),
}


class BuiltError(Exception):
    """The model is built."""


def count_built(flags: list[str], without: tuple[str, ...]) -> int:
    """Return the parameters of this rank outside of experts."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    found: list[int] = []
    stock = DotProductAttention.__init__

    def accept_latent(self, *args, k_channels=None, v_channels=None, **kwargs):
        """Latent attention needs Transformer Engine's; neither has parameters."""
        stock(self, *args, **kwargs)

    DotProductAttention.__init__ = accept_latent

    def note(chunks, optimizer):
        params = [one for chunk in chunks for one in chunk.named_parameters()]
        found.append(sum(p.numel() for name, p in params if ".experts." not in name))
        raise BuiltError

    with pytest.raises(BuiltError):
        pretrain([*flags, "--train-iters", "1"], None, after_setup=note, without=without)
    return found[0]


@pytest.mark.parametrize(("words", "ranks", "without"), MODELS.values(), ids=MODELS)
def test_parameters_outside_of_experts_are_those_that_megatron_builds(words, ranks, without):
    flags = shlex.split(words)
    built = run_ranks(ranks, count_built, flags, without)
    model = [word for word in MODEL if word not in without]
    counted = count_dense(parse_flags([*model, *flags]))
    if len(counted) == 1:
        counted = counted * ranks
    assert counted == built
