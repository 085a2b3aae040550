"""Masters and moments through checkpoints: every element arrives, at any sizes, in any layout."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.environment import find_package, satisfies
from moe_optim.errors import ConfigError, LayoutError, NonFiniteError
from tests.support.checkpoints.checkpoint_journey import (
    Journey,
    Station,
    owned_states,
    run_once,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

FLAT, RESHARDABLE = "dp_reshardable", "fully_reshardable"
GROUPED, INDEXED = Station(), Station(experts="indexed")
STOCK = Station(experts="sequential", format="bf16", stock=True)
MANY_BUCKETS = 20_000


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of ranks and a name, which gives what these ranks found."""
    by_name = {
        name: partial(_travel, stations, sharding=RESHARDABLE)
        for name, stations in RESHARDINGS.items()
    }
    in_memory = {
        f"{name}, {algo}": partial(_stay, station, algo)
        for name, station in IN_MEMORY.items()
        for algo in ALGORITHMS
    }
    many = Station(bucket_size=MANY_BUCKETS)
    layouts = (many, INDEXED, many)
    jobs = {
        1: {
            "swapped": _reversed_experts,
            "unmarked": partial(_load_unmarked, UNMARKED[1]),
            "advice": _follow_advice,
            "into members": _load_into_members,
            "mixed groups": _mixed_groups,
            "members": _save_members,
            "unmarked files": partial(_load_unmarked_files, UNMARKED_FILES[1]),
            "equal experts": _load_equal_experts,
        },
        2: {
            "sequential": partial(_travel, (STOCK.but(stock=False), GROUPED), sharding=FLAT),
            "strictly": _travel_strictly,
            "quantized": _load_quantized_unmarked,
            "sizes": _follow_advice_on_sizes,
            "legacy": _legacy,
            "refusals": _refusals,
        },
        3: {
            "layouts": partial(_travel, layouts, sharding=FLAT),
            "unmarked": partial(_load_unmarked, UNMARKED[3]),
            "advice": _follow_advice_on_padded_buckets,
            "padded": _padded_in_stock,
            "unmarked files": partial(_load_unmarked_files, UNMARKED_FILES[3]),
        },
        4: {**by_name, **in_memory, "unmarked": partial(_load_unmarked, UNMARKED[4])},
    }
    return run_once(tmp_path_factory.mktemp("journeys"), jobs)


def _travel(stations: Sequence[Station], folder: Path, sharding: str) -> list[int]:
    """Fill the first station, then hand its state on; return how many elements were compared."""
    journey = Journey(stations[0]).fill()
    counts = [journey.check()]
    for number, station in enumerate(stations[1:]):
        journey.save(folder / str(number), sharding)
        journey = Journey(station).scramble().load(folder / str(number))
        counts.append(journey.check())
    return counts


RESHARDINGS = {
    "expert parallel, formats": (
        GROUPED.but(ep=4, format="nvfp4"), INDEXED.but(ep=2, format="fp8_block"),
        GROUPED.but(format="mxfp8_2d", bucket_size=MANY_BUCKETS),
    ),
    "context parallel, biases": (
        GROUPED.but(cp=2, ep=2, biases=True), INDEXED.but(cp=4, biases=True, format="int4"),
    ),
    "pipeline and tensor parallel": (
        INDEXED.but(pp=2, tp=2, etp=1), GROUPED.but(tp=4, etp=2, ep=2),
        GROUPED.but(pp=2, ep=2, format="nvfp4_rows"),
    ),
    "Megatron": (GROUPED.but(ep=2), STOCK.but(ep=2)),
}  # fmt: skip


IN_MEMORY = {
    "one parameter": GROUPED.but(ep=2),
    "one parameter an expert, several buckets": INDEXED.but(bucket_size=MANY_BUCKETS),
}


ALGORITHMS = ("atomic", "fully_parallel")


def _stay(station: Station, algo: str, folder: Path) -> int:
    journey = Journey(station).fill().keep(algo).scramble().restore(algo)
    return journey.check()


