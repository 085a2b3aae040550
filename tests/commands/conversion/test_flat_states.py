"""Flat states of stock Megatron as files: read by name where it is certain, else refused before."""

import argparse
import io
import json

import pytest
import torch

from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.flat_states import NamedStates, named_common_entries
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.commands.conversion.torch_dist_writer import TorchDistWriter
from moe_optim.errors import LayoutError
from tests.support.bytes import assert_bytes_equal, assert_same_tensors

LAYERS, EXPERTS, HIDDEN, FFN = 2, 2, 8, 16
KINDS = ("param", "exp_avg", "exp_avg_sq")
GROUP = "optimizer.distributed.dp_group_idx_0"
BUCKET = f"{GROUP}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
ATTENTION = "self_attention."
LAYER = {  # as a layer of Transformer Engine registers them, experts apart
    f"{ATTENTION}linear_proj.weight": (HIDDEN, HIDDEN),
    f"{ATTENTION}linear_qkv.layer_norm_weight": (HIDDEN,),
    f"{ATTENTION}linear_qkv.weight": (3 * HIDDEN, HIDDEN),
    "pre_mlp_layernorm.weight": (HIDDEN,),
    "mlp.router.weight": (EXPERTS, HIDDEN),
}
FC1, FC2 = "mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"
EXPERT = {FC1: (2 * FFN, HIDDEN), FC2: (HIDDEN, FFN)}
ARGS = {
    "num_layers": LAYERS,
    "transformer_impl": "transformer_engine",
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "moe_mlp_glu_interleave_size": None,
}


