"""Calibrated amaxes in checkpoints: each goes where its expert goes, in Megatron's loop too.

Transformer Engine's linears stand in, see ``te_experts``.
"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError, StateError
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.collectives import no_collectives
from tests.support.modules import calibrating, experts
from tests.support.modules.amax import amax_of, save_module, saved_amaxes
from tests.support.modules.calibrating import KINDS, Kind, amaxes_of, make, want_amax, whole_weights
from tests.support.ranks import run_ranks
from tests.support.training import Record, pretrain

PREFIX = "layer."
BF16 = KINDS[0]
CASES: list[tuple[Kind, Any]] = [
    *((kind, 0) for kind in KINDS[::2]),
    *((kind, None) for kind in (BF16, KINDS[-1])),
    *((kind, "rank") for kind in (BF16, KINDS[-1])),
]
"""Kind of experts, and the axis they are calibrated with."""


def want_stored(kind: Kind, axis: Any, name: str) -> torch.Tensor:
    """Return what two ranks of two experts save."""
    want = want_amax(kind, whole_weights(name)).view(-1, 1, 1)
    if axis == "rank":
        return want.unflatten(0, (2, 2)).amax(1).repeat_interleave(2, 0)
    return want if axis == 0 else want.amax().view(1, 1, 1)


def _load(module: Any, folder: Path) -> Any:
    """Load strictly, as Megatron does; only the load itself communicates."""
    from megatron.core import dist_checkpointing

    with no_collectives():
        request = module.sharded_state_dict(prefix=PREFIX)
    state = dist_checkpointing.load(request, str(folder))
    module.load_state_dict({name.removeprefix(PREFIX): value for name, value in state.items()})
    return module


def _save_on_two_ranks(folder: Path) -> None:
    import moe_optim

    experts.start_ranks(expert_model_parallel_size=2)
    for kind, axis in CASES:
        module = make(kind, 2)
        moe_optim.calibrate([module], axis=axis)
        if axis == "rank":  # or a scalar a rank, as ModelOpt's axis None gives
            of_rank = moe_optim.calibrated_amax(module.linear_fc2)[0]
            moe_optim.set_calibrated_amax(module.linear_fc2, of_rank)
        save_module(module, folder / f"{kind} {axis}", PREFIX)


def _load_on_four_ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Load into weights of the other layout, then save those."""
    experts.start_ranks(expert_model_parallel_size=4)
    found = []
    for kind, axis in CASES:
        module = make(replace(kind, single=not kind.single), 4, seed=1)
        found.append(amaxes_of(_load(module, folder / f"{kind} {axis}")))
        save_module(module, folder / f"{kind} {axis} of four", PREFIX)
    return found


def _load_on_two_ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    experts.start_ranks(expert_model_parallel_size=2)
    return [
        amaxes_of(_load(make(kind, 2, seed=1), folder / f"{kind} {axis} of four"))
        for kind, axis in CASES
    ]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where two ranks saved what they calibrated."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(2, _save_on_two_ranks, folder)
    return folder


def test_an_amax_an_expert_survives_two_four_and_two_ranks(of_two: Path):
    """Two experts on each of two ranks, one on each of four in the other layout of weights, and two
    again: always those that the first two ranks had calibrated, also where weights quantize anew.
    One amax of all experts is the same everywhere; one of a rank's experts stays with each."""
    journey = (4, _load_on_four_ranks), (2, _load_on_two_ranks)
    for size, load in journey:
        ranks = run_ranks(size, load, of_two)
        for (kind, axis), *found in zip(CASES, *ranks, strict=True):
            for name in calibrating.LINEARS:
                want = want_stored(kind, axis, name)
                amaxes = [amax[name] for amax in found]
                if axis is None:
                    for amax in amaxes:
                        assert torch.equal(amax, want.expand_as(amax)), f"{kind} {name}"
                else:
                    assert_bytes_equal(torch.cat(amaxes), want, what=f"{kind} {name}")