def test_states_by_name_arrive_at_any_parallel_sizes_and_in_any_layout(found):
    """On 4 ranks, save and load fully reshardable from station to station: every element of every
    master and moment is the one of its layer, expert, row and column, on every rank."""
    assert all(all(counts) for name in RESHARDINGS for counts in found(4, name))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_checkpoints_in_memory_restore_every_element(algo, found):
    """Of ``--non-persistent-ckpt-type local``, which no loading hook of this package sees."""
    assert all(all(found(4, f"{name}, {algo}")) for name in IN_MEMORY)


def test_flat_states_arrive_in_another_layout_by_their_manifest(found):
    """``dp_reshardable`` states keep the order of the layout they were saved in, with another
    number of buckets, too; they load into the other one element by element."""
    for counts in (*found(3, "layouts"), *found(2, "sequential")):
        assert all(counts)


def _travel_strictly(folder: Path) -> list[int]:
    counts = []
    for sharding in (FLAT, RESHARDABLE):
        Journey(GROUPED).fill().save(folder / sharding, sharding)
        journey = Journey(INDEXED).scramble().load(folder / sharding, strict="raise_all")
        counts.append(journey.check())
    return counts


def test_a_strict_load_misses_nothing_and_leaves_nothing_over(found):
    """Manifests and sizes of buckets are asked for, too, where layouts differ."""
    for counts in found(2, "strictly"):
        assert all(counts)


def _save(station: Station, folder: Path) -> None:
    journey = Journey(station).fill()
    for sharding in (FLAT, RESHARDABLE):
        journey.save(folder / sharding, sharding)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of what 2 ranks saved, 4 ranks in the other layout, and 2 ranks again."""
    folder = tmp_path_factory.mktemp("there and back")
    run_ranks(2, _save, GROUPED, folder / "2")
    run_ranks(4, _load_and_save, INDEXED, folder / "2", folder / "4")
    run_ranks(2, _load_and_save, GROUPED, folder / "4", folder / "back")
    return folder


@pytest.mark.parametrize("sharding", [FLAT, RESHARDABLE])
def test_two_ranks_to_four_and_back(sharding: str, saved: Path):
    """States are the same numbers, and the bytes saved at the end, manifest included, are those
    saved at the beginning."""
    before, after = (_contents(saved / name / sharding) for name in ("2", "back"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = (
            torch.equal(value, after[key])
            if isinstance(value, torch.Tensor)
            else (value == after[key])
        )
        assert same, key


def _load_and_save(station: Station, source: Path, target: Path) -> None:
    for sharding in (FLAT, RESHARDABLE):
        journey = Journey(station).scramble().load(source / sharding)
        journey.save(target / sharding, sharding)
        assert journey.check()


def _contents(folder: Path) -> dict[str, object]:
    """Return every tensor of a checkpoint whole, and the objects that are ours."""
    from moe_optim.checkpoint.files.torch_dist import TorchDistReader

    stored = TorchDistReader(folder)
    tensors = {key: stored.read(key) for key in stored.tensors}
    manifests = {key: stored.read_object(key) for key in stored.objects if "moe_optim" in key}
    assert manifests
    for linear in ("linear_fc1", "linear_fc2"):  # never quantized bytes (B10)
        weights = tensors[f"decoder.layers.mlp.experts.experts.{linear}.weight"]
        assert weights.dtype == torch.bfloat16
    return {**tensors, **manifests}


def _reversed_experts(folder: Path) -> tuple[int, int]:
    """Save with Megatron's optimizer in one layout, load in the other: count wrong and reversed."""
    Journey(GROUPED.but(format="bf16", stock=True)).fill().save(folder, FLAT)
    journey = Journey(INDEXED.but(format="bf16", stock=True)).scramble().load(folder)
    wrong = swapped = 0
    (part,) = journey.parts
    for param, place in journey.model.places.items():
        layer, linear, kind, expert = place
        group, order = part.model_param_group_index_map[param]
        master = part.optimizer.param_groups[group]["params"][order]
        if linear == "dense":
            continue
        wrong += not torch.equal(master.view(param.shape), journey.local_part(param))
        swapped += any(
            torch.equal(master.view(other.shape), journey.local_part(other))
            for other, (_, _, _, its) in journey.model.places.items()
            if other.shape == param.shape and its != expert
        )
    return wrong, swapped


