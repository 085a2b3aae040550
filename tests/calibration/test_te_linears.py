"""Amaxes of Transformer Engine's linears are loaded and saved as those of portable experts are.

Its linears stand in, see ``te_experts``.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import LayoutError
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.modules import experts
from tests.support.modules.amax import save_module
from tests.support.modules.calibrating import (
    EXPERTS,
    KINDS,
    LINEARS,
    amaxes_of,
    local_part,
    make,
    want_amax,
    whole_weights,
)
from tests.support.ranks import run_ranks
from tests.support.te.te_experts import build_with_te_experts
from tests.support.training import Record, pretrain

OF_TE = [kind for kind in KINDS if kind.owner == "Transformer Engine"]
GIVEN = torch.arange(1.0, EXPERTS + 1)
SIZES = {"ep 4": (4, 1), "ep 2, etp 2": (2, 2), "etp 2": (1, 2), "copies": (1, 1)}
"""Expert-parallel and expert-tensor-parallel ranks of four."""


# State dicts


def _load_state_dicts() -> None:
    """Load weights and amaxes into linears that were never calibrated, strictly."""
    from moe_optim import calibrated_amax, calibrated_input_amax

    experts.start_ranks(expert_model_parallel_size=2)
    first = dist.get_rank() * EXPERTS // 2
    mine = GIVEN[first : first + EXPERTS // 2]
    for kind in OF_TE:
        state: dict[str, Any] = {}
        for name in LINEARS:
            weights = local_part(name, whole_weights(name, 1), 2)
            parts = {"": weights} if kind.single else dict(enumerate(weights))
            state |= {f"{name}.weight{index}": part for index, part in parts.items()}
        for given in (GIVEN, GIVEN.view(-1, 1, 1).double(), mine.view(-1, 1), mine[:1]):
            module = make(kind, 2)
            for name in LINEARS:
                state[f"{name}.calibrated_amax"] = given
                state[f"{name}.calibrated_input_amax"] = torch.tensor(7.0)
            module.load_state_dict(state)
            want = mine[: given.numel()].view(-1, 1, 1)
            for name in LINEARS:
                linear = module.get_submodule(name)
                assert_bytes_equal(calibrated_amax(linear), want, what=f"{kind} {name}")
                assert_bytes_equal(calibrated_input_amax(linear), torch.full((1, 1, 1), 7.0))
        state["linear_fc2.calibrated_amax"] = GIVEN[:3]
        with pytest.raises(LayoutError, match="linear_fc2.calibrated_amax: expected one value for"):
            make(kind, 2).load_state_dict(state)


def test_a_state_dict_gives_linears_that_were_not_calibrated_the_amaxes_of_their_experts():
    """Those of this rank, or of all ranks, of which a rank takes its own; or one of all."""
    run_ranks(2, _load_state_dicts)


# Checkpoints


def _start(ep: int, tp: int) -> None:
    experts.start_ranks(
        expert_model_parallel_size=ep,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=tp,
    )


class _Layers:
    """A module of each kind, saved and loaded in one checkpoint."""

    def __init__(self, ep: int, tp: int, seed: int = 0) -> None:
        self.modules = {kind: make(kind, ep, tp, seed=seed) for kind in OF_TE[1::2]}

    def sharded_state_dict(self, prefix: str) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for kind, module in self.modules.items():
            state |= module.sharded_state_dict(prefix=f"{prefix}{kind}.")
        return state


def _save_and_load(folder: Path) -> None:
    """Calibrate and save at every size, and load at every size into other weights."""
    from megatron.core import dist_checkpointing

    import moe_optim

    for name, (ep, tp) in SIZES.items():
        _start(ep, tp)
        layers = _Layers(ep, tp)
        moe_optim.calibrate([*layers.modules.values()])
        save_module(layers, folder / name, "")
    for ep, tp in SIZES.values():
        _start(ep, tp)
        count = EXPERTS // ep
        first = dist.get_rank() // tp % ep * count
        for name in SIZES:
            layers = _Layers(ep, tp, seed=1)
            state = dist_checkpointing.load(layers.sharded_state_dict(""), str(folder / name))
            for kind, module in layers.modules.items():
                own = {k: v for k, v in state.items() if k.startswith(f"{kind}.")}
                module.load_state_dict({k.removeprefix(f"{kind}."): v for k, v in own.items()})
                for linear, amax in amaxes_of(module).items():
                    want = want_amax(kind, whole_weights(linear)).view(-1, 1, 1)
                    assert_bytes_equal(amax, want[first : first + count], what=f"{kind} {name}")


def test_amaxes_follow_their_experts_between_all_parallel_sizes(tmp_path: Path):
    """Saved at each of the sizes and loaded at each, into one weight or one an expert."""
    run_ranks(4, _save_and_load, tmp_path)


# Megatron's loop

STEPS = 2
FLAGS = shlex.split(f"""
--num-experts 8 --num-layers 2 --moe-ffn-hidden-size 32 --tensor-model-parallel-size 2
--sequence-parallel --expert-tensor-parallel-size 1 --eval-interval 1000000 --overlap-grad-reduce
--overlap-param-gather --train-iters {2 * STEPS} --exit-interval {STEPS} --global-batch-size 4
--dist-ckpt-optim-fully-reshardable --save-interval {STEPS}
""")


def _held(chunks: list[Any]) -> dict[str, torch.Tensor]:
    from moe_optim import calibrated_amax
    from moe_optim.calibration.linears import expert_linears

    return {one.name: calibrated_amax(one.module).clone() for one in expert_linears(chunks[0])}


def _train(ep: int, folder: Path, *, resumes: bool) -> Record:
    """Train on the grid of halved amaxes, or go on from what was saved."""
    import moe_optim
    from moe_optim.calibration.linears import expert_linears

    def halve(chunks: list[Any], _: Any) -> None:
        if not resumes:
            moe_optim.calibrate(chunks)
            for one in expert_linears(chunks[0]):
                amax = moe_optim.calibrated_amax(one.module)
                first = one.groups.ep.rank() * one.num_experts  # else amaxes are nearly the same
                numbers = torch.arange(first, first + one.num_experts).view(-1, 1, 1)
                moe_optim.set_calibrated_amax(one.module, amax * (0.25 + numbers / 32))

    config = MoEOptimConfig(format="bf16", compute="int8_per_expert")
    build_with_te_experts(config)
    flags = [*FLAGS, "--expert-model-parallel-size", str(ep), "--save", str(folder)]
    flags += ["--load", str(folder)] if resumes else []
    return pretrain(flags, config, after_setup=halve, observe=lambda chunks, _: _held(chunks))


def _train_first(folder: Path) -> Record:
    return _train(2, folder, resumes=False)


def _go_on(folder: Path) -> Record:
    return _train(4, folder, resumes=True)


@pytest.mark.slow
@pytest.mark.extended
def test_amaxes_train_are_saved_and_go_on_at_other_parallel_sizes(tmp_path: Path):
    """Tensor parallel 2, expert parallel 2, expert tensor parallel 1 and sequence parallel, then
    expert parallel 4."""
    first, resumed = run_ranks(4, _train_first, tmp_path), run_ranks(4, _go_on, tmp_path)
    of_all = []
    for ep, ranks in ((2, first), (4, resumed)):
        for rank, record in enumerate(ranks):
            assert_same_tensors(record.extra, ranks[rank % ep].extra)
        of_all.append({n: torch.cat([one.extra[n] for one in ranks[:ep]]) for n in ranks[0].extra})
    assert_same_tensors(of_all[1], of_all[0])
    assert len(of_all[0]) == 4 and all(len(one.unique()) == 8 for one in of_all[0].values())
    assert (set(first[0].losses), set(resumed[0].losses)) == ({1, 2}, {3, 4})