def test_entries_lie_under_global_expert_ids(of_two: Path):
    """[experts, 1, 1] fp32, or [1, 1, 1], whatever wrote them."""
    for kind, axis in CASES:
        saved = saved_amaxes(of_two / f"{kind} {axis}", ".calibrated_amax")
        keys = {f"{PREFIX}experts.{name}.calibrated_amax": name for name in calibrating.LINEARS}
        assert saved.keys() == keys.keys()
        for key, name in keys.items():
            assert_bytes_equal(saved[key], want_stored(kind, axis, name), what=key)


def _without(folder: Path) -> None:
    """Save and load with and without amaxes, with this package in force and without."""
    from megatron.core import dist_checkpointing

    import moe_optim

    experts.start_ranks()
    for kind in KINDS:
        plain, calibrated = folder / f"{kind}", folder / f"{kind} calibrated"
        module = make(kind)
        save_module(module, plain, PREFIX)
        assert not saved_amaxes(plain, ".calibrated_amax")
        moe_optim.calibrate([module])
        save_module(module, calibrated, PREFIX)
        assert set(amaxes_of(_load(module, plain)).values()) == {None}  # they were of other weights
        assert None not in amaxes_of(_load(module, calibrated)).values()
        moe_optim.uninstall()
        if kind.owner == "portable":  # nobody looks at the checkpoint, and nothing is asked for
            module = _load(make_alone(kind), plain)
            assert set(amaxes_of(_load(module, calibrated)).values()) == {None}
    module = make(BF16)
    moe_optim.calibrate([module])
    state = module.sharded_state_dict(prefix=PREFIX)
    amax = state[f"{PREFIX}linear_fc1.calibrated_amax"]
    assert amax.data.data_ptr() != amaxes_of(module)["linear_fc1"].data_ptr()
    te = make(replace(BF16, owner="Transformer Engine"))
    moe_optim.calibrate([te])
    with pytest.raises(ConfigError, match="singleton_local_shards: .*got calibrated amaxes"):
        te.sharded_state_dict(prefix=PREFIX, metadata={"singleton_local_shards": True})
    calibrating.EXPERTS = 2  # in this process alone
    request = make(BF16).sharded_state_dict(prefix=PREFIX)
    request = {key: value for key, value in request.items() if key.endswith("calibrated_amax")}
    with pytest.raises(LayoutError, match=r"linear_fc[12].calibrated_amax: .* of 2 exp"):
        dist_checkpointing.load(request, str(folder / f"{BF16} calibrated"))


def make_alone(kind: Kind) -> Any:
    """Return portable experts where nothing of this package is installed."""
    import moe_optim

    module = make(kind, seed=1)
    moe_optim.uninstall()
    return module


def test_weights_that_come_without_amaxes_leave_none(tmp_path: Path):
    """Models without a calibration save nothing, and ask for what there is."""
    run_ranks(1, _without, tmp_path)


# Models of which only some layers, or one linear of a layer, are calibrated

SELECTED = ["*layers.[13].*linear_fc1", "*layers.2.*"]
"""Of four layers of both linears."""