def test_megatron_swaps_experts_of_flat_states_in_silence(found):
    """Why manifests are needed (F6, B1): stock loads another layout's states without an error, and
    experts get each other's masters."""
    ((wrong, swapped),) = found(1, "swapped")
    assert wrong == 16  # two linears of four experts in two layers
    assert swapped > 0


STOCK_GROUPED, STOCK_INDEXED = (
    station.but(format="bf16", stock=True) for station in (GROUPED, INDEXED)
)
UNMARKED = {  # ranks -> pairs of stations
    1: (
        # a parameter an expert, fc1 beside fc2
        (STOCK.but(biases=True), GROUPED.but(format="nvfp4", biases=True)),
        # a parameter an expert, all of fc1 first
        (STOCK_INDEXED.but(biases=True), GROUPED.but(biases=True)),
        # a parameter for all experts
        (STOCK_GROUPED, INDEXED),
    ),
    3: (
        (STOCK.but(bucket_size=MANY_BUCKETS), GROUPED),
        (STOCK_INDEXED.but(bucket_size=MANY_BUCKETS, biases=True), INDEXED.but(biases=True)),
    ),
    4: (
        (STOCK.but(tp=2, etp=1, ep=2), GROUPED.but(tp=2, etp=1, ep=2)),
        (STOCK.but(pp=2), INDEXED.but(pp=2)),
    ),
}  # fmt: skip


def _load_unmarked(pairs: Sequence[tuple[Station, Station]], folder: Path) -> list[int]:
    """Save each first station with Megatron's optimizer, and load it into the second."""
    counts = []
    for number, (stock, ours) in enumerate(pairs):
        Journey(stock).fill().save(folder / str(number), FLAT)
        counts.append(Journey(ours).scramble().load(folder / str(number)).check())
    return counts


def test_flat_states_without_a_manifest_arrive_in_every_layout(found):
    """Nothing says in which order Megatron had its experts: it follows from where stored pieces
    begin and end, and is shown by masters that round to the weights beside them."""
    for ranks in UNMARKED:
        assert all(map(all, found(ranks, "unmarked")))


def _refused(load: Callable[[], object]) -> str:
    try:
        load()
    except LayoutError as error:
        return str(error)
    return ""


TRUSTING = GROUPED.but(knobs=(("trust_unmarked_states", True),))
WITH_WHAT_WROTE_IT = (
    "Load it in the program that wrote it and save it with --dist-ckpt-optim-fully-resh"
)
WEIGHTS_ALONE = "oad only the weights (--no-load-optim)."


def _follow_advice(folder: Path) -> dict[str, str]:
    """Return what is said of flat states, having done what it advises."""
    said = {}

    def journey(station: Station) -> Journey:
        return Journey(station).scramble()

    def save_by_name(stock: Station, name: str) -> None:
        journey(stock).load(folder / name).save(folder / f"{name} by name", RESHARDABLE)
        assert journey(GROUPED).load(folder / f"{name} by name").check()

    def weights_alone(name: str) -> None:
        loaded = journey(GROUPED).load_weights(folder / name)
        loaded.optimizer.reload_model_params()
        assert loaded.check_masters_of_weights()

    Journey(STOCK).fill().save(folder / "stock", FLAT)
    said["no weights"] = _refused(lambda: journey(GROUPED).load(folder / "stock", alone=True))
    assert journey(GROUPED).load(folder / "stock").check()
    assert journey(TRUSTING).load(folder / "stock", alone=True).check()
    for order in ("fc2 first", "expert 3 first"):  # by pieces, by values
        fork = STOCK.but(order=order)
        Journey(fork).fill().save(folder / order, FLAT)
        for station in (GROUPED, TRUSTING):
            said[f"{order}, {station.knobs}"] = _refused(
                lambda station=station, order=order: journey(station).load(folder / order)
            )
        save_by_name(fork, order)
        weights_alone(order)
    return said