def named(seed=0):
    """Return masters or moments under the names of a model, each expert and layer apart."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding.word_embeddings.weight": (12, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in LAYER.items()}
        shapes |= {  # one expert after the other, as Transformer Engine's grouped linears have them
            f"decoder.layers.{layer}.{name} {expert}": shape
            for name, shape in EXPERT.items()
            for expert in range(EXPERTS)
        }
    shapes |= {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (12, HIDDEN)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stacked(tensors):
    """Return them as torch_dist stores them: all layers as one, and all experts."""
    result = {name: one for name, one in tensors.items() if ".layers." not in name}
    for name in LAYER:
        rows = [tensors[f"decoder.layers.{layer}.{name}"] for layer in range(LAYERS)]
        result[f"decoder.layers.{name}"] = torch.stack(rows)
    for name in EXPERT:
        parts = [
            torch.stack([tensors[f"decoder.layers.{n}.{name} {e}"] for e in range(EXPERTS)])
            for n in range(LAYERS)
        ]
        result[f"decoder.layers.{name}"] = torch.stack(parts)
    return result


def flat(tensors):
    """Return the pieces of a bucket: the last registered first, each from a multiple of 64 on."""
    pieces = []
    for one in reversed(tensors.values()):
        end = sum(piece.numel() for piece in pieces)
        pieces += [torch.zeros(-end % 64), one.flatten()]
    return [piece for piece in pieces if piece.numel()]


OPTIMIZER = {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "wd_mult": 1.0, "step": 7}]}


def write(
    folder,
    masters=None,
    *,
    weights=None,
    param=None,
    moments=None,
    more=None,
    optimizer=OPTIMIZER,
    **arguments,
):
    """Write what stock Megatron saves with ``dp_reshardable``, of one rank."""
    masters = named() if masters is None else masters
    states = {kind: flat(named(seed)) for seed, kind in enumerate(KINDS)}
    states["param"] = flat(masters) if param is None else param
    if moments is not None:
        states["exp_avg"] = flat(moments)
    given = {name: one.bfloat16() for name, one in stacked(masters).items()}
    given |= (weights or {}) | (more or {})
    common = {
        "args": argparse.Namespace(**(ARGS | arguments)),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "optimizer": {"param_state_sharding_type": "dp_reshardable"},
        "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable", "more": True},
    }
    if arguments.get("num_layers", 1) is None:
        del common["args"]
    folder.mkdir()
    with TorchDistWriter(folder) as writer:
        objects = {"common_state": common, "rng_state": {"seed": torch.arange(3)}}
        objects |= {f"{GROUP}.per_bucket_numel": []}
        objects |= {} if optimizer is None else {f"{GROUP}.optimizer": optimizer}
        for name, value in objects.items():
            content = io.BytesIO()
            torch.save([value], content)
            writer.write_object(f"{name}/shard_0_1", content.getvalue())
        for name, one in given.items():
            info = TensorInfo(tuple(one.shape), one.dtype)
            writer.write_chunk(name, info, (0,) * one.ndim, one)
        for kind, pieces in states.items():
            info = TensorInfo((sum(piece.numel() for piece in pieces),), pieces[0].dtype)
            start = 0
            for piece in pieces:
                writer.write_chunk(f"{BUCKET}.{kind}", info, (start,), piece.clone())
                start += piece.numel()
        writer.finish()
    return folder


def convert(source, target, *more):
    words = ["--experts", "hf", "--format", "safetensors", *more]
    return cli.main(["convert", str(source), str(target), *words])


def test_masters_and_moments_are_read_by_the_names_of_their_weights(tmp_path):
    reader = NamedStates(open_checkpoint(write(tmp_path / "c")))
    want = {
        f"optimizer.state.{kind}.{name}": one
        for seed, kind in enumerate(KINDS)
        for name, one in stacked(named(seed)).items()
    }
    got = {name: reader.read(name) for name in reader.tensors if name.startswith("optimizer.")}
    assert_same_tensors(got, want)
    name = f"optimizer.state.exp_avg.decoder.layers.{FC1}"
    assert_bytes_equal(reader.read(name, 1), want[name][1], what=name)
    name = f"optimizer.state.exp_avg_sq.decoder.layers.{ATTENTION}linear_qkv.weight"
    assert_bytes_equal(reader.read(name, 0), want[name][0], what=name)
    name = "optimizer.state.param.output_layer.weight"
    assert_bytes_equal(reader.read(name, 3), want[name][3], what=name)


def same_experts():
    """Return masters by which no expert of a layer can be told from another."""
    masters = named()
    for name in masters:
        if name.endswith(" 1"):
            masters[name] = masters[name.removesuffix("1") + "0"].clone()
    return masters


def other_master():
    weights = stacked(named())[f"decoder.layers.{FC2}"].bfloat16()
    weights[1, 1, 0, 0] += 1
    return {f"decoder.layers.{FC2}": weights}


REFUSED = {
    "expert 1 of decoder.layers.1.mlp.experts.linear_fc2.weight": lambda: {
        "weights": other_master()
    },
    "orders in which they do": lambda: {"masters": same_experts()},
    "no parallel sizes but data and expert, got tensor 2, pipeline 4": lambda: {
        **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}
    },
    "expected flat optimizer states that can be told apart by parameter: 3 groups": lambda: {
        "expert_model_parallel_size": 2
    },
    "modules whose order is known, got mtp.layers.0.enorm.weight": lambda: {
        "more": {"mtp.layers.0.enorm.weight": torch.zeros(HIDDEN, dtype=torch.bfloat16)}
    },
    "whole masters, got lower bits of them": lambda: {
        "param": [piece.to(torch.int16) for piece in flat(named())]
    },
    "laid out otherwise": lambda: {"param": flat(named())[:-1]},
    "Megatron's arguments beside them, got none": lambda: {"num_layers": None},
}


def test_what_is_not_certain_is_refused_with_what_stands_in_the_way(tmp_path):
    for number, (message, given) in enumerate(REFUSED.items()):
        source = write(tmp_path / str(number), **given())
        with pytest.raises(LayoutError) as raised:
            NamedStates(open_checkpoint(source))
        said = str(raised.value)
        assert message in said
        assert "--dist-ckpt-optim-fully-reshardable, or convert with --weights-only" in said


def test_a_refusal_is_one_error_before_anything_is_written(tmp_path, capsys):
    source = write(tmp_path / "c", masters=same_experts())
    assert convert(source, tmp_path / "out") == 2
    assert capsys.readouterr().err.count("error: ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert convert(source, tmp_path / "out", "--weights-only") == 0


def test_layers_of_megatron_itself_register_their_first_norm_before_attention(tmp_path):
    """It is stored as if it were part of linear_qkv; by its place in the bucket it is not."""
    reordered = {}
    for name, one in named().items():
        if name.endswith(f"{ATTENTION}linear_proj.weight"):
            norm = name.replace("linear_proj.weight", "linear_qkv.layer_norm_weight")
            reordered[norm] = named()[norm]
        reordered.setdefault(name, one)
    source = write(tmp_path / "c", param=flat(reordered), transformer_impl="local")
    reader = NamedStates(open_checkpoint(source))
    name = f"decoder.layers.{ATTENTION}linear_qkv.layer_norm_weight"
    want = stacked(named())[name]
    assert_bytes_equal(reader.read(f"optimizer.state.param.{name}"), want, what=name)
    other = write(tmp_path / "other", param=flat(reordered))
    with pytest.raises(LayoutError, match="laid out otherwise"):
        NamedStates(open_checkpoint(other))


def load(reader, name):
    content = reader.read_bytes(reader.blobs[f"{name}/shard_0_1"][0])
    (value,) = torch.load(io.BytesIO(content), weights_only=False)
    return value


SELF = {"param_groups": []}
SELF["param_groups"].append(SELF)
NO_HYPER_PARAMETERS = (
    (None, "hyper-parameters beside them, got none"),
    ({"param_groups": [{"lr": torch.tensor(1e-3)}]}, "in numbers and text, got others"),
    ({"param_groups": [{"lr": argparse.Namespace()}]}, "in numbers and text"),
    (SELF, "in numbers and text"),
)


def test_hyper_parameters_that_megatron_could_not_load_are_refused(tmp_path):
    """To torch_dist, before anything is written; safetensors hold none."""
    for number, (optimizer, message) in enumerate(NO_HYPER_PARAMETERS):
        source = write(tmp_path / str(number), optimizer=optimizer)
        with pytest.raises(LayoutError, match=message):
            named_common_entries(open_checkpoint(source))
    words = ["convert", str(source), str(tmp_path / "out"), "--experts", "grouped"]
    assert cli.main(words) == 2
    assert not (tmp_path / "out").exists()
    assert convert(source, tmp_path / "out") == 0


def test_to_torch_dist_they_are_saved_by_name(tmp_path):
    """With what Megatron says beside states by name; what has nothing to do with them stays."""
    source = open_checkpoint(write(tmp_path / "c"))
    words = ["convert", str(source.path), str(tmp_path / "out"), "--experts", "grouped"]
    assert cli.main([*words, "--glu-interleave", "4"]) == 0
    got = open_checkpoint(tmp_path / "out")
    want = {name: one.bfloat16() for name, one in stacked(named()).items()}
    for seed, kind in enumerate(KINDS):
        states = stacked(named(seed))
        want |= {f"optimizer.state.{kind}.{name}": one for name, one in states.items()}
    for name in (name for name in want if name.endswith(FC1)):
        blocks = want[name].view(LAYERS, EXPERTS, 2, FFN // 4, 4, HIDDEN)
        want[name] = blocks.transpose(2, 3).reshape(want[name].shape)
    assert_same_tensors({name: got.read(name) for name in got.tensors}, want)
    assert got.objects.keys() == {"common_state/shard_0_1", "rng_state/shard_0_1"}
    assert torch.equal(load(got, "rng_state")["seed"], torch.arange(3))
    before, after = (load(reader, "common_state") for reader in (source, got))
    assert after.pop("optimizer") == {
        "optimizer": OPTIMIZER,
        "param_state_sharding_type": "fully_reshardable",
    }
    assert after.pop("content_metadata") == {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "more": True,
    }
    assert vars(after.pop("args")) == ARGS | {"moe_mlp_glu_interleave_size": 4}
    assert after == {"checkpoint_version": 3.0, "iteration": 7}
    assert before["args"].moe_mlp_glu_interleave_size is None


def test_verify_finds_one_moment_among_flat_states_that_differs(tmp_path, capsys):
    """By its name, against a checkpoint by name."""
    source = write(tmp_path / "c")
    words = ["convert", str(source), str(tmp_path / "by name"), "--experts", "grouped"]
    assert cli.main(words) == 0
    assert cli.main(["verify", str(source), str(tmp_path / "by name")]) == 0
    moments = named(1)
    moments["output_layer.weight"][3, 2] += 1
    other = write(tmp_path / "other", moments=moments)
    capsys.readouterr()
    assert cli.main(["verify", str(other), str(tmp_path / "by name"), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["differences"]
    assert found["name"] == "optimizer.state.exp_avg.output_layer.weight"
    assert (found["differing"], found["first"]) == (1, [3, 2])


def test_inspect_says_before_whether_they_can_be_read_by_name(tmp_path, capsys):
    """By sizes alone: it reads no values."""
    certain = write(tmp_path / "certain")
    doubtful = write(tmp_path / "doubtful", tensor_model_parallel_size=2)
    assert cli.main(["inspect", str(certain)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "by name `convert` takes them" in shown
    assert cli.main(["inspect", str(doubtful), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["optimizer"]
    assert state["flat"]["by_parameter"] is False
    assert "got tensor 2" in state["flat"]["doubt"]