def _gpt(sizes: dict[str, int], stages: int = 1) -> list[Any]:
    """Return the chunks of a rank of a model of four layers, two a stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import moe_optim

    experts.start_ranks(**sizes)
    moe_optim.uninstall()
    moe_optim.install(MoEOptimConfig(format="bf16"))
    model_parallel_cuda_manual_seed(1)
    options = {name: n for name, n in sizes.items() if name != "expert_tensor_parallel_size"}
    config = experts.make_config(
        num_layers=4, num_moe_experts=calibrating.EXPERTS, pipeline_dtype=torch.bfloat16, **options
    )
    spec = get_gpt_layer_local_spec(num_experts=calibrating.EXPERTS, moe_grouped_gemm=True)
    stage, chunks = parallel_state.get_pipeline_model_parallel_rank(), []
    for number in range(stages):
        ends = {
            "pre_process": stage == number == 0,
            "post_process": stage == sizes.get("pipeline_model_parallel_size", 1) - 1
            and number == stages - 1,
        }
        if stages > 1:
            ends["vp_stage"] = number
        chunks.append(GPTModel(config, spec, 128, 32, **ends).bfloat16())
    return chunks


def _linears_of(chunks: list[Any]) -> dict[str, Any]:
    """Return the linears of experts by layer, as in checkpoints, and name."""
    return {
        f"{module.layer_number - 1}.{name}": module.mlp.experts.get_submodule(name)
        for chunk in chunks
        for module in chunk.decoder.layers
        for name in calibrating.LINEARS
    }


def _held(chunks: list[Any]) -> dict[str, tuple[Any, Any]]:
    from moe_optim import calibrated_amax, calibrated_input_amax

    linears = _linears_of(chunks)
    return {n: (calibrated_amax(one), calibrated_input_amax(one)) for n, one in linears.items()}


def _save_partly(folder: Path) -> dict[str, tuple[Any, Any]]:
    from megatron.core import dist_checkpointing

    import moe_optim

    sizes = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    chunks = _gpt(sizes, stages=2)
    with pytest.raises(
        ConfigError, match=r"got '\*layers.7\*'. Match .*: decoder.layers.0.mlp.exp"
    ):
        moe_optim.calibrate(chunks, quant_cfg=["*layers.7*"])
    given: list[Any] = []
    with pytest.raises(LayoutError, match=r"none on any rank for decoder.layers.[01].mlp.experts"):
        moe_optim.calibrate(chunks, forward_loop=given.append)
    assert given == [chunks]
    moe_optim.calibrate(chunks)
    moe_optim.calibrate(chunks, quant_cfg=SELECTED)
    linears = _linears_of(chunks)
    if "2.linear_fc2" in linears:
        moe_optim.set_calibrated_input_amax(linears["2.linear_fc2"], torch.tensor(5.5))
    if "1.linear_fc1" in linears:  # one of all experts beside layers of one an expert
        moe_optim.set_calibrated_amax(linears["1.linear_fc1"], torch.tensor(7.0))
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    state = {f"model{n}": chunk.sharded_state_dict() for n, chunk in enumerate(chunks)}
    dist_checkpointing.save(state, str(folder))
    return _held(chunks)


def _load_partly(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Load into a model that is calibrated as a whole, and save and load that once more."""
    from megatron.core import dist_checkpointing

    import moe_optim

    (gpt,) = _gpt({"expert_model_parallel_size": 2})
    tokens = torch.arange(32).view(1, 32)
    mask = torch.ones(1, 1, 32, 32).triu(1).bool()
    for source in (folder, folder.with_name("again")):
        moe_optim.calibrate([gpt], forward_loop=lambda model: model(tokens, tokens, mask))
        assert all(None not in held for held in _held([gpt]).values())
        gpt.load_state_dict(dist_checkpointing.load(gpt.sharded_state_dict(), str(source)))
        held = _held([gpt])
        for name, linear in _linears_of([gpt]).items():
            weights, inputs = held[name]
            assert (inputs is not None) == (name == "2.linear_fc2")
            if weights is not None:
                want = amax_of(linear.weight).view(-1, 1, 1)
                want = torch.full_like(want, 7) if name == "1.linear_fc1" else want
                assert_bytes_equal(weights, want, what=f"{source.name} {name}")
        if source == folder:
            again = folder.with_name("again")
            if torch.distributed.get_rank() == 0:
                again.mkdir()
            torch.distributed.barrier()
            dist_checkpointing.save(gpt.sharded_state_dict(), str(again))
    differing = torch.tensor(1.0 + torch.distributed.get_rank())
    moe_optim.set_calibrated_input_amax(_linears_of([gpt])["0.linear_fc1"], differing)
    with pytest.raises(
        LayoutError, match=r"input_amax: expected one amax on .* got \['1.0', '2.0'"
    ):
        dist_checkpointing.save(gpt.sharded_state_dict(), str(folder.with_name("no")))
    return held