def test_advice_on_flat_states_without_a_manifest_works_when_it_is_followed(found):
    """Sizes alone are trusted where the error says so, and no further: values that contradict them
    are refused with the knob, too."""
    (said,) = found(1, "advice")
    no_weights = said.pop("no weights")
    assert "without the sharded state of the model. Give it that." in no_weights
    assert "Or set moe_optim.trust_unmarked_states=true" in no_weights
    assert len(said) == 4
    for order, message in said.items():
        by_size = order.startswith("fc2")
        got = "laid out otherwise" if by_size else "got others at decoder.layers.0.mlp.experts"
        assert got in message
        assert WITH_WHAT_WROTE_IT in message and WEIGHTS_ALONE in message
        assert "trust_unmarked_states" not in message


def _load_quantized_unmarked(folder: Path) -> list[str]:
    """Save quantized weights without a manifest, as Megatron saves its own, in two orders."""
    said = []
    for order in ("Megatron's", "weight 3 first"):
        saver = INDEXED.but(order=order)
        Journey(saver).fill().save(folder / order, FLAT, marked=False)
        journey = Journey(GROUPED).scramble()
        message = _refused(lambda journey=journey, order=order: journey.load(folder / order))
        said.append(message)
        assert message or journey.check()
    return said


def test_masters_of_quantized_weights_are_known_by_being_close(found):
    """Weights that were quantized when they were saved are no masters rounded to bf16."""
    for fits, other in found(2, "quantized"):
        assert fits == ""
        assert "got others at decoder.layers." in other


def _load_into_members(folder: Path) -> int:
    Journey(STOCK).fill().save(folder, FLAT)
    journey = Journey(GROUPED.but(format="bf16")).scramble()
    _members(journey)
    return journey.load(folder, strict="raise_all").check()


def test_a_parameter_saved_as_an_entry_an_expert_is_compared_with_all_of_them(found):
    """As Transformer Engine saves a grouped weight; and a strict load misses nothing."""
    assert all(found(1, "into members"))


def _follow_advice_on_padded_buckets(folder: Path) -> str:
    fork = STOCK.but(order="expert 3 first", bucket_size=MANY_BUCKETS)
    Journey(fork).fill().save(folder, FLAT)
    said = _refused(lambda: Journey(GROUPED).scramble().load(folder))
    loaded = Journey(GROUPED).scramble().load_weights(folder)
    loaded.optimizer.reload_model_params()
    assert loaded.check_masters_of_weights()
    return said


def test_what_megatron_would_save_shifted_is_not_advised(found):
    """On 3 ranks buckets are padded; see test_padding_between_buckets_shifts_nothing."""
    for said in found(3, "advice"):
        assert said.endswith(WEIGHTS_ALONE) and "reshardable" not in said


def _follow_advice_on_sizes(folder: Path) -> tuple[str, int]:
    Journey(STOCK.but(ep=2)).fill().save(folder / "stock", FLAT)
    said = _refused(lambda: Journey(GROUPED).scramble().load(folder / "stock"))
    Journey(INDEXED.but(ep=2)).scramble().load(folder / "stock").save(folder / "new", RESHARDABLE)
    return said, Journey(GROUPED).scramble().load(folder / "new").check()


def test_other_parallel_sizes_are_reached_through_those_that_were_saved(found):
    for said, count in found(2, "sizes"):
        assert "got those of chained_0.optimizer.distributed.dp_group_idx_0" in said
        assert "parallel sizes they were saved with" in said and "loads at any sizes" in said
        assert count


def _padded_in_stock(folder: Path) -> list[str]:
    """Return what is wrong after Megatron's own fully reshardable save of padded buckets."""
    station = STOCK.but(bucket_size=MANY_BUCKETS)
    said = []
    for name, saver in (("stock", station), ("ours", station.but(stock=False))):
        Journey(saver).fill().save(folder / name, RESHARDABLE)
        try:
            Journey(station).scramble().load(folder / name).check()
            said.append("")
        except AssertionError as error:
            said.append(str(error))
    return said


def test_padding_between_buckets_shifts_nothing(found):
    """On 3 ranks, where buckets are padded, Megatron 0.19 saves shifted states; ours are right, and
    Megatron loads them."""
    pairs = found(3, "padded")
    is_faulty = satisfies(find_package("megatron-core").version, "<0.20")
    assert any(stock for stock, _ in pairs) == is_faulty
    assert not any(ours for _, ours in pairs)


