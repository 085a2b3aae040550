"""A file given as ``--yaml-cfg`` counts for the plug-in as the flags do that it stands for."""

import contextlib
import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_optim.config import MoEOptimConfig
from tests.integration.test_preflight import assert_begin
from tests.support import training
from tests.support.ranks import run_ranks
from tests.support.training import MODEL, OVERLAP, Record, assert_same_run, pretrain
from tests.support.training_runs.scripts import PRETRAIN

pytest.importorskip("megatron.core")

FLAGS = ["--train-iters", "2", "--eval-interval", "2", "--distributed-backend", "gloo", *OVERLAP]
SHARE = "reuse_grad_buf_for_mxfp8_param_ag"
PLUGIN = ["--use-moe-grouped-optim", "--moe-optim-set", "format=mxfp8"]
NOT_OF_A_FILE = {
    *("rank", "world_size", "yaml_cfg", "_is_global_batch_size_explicitly_specified"),
    *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),  # not text
}


def write_yaml(path: Path, flags: list[str]) -> None:
    """Write what Megatron parses of ``flags`` into the sections where it looks for it."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.training.arguments import parse_args

    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    sys.argv = ["script", *MODEL, *flags]
    rest = {name: value for name, value in vars(parse_args()).items() if name not in NOT_OF_A_FILE}
    sections: dict[str, dict[str, Any]] = {"model_parallel": {}, "language_model": {}}
    shared = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    for field in dataclasses.fields(TransformerConfig):
        default = None if field.default is dataclasses.MISSING else field.default
        section = "model_parallel" if field.name in shared else "language_model"
        sections[section][field.name] = rest.pop(field.name, default)
    sections["language_model"] |= {
        "num_moe_experts": rest.pop("num_experts"),
        "num_query_groups": None,
        "activation_func": "swiglu",
        "bias_swiglu_fusion": rest.pop("bias_swiglu_fusion"),
    }
    sections["model_parallel"]["expert_tensor_parallel_size"] = 1
    rest["skipped_train_samples"] = 0
    plain = json.loads(json.dumps(rest | sections, default=lambda _: None))
    path.write_text(yaml.safe_dump(plain))


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("yaml") / "megatron.yaml"
    run_ranks(1, write_yaml, path, FLAGS)
    return path


def edited(file: Path, **changes: Any) -> Path:
    """Write a copy with other values; ``...`` takes a name out, and ``a__b`` stands for b in a."""
    contents = yaml.safe_load(file.read_text())
    for name, value in changes.items():
        section, _, inner = name.rpartition("__")
        target = contents[section] if section else contents
        target.pop(inner, None)
        if value is not ...:
            target[inner] = value
    path = file.with_name(f"{'-'.join(changes)}.yaml")
    path.write_text(yaml.safe_dump(contents))
    return path


def _run_script(script: Path, file: Path) -> Record:
    """Run a script with `moe-optim run` in a rank, and return what happened."""
    from moe_optim.commands.cli import main as cli
    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    os.environ["PYTHONPATH"] = ""
    training._shrink_mock_data()
    record = Record()
    built = training._watch(record, None, None)
    with contextlib.suppress(SystemExit):
        cli.main(["run", str(script), "--yaml-cfg", str(file), *PLUGIN])
    training._record_state(record, *built)
    record.extra = getattr(built[0][0].ddp_config, SHARE)
    return record


def test_a_file_trains_as_the_command_line_that_it_stands_for(file, tmp_path):
    """A GPT of megatron-core 0.19.2, which builds none of any file by itself; with the flag for
    sharing gradient memory in the file alone, against a run without it."""
    script = tmp_path / "pretrain_mine.py"
    script.write_text(PRETRAIN)
    got = run_ranks(2, _run_script, script, edited(file, **{SHARE: True}))
    want = run_ranks(2, pretrain, FLAGS, MoEOptimConfig(format="mxfp8"))
    for rank in range(2):
        assert got[rank].extra is True
        assert_same_run(got[rank], want[rank], what=f"rank {rank}")


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {  # change -> beginnings of all faults
    "nothing": ({}, []),
    "Muon": ({"optimizer": "muon"}, []),
    "no Transformer Engine": (
        {"language_model__transformer_impl": "transformer_engine"},
        ["--transformer-impl: expected Transformer Engine", "refused by moe_optim: format: "],
    ),
    "fields of the model": (
        {"language_model__moe_z_loss_coeff": ..., "language_model__cuda_graph_impl": ...},
        ["--yaml-cfg: expected every field of TransformerConfig in language_model or "
         "model_parallel, got none of moe_z_loss_coeff, cuda_graph_impl. Add them. The plug-in"],
    ),
    "what Megatron settles": (
        {"micro_batch_size": ...},
        ["--yaml-cfg: expected micro_batch_size in the file, got none. Add it. Of the rest of"],
    ),
}  # fmt: skip


def _list_all(files: dict[str, Path]) -> dict[str, list[str]]:
    from megatron.training.arguments import parse_and_validate_args

    from moe_optim.integration import cpu_runtime, script_arguments
    from moe_optim.integration.preflight import list_faults

    cpu_runtime.install()
    script_arguments.import_error = lambda: "ModuleNotFoundError: it is hidden"
    found = {}
    for has_launcher in (True, False):
        if not has_launcher:
            del os.environ["WORLD_SIZE"]
        for name, file in files.items():
            sys.argv = ["script", "--yaml-cfg", str(file), *PLUGIN]
            with contextlib.redirect_stdout(io.StringIO()):
                faults = list_faults(parse_and_validate_args, sys.argv[1:])
            assert found.setdefault(name, faults) == faults
    return found


@pytest.fixture(scope="module")
def found(file) -> dict[str, list[str]]:
    files = {name: edited(file, **change) for name, (change, _) in CASES.items()}
    files["no file"] = file.with_name("none.yaml")
    return run_ranks(1, _list_all, files)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_lists_what_is_wrong_with_a_file(found, case):
    """With a launcher or without, and it ends before anything is built."""
    assert_begin(found[case], CASES[case][1])
    assert "none.yaml" in found["no file"][0]