def test_linears_without_amaxes_among_calibrated_ones_are_saved_and_loaded_as_such(tmp_path: Path):
    """Selected by global layer numbers on the stages of a virtual pipeline; loaded with experts
    over ranks, where each linear has the amaxes of its weights, or none."""
    stages = run_ranks(2, _save_partly, tmp_path / "saved")
    saved = {name: held for stage in stages for name, held in stage.items()}
    want = {"1.linear_fc1", "2.linear_fc1", "2.linear_fc2", "3.linear_fc1"}
    assert len(saved) == 8 and all(len(stage) == 4 for stage in stages)
    assert {name for name, (weights, _) in saved.items() if weights is not None} == want
    key = "decoder.layers.mlp.experts.experts.linear_fc{}.calibrated_amax"
    stored = saved_amaxes(tmp_path / "saved", "amax")
    assert stored[key.format(1)].isnan().flatten(1).all(1).tolist() == [True, False, False, False]
    assert stored[key.format(2)].isnan().flatten(1).all(1).tolist() == [True, True, False, True]
    ranks = run_ranks(2, _load_partly, tmp_path / "saved")
    for name, (weights, inputs) in saved.items():
        parts = [rank[name] for rank in ranks]
        if weights is None:
            assert [part[0] for part in parts] == [None, None]
        else:
            amaxes = torch.cat([part[0] for part in parts])
            assert_bytes_equal(amaxes, weights.expand_as(amaxes), what=name)
        for _, part in parts:
            assert (part is None) == (inputs is None)
            assert part is None or part.tolist() == [[[5.5]]]


# The case that users described, in Megatron's own loop

EXPERTS, STEPS = 32, 2
SEED = shlex.split(f"""
--num-experts {EXPERTS} --num-layers 2 --moe-ffn-hidden-size 32 --tensor-model-parallel-size 2
--sequence-parallel --expert-tensor-parallel-size 1 --eval-iters 0 --eval-interval 1000000
--train-iters {2 * STEPS} --exit-interval {STEPS} --overlap-grad-reduce --overlap-param-gather
--dist-ckpt-optim-fully-reshardable --global-batch-size 4 --save-interval {STEPS}
""")


def _amaxes_of_run(chunks: list[Any]) -> dict[str, torch.Tensor]:
    from moe_optim import calibrated_amax

    return {
        name: calibrated_amax(module).clone()
        for name, module in chunks[0].named_modules()
        if calibrated_amax(module) is not None
    }