def _mixed_groups(folder: Path) -> list[str]:
    said = []
    for stock in (True, False):
        station = STOCK.but(fp32_dense=True, stock=stock)
        try:
            journey = Journey(station).fill()
            journey.save(folder / str(stock), RESHARDABLE)
            Journey(station).scramble().load(folder / str(stock)).check()
            said.append("")
        except (AssertionError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_groups_of_fp32_and_bf16_parameters_keep_their_states_apart(found):
    """F7, B8: in a group of both, Megatron takes one parameter's states for another's."""
    from megatron.core.optimizer import OptimizerConfig

    ((stock, ours),) = found(1, "mixed groups")
    is_repaired = hasattr(OptimizerConfig, "chunked_optimizer_state_offload")  # on its dev branch
    assert bool(stock) != is_repaired
    assert not ours


def _members(journey: Journey) -> None:
    """Make the model save its grouped weights as Transformer Engine does: an entry an expert."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    stock = journey.model.sharded_state_dict

    def sharded_state_dict(metadata=None):
        state = stock(metadata=metadata)
        for name, entry in list(state.items()):
            if not name.endswith(("linear_fc1.weight", "linear_fc2.weight")):
                continue
            del state[name]
            (layer,) = {name.split(".")[2]}
            for expert, part in enumerate(entry.data.detach().unbind(0)):
                state[f"{name}{expert}"] = ShardedTensor.from_rank_offsets(
                    entry.key,
                    part,
                    (0, int(layer), 2),
                    (1, expert, 4),
                    prepend_axis_num=2,
                    replica_id=(0, 0, 0),
                )
        return state

    journey.model.sharded_state_dict = sharded_state_dict


def _save_members(folder: Path) -> list[str]:
    said = []
    for stock in (True, False):
        journey = Journey(GROUPED.but(format="bf16", stock=stock)).fill()
        _members(journey)
        try:
            journey.save(folder / str(stock), RESHARDABLE)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    back = Journey(GROUPED.but(format="bf16")).scramble()
    _members(back)
    assert back.load(folder / "False").check()
    assert Journey(INDEXED.but(format="bf16")).scramble().load(folder / "False").check()
    return said


def test_one_parameter_saved_as_an_entry_an_expert_finds_its_states(found):
    """F5, B2: Megatron cannot save such a parameter fully reshardable; ours can, and the
    checkpoint is the same as of one parameter an expert."""
    ((stock, ours),) = found(1, "members")
    assert "not in model_sharded_state_dict" in stock
    assert ours == ""


def _save_files(journey: Journey, path: Path) -> None:
    """Save all states to a file an optimizer, as ``--ckpt-format torch`` does."""
    for number, part in enumerate(journey.parts):
        part.save_parameter_state(f"{path}-{number}.pt")
    torch.distributed.barrier()


def _load_files(journey: Journey, path: Path) -> None:
    for number, part in enumerate(journey.parts):
        part.load_parameter_state(f"{path}-{number}.pt")


def _legacy(folder: Path) -> list[int]:
    counts = []
    for number, (first, second) in enumerate(
        (
            (INDEXED.but(bucket_size=MANY_BUCKETS), GROUPED),
            (INDEXED.but(format="bf16"), GROUPED),  # experts and the rest in one buffer, then two
        )
    ):
        path = folder.with_name(f"legacy {number}")
        _save_files(Journey(first).fill(), path)
        journey = Journey(second).scramble()
        _load_files(journey, path)
        counts.append(journey.check())
    return counts


def test_legacy_files_arrive_in_another_layout_by_their_manifest(found):
    """One file of whole buffers (B9: also where the buffers of the two runs are not the same)."""
    for counts in found(2, "legacy"):
        assert all(counts)


def _load_unmarked_files(
    pairs: Sequence[tuple[Station, Station]], folder: Path
) -> list[tuple[str, int]]:
    """Load files of Megatron's optimizer: before the weights beside them, which is refused, then
    behind them."""
    found = []
    for number, (first, second) in enumerate(pairs):
        path = folder / str(number)
        stock = Journey(first).fill()
        stock.save(path, FLAT)
        _save_files(stock, path)
        journey = Journey(second).scramble()
        said = _refused(partial(_load_files, journey, path))
        journey.load_weights(path)
        _load_files(journey, path)
        found.append((said, journey.check()))
    return found


UNMARKED_FILES = {
    1: (
        (STOCK_GROUPED, INDEXED.but(format="bf16")),
        (STOCK.but(biases=True), GROUPED.but(format="nvfp4", biases=True)),
    ),
    3: ((STOCK.but(bucket_size=MANY_BUCKETS), GROUPED.but(bucket_size=MANY_BUCKETS)),),
}  # fmt: skip


def test_legacy_files_without_a_manifest_arrive_behind_their_weights(found):
    """Megatron loads the weights first; they show whose the masters are. Without them nothing
    does, and they are asked for."""
    for ranks, pairs in UNMARKED_FILES.items():
        for of_rank in found(ranks, "unmarked files"):
            assert len(of_rank) == len(pairs)
            for said, count in of_rank:
                assert "Load the weights of the same checkpoint first" in said
                assert "trust_unmarked_states" not in said
                assert count


def _load_equal_experts(folder: Path) -> str:
    """Load a file of Megatron's optimizer behind its weights, all of which are the same number."""
    stock = Journey(STOCK).fill()
    for _, _, states in _owned_of(stock):
        states["param"].fill_(0.5)
    stock._write_weights()
    stock.save(folder, FLAT)
    _save_files(stock, folder)
    journey = Journey(GROUPED).scramble().load_weights(folder)
    return _refused(partial(_load_files, journey, folder))


def test_states_whose_weights_fit_several_orders_are_refused(found):
    """Their masters do not show which moments are whose."""
    (said,) = found(1, "equal experts")
    assert re.search(r"got [2-9] orders in which they do", said)


def _refusals(folder: Path) -> dict[str, str]:
    said = {}

    def refused(name, act, error=LayoutError):
        try:
            act()
            said[name] = "not refused"
        except error as raised:
            said[name] = str(raised)

    Journey(GROUPED.but(ep=2)).fill().save(folder / "ep2", FLAT)
    refused("other experts", lambda: Journey(INDEXED.but(ep=1)).load(folder / "ep2"))
    journey = Journey(GROUPED).fill()
    model = journey.model.sharded_state_dict(metadata={"dp_cp_group": journey.groups.dp_cp})
    for sharding in (FLAT, RESHARDABLE):
        other = folder / f"interleaved {sharding}"
        Journey(GROUPED.but(interleave=32)).fill().save(other, sharding)
        refused(f"interleave {sharding}", lambda other=other: Journey(INDEXED).load(other))
    refused("no type", lambda: journey.parts[0].sharded_state_dict(model), ConfigError)
    for _, _, states in _owned_of(journey):
        states["param"].view(-1)[3] = torch.nan
        break
    refused("NaN", lambda: journey.save(folder / "nan", RESHARDABLE), NonFiniteError)
    refused("NaN in a file", lambda: journey.parts[0].save_parameter_state("x"), NonFiniteError)
    said["nothing written"] = str(not (folder / "nan" / "metadata.json").exists())
    forced = Journey(GROUPED.but(knobs=(("save_nonfinite", True),))).fill()
    for _, _, states in _owned_of(forced):
        states["exp_avg"].view(-1)[3] = torch.nan
        states["param"].view(-1)[3] = torch.inf
        break
    forced.save(folder / "forced", RESHARDABLE)
    said["forced"] = str((folder / "forced" / "metadata.json").exists())
    return said


def _owned_of(journey: Journey):
    for part in journey.parts:
        yield from owned_states(part)


def test_what_would_be_wrong_is_refused_on_every_rank(found):
    for said in found(2, "refusals"):
        assert "expected flat optimizer states" in said["other experts"]
        assert "chained_1.optimizer.distributed.dp_group_idx_1" in said["other experts"]
        for sharding in (FLAT, RESHARDABLE):
            assert "expected None as in this model, got 32" in said[f"interleave {sharding}"]
        assert "dp_reshardable or fully_reshardable" in said["no type"]
        for name in ("NaN", "NaN in a file"):
            assert "data-parallel rank 0" in said[name] and "save_nonfinite" in said[name]
        assert said["nothing written"] == said["forced"] == "True"