@torch.no_grad()
def _tell_apart(chunks: list[Any], optimizer: Any) -> None:
    """Scale each expert by its number: drawn alike, their amaxes are nearly the same."""
    for module in chunks[0].modules():
        for name in calibrating.LINEARS if hasattr(module, "pg_collection") else ():
            weight = getattr(getattr(module, name, None), "weight", None)
            if weight is not None and weight.dim() == 3:
                first = module.pg_collection.ep.rank() * len(weight)
                numbers = torch.arange(first, first + len(weight)).view(-1, 1, 1)
                factors = (1 + numbers % 8 / 8) * 2.0 ** (numbers // 8 - 3)  # 32 of E4M3's values
                weight.copy_(weight * factors.bfloat16())
    optimizer.reload_model_params()


def _largest(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Return the amax of every expert's weight on this rank, in plain torch."""
    with torch.no_grad():
        return {
            name.removesuffix(".weight"): amax_of(parameter * 1).view(-1, 1, 1)
            for name, parameter in chunks[0].named_parameters()
            if ".experts." in name
        }


def _train(format: str, ep: int, folder: Path, *, resumes: bool) -> Record:
    """Calibrate before the first step, or resume from what was saved; train, and save.

    After the first step, before a forward pass has gathered its weights, calibrate anew.
    """
    import moe_optim
    from moe_optim.calibration.calibrated_amax import hold_calibrated_amax

    seen: dict[str, Any] = {}

    def after_setup(chunks: list[Any], optimizer: Any) -> None:
        if not resumes:
            assert not _amaxes_of_run(chunks)
            _tell_apart(chunks, optimizer)
            seen["wanted"] = _largest(chunks)
            moe_optim.calibrate(chunks)
        seen["first"] = _amaxes_of_run(chunks)

    def after_step(step: int, chunks: list[Any], _: Any) -> None:
        if step > 1:
            return
        held = _amaxes_of_run(chunks)
        if format == "bf16":  # whose buffers tell nobody that the gather is still to come
            seen["stale"] = _largest(chunks)
        else:
            with pytest.raises(StateError, match="expected the weights of the current masters"):
                moe_optim.calibrate([chunks[0].module])
        moe_optim.calibrate(chunks)
        seen["anew"], seen["wanted anew"] = _amaxes_of_run(chunks), _largest(chunks)
        for name, amax in held.items():
            hold_calibrated_amax(chunks[0].get_submodule(name), amax)

    def observe(chunks: list[Any], _: Any) -> dict[str, Any]:
        seen["last"] = _amaxes_of_run(chunks)
        with no_collectives():
            chunks[0].sharded_state_dict()
        return seen

    flags = [*SEED, "--expert-model-parallel-size", str(ep), "--save", str(folder)]
    if resumes:
        flags += ["--load", str(folder)]
    return pretrain(
        flags,
        MoEOptimConfig(format=format),
        observe=observe,
        after_setup=after_setup,
        after_step=after_step,
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", pytest.param("mxfp8", marks=pytest.mark.extended)])
def test_32_experts_calibrate_train_save_reshard_and_resume(format: str, tmp_path: Path):
    """Tensor parallel 2, expert parallel 2, expert tensor parallel 1, with sequence parallelism, on
    four ranks; resumed with expert parallel 4. Training does not change an amax, resuming brings
    each back to its expert, and only another calibration finds others."""
    first = run_ranks(4, _train_first, format, tmp_path)
    resumed = run_ranks(4, _train_resumed, format, tmp_path)
    for record in first:
        seen = record.extra
        assert len(seen["first"]) == 4  # two layers of fc1 and fc2
        assert_same_tensors(seen["first"], seen["wanted"])
        assert_same_tensors(seen["last"], seen["first"])
    for record in (*first, *resumed):
        anew = record.extra["anew"]  # of weights that have moved, and been gathered to be read
        assert_same_tensors(anew, record.extra["wanted anew"])
        assert not are_equal(anew, record.extra["last"])
    if format == "bf16":  # on two ranks, of which each had only stepped a half of an expert
        assert not any(are_equal(one.extra["anew"], one.extra["stale"]) for one in first)
    want, got = _of_all(first, 2), _of_all(resumed, 4)
    assert_same_tensors(got, want)
    for name, amax in want.items():
        assert amax.shape == (EXPERTS, 1, 1) and len(amax.unique()) > EXPERTS // 2, name
    assert set(resumed[0].losses | first[0].losses) == set(range(1, 2 * STEPS + 1))


def _train_first(format: str, folder: Path) -> Record:
    return _train(format, 2, folder, resumes=False)


def _train_resumed(format: str, folder: Path) -> Record:
    return _train(format, 4, folder, resumes=True)


def _of_all(records: list[Record], ep: int) -> dict[str, torch.Tensor]:
    """Return the amaxes of all experts; copies on other ranks hold the same."""
    for rank, record in enumerate(records):
        assert_same_tensors(record.extra["last"], records[rank % ep].extra["last"])
    names = records[0].extra["last"]
    return {name: torch.cat([r.extra["last"][name] for r in records[:ep]]) for name in names}


def are_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(amax, want[name]) for name, amax in got.items())
