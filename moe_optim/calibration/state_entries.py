"""Checkpoint entries of recorded and calibrated amaxes of experts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from torch import Tensor
from torch.nn import Module

from moe_optim.calibration.calibrated_amax import (
    BUFFERS,
    calibrated_amax,
    calibrated_input_amax,
    held_amaxes,
    local_amaxes,
    move_amaxes,
    take_calibrated_amaxes,
)
from moe_optim.calibration.linears import (
    LinearRecorder,
    expert_linears,
    grouped_linears,
    recorder_of,
    unknown_wrapper,
)
from moe_optim.errors import LayoutError, refuse
from moe_optim.experts.keys.layouts import CALIBRATED_AMAX, CALIBRATED_INPUT_AMAX, LINEARS
from moe_optim.formats import get_format
from moe_optim.integration.agreement import gather_objects
from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_config
from moe_optim.rules import native_formats, native_recipe
from moe_optim.weights.names import BASE, base_of, is_wrapper, unwrapped_name
from moe_optim.weights.recorded_amax import RecordsAmax

_TARGET = "megatron.core.transformer.moe.experts:TEGroupedMLP.sharded_state_dict"
_RECORDED = "weight_amax"
_LISTENING: WeakSet[Module] = WeakSet()

Offset = tuple[int, int, int]  # axis of the global tensor, index on it, number of indices


class AmaxPlace(NamedTuple):
    """Position of a linear's local experts among those of all ranks."""

    num_experts: int  # number of local experts
    sharded_offsets: tuple[Offset, ...]  # offsets of the axes before the expert axis
    ep: tuple[int, int]  # rank in the expert-parallel group, and the group's size
    tp: tuple[int, int]  # the same of the expert tensor parallel group
    dp: tuple[int, int]  # the same of the expert data parallel group

    @classmethod
    def of(cls, num_experts: int, sharded_offsets: tuple[Offset, ...], groups: Any) -> "AmaxPlace":
        """Return the position of this rank's experts, from ``ep``, ``expt_tp`` and ``expt_dp``."""
        three = groups.ep, groups.expt_tp, groups.expt_dp
        sizes = ((group.rank(), group.size()) for group in three)
        return cls(num_experts, tuple(sharded_offsets), *sizes)

    def entry(
        self, key: str, amax: Tensor, *, per_expert: bool, kind: type[ShardedTensor] = ShardedTensor
    ) -> ShardedTensor:
        """Return the entry of amaxes [E, 1, 1] under global expert ids, or of one for all experts.

        One replica saves each expert's amax; a single rank saves an amax of all experts.
        """
        axis = len(self.sharded_offsets)
        return kind.from_rank_offsets(
            key,
            amax,
            *self.sharded_offsets,
            *(((axis, *self.ep),) if per_expert else ()),
            replica_id=(0 if per_expert else self.ep[0], self.tp[0], self.dp[0]),
            prepend_axis_num=axis,
        )


@dataclass
class OptionalShardedTensor(ShardedTensor):
    """A tensor that a checkpoint may lack; then live values are kept."""


@dataclass(kw_only=True)
class CalibratedEntry(ShardedTensor):
    """Calibrated amaxes of a linear.

    Keys are enumerated for a load before the contents of the checkpoint are known. The load of this
    package calls :meth:`request` if the key is stored, and otherwise drops the entry. Its save
    calls :func:`complete_amaxes`.
    """

    amax_place: AmaxPlace
    device: torch.device
    per_expert: bool  # whether there is one value per expert, and not one of all or of inputs

    def request(self, stored: Sequence[int]) -> ShardedTensor:
        """Return the entry that loads amaxes of shape ``stored``, on the device of the weights.

        LayoutError if the checkpoint has another number of experts.
        """
        place = self.amax_place
        whole = place.ep[1] * place.num_experts
        of_experts = tuple(stored[len(place.sharded_offsets) :])
        per_expert = of_experts == (whole, 1, 1)
        if not per_expert and of_experts != (1, 1, 1):
            raise LayoutError(
                f"{self.key}: expected amaxes of {whole} experts, or one of all, got "
                f"{list(stored)}. Load a checkpoint of as many experts."
            )
        shape = (place.num_experts if per_expert else 1, 1, 1)
        amax = torch.empty(shape, dtype=torch.float32, device=self.device)
        return place.entry(self.key, amax, per_expert=per_expert)


@dataclass(kw_only=True)
class _Uncalibrated(CalibratedEntry, LocalNonpersistentObject):
    """Entry of an uncalibrated linear: saves nothing, and loads None.

    Code can rename its key like a tensor's; Megatron removes it before it reads tensors.
    """

    obj = None


def amax_entries(
    linear: Module, key: str, place: AmaxPlace, *, are_recorded: bool
) -> dict[str, ShardedTensor]:
    """Return the entries of a linear's amaxes by name: of :data:`BUFFERS`, and ``weight_amax``.

    No rank communicates; tensors are copies. ``are_recorded`` adds the entry of recorded amaxes,
    NaN if there are none.
    """
    entries: dict[str, ShardedTensor] = {
        buffer: calibrated_entry(linear, f"{key}.{buffer}", place) for buffer in BUFFERS
    }
    if are_recorded:
        entries[_RECORDED] = sharded_amax(recorder_of(linear), f"{key}.{_RECORDED}", place)
    return entries


def sharded_amax(recorder: RecordsAmax, key: str, place: AmaxPlace) -> ShardedTensor:
    """Return the entry of recorded amaxes, [local experts, 1, 1] fp32, under global expert ids.

    NaN, which a load ignores, marks unknown amaxes: not recorded, or of experts sharded by tensor
    parallelism without :func:`synchronize_amax` since the last write of the weights.
    """
    amax, whole = recorder.amax(), recorder.whole_amax
    if amax is None:
        amax = torch.full((place.num_experts,), torch.nan, dtype=torch.float32, device="cpu")
    if whole is not None:
        amax = whole
    elif place.tp[1] > 1:
        amax = torch.full_like(amax, torch.nan)
    values = amax.clone().view(-1, 1, 1)
    return place.entry(key, values, per_expert=True, kind=OptionalShardedTensor)


def calibrated_entry(linear: Module, key: str, place: AmaxPlace) -> CalibratedEntry:
    """Return the entry of the calibrated amaxes of weights or inputs, also if there are none."""
    is_of_inputs = key.endswith(CALIBRATED_INPUT_AMAX)
    amax = (calibrated_input_amax if is_of_inputs else calibrated_amax)(linear)
    if amax is None:
        count = 1 if is_of_inputs else place.num_experts
        values = torch.full((count, 1, 1), torch.nan, dtype=torch.float32, device="cpu")
    else:
        values = amax.clone()
    per_expert = not is_of_inputs and len(values) == place.num_experts
    kind = CalibratedEntry if amax is not None else _Uncalibrated
    return kind(
        **vars(place.entry(key, values, per_expert=per_expert)),
        amax_place=place,
        device=next(linear.parameters()).device,
        per_expert=per_expert,
    )


def complete_amaxes(state: Any) -> None:
    """Complete calibrated amaxes of a nested state about to be saved, in place.

    Every rank must call it. Layers can be one tensor in a checkpoint: if a linear of one layer has
    amaxes, those without get NaN. One amax of all experts becomes one per expert, if other layers
    have one per expert, or other ranks another value. All raise LayoutError if an amax of inputs
    differs between ranks.
    """
    held: dict[tuple[str, Any], float | None] = {}
    for one in nested_values(state):
        if isinstance(one, CalibratedEntry) and not isinstance(one, _Uncalibrated):
            assert one.data is not None
            value = None if one.per_expert else one.data.item()
            held[one.key, one.amax_place.sharded_offsets] = value
    ranks = gather_objects(held, None)
    values: dict[tuple[str, Any], set[float | None]] = {}
    for place, value in (item for of_rank in ranks for item in of_rank.items()):
        values.setdefault(place, set()).add(value)
    per_expert: dict[str, bool] = {}
    for (key, _), found in values.items():
        if key.endswith(CALIBRATED_INPUT_AMAX) and len(found) > 1:
            raise LayoutError(
                f"{key}: expected one amax on all ranks, got {sorted(map(str, found))}. Set the "
                "largest of them everywhere, or calibrate inputs anew."
            )
        per_expert[key] = per_expert.get(key, False) or None in found or len(found) > 1

    def complete(one: Any) -> Any:
        if not isinstance(one, CalibratedEntry) or one.key not in per_expert:
            return one
        assert one.data is not None
        count = one.amax_place.num_experts if per_expert[one.key] else 1
        values = one.data[:count].expand(count, 1, 1).contiguous()
        return one.amax_place.entry(one.key, values, per_expert=per_expert[one.key])

    dict_list_map_inplace(complete, state)


def synchronize_amax(model_chunks: Iterable[Module]) -> None:
    """Reduce recorded amaxes of experts that tensor parallelism shards, before a save.

    Every rank must call it; the state dict is then built without communication. Reduces with MAX
    over each layer's ``expt_tp`` group; does nothing for unsharded experts.

    Args:
        model_chunks: chunks of this rank, wrapped or not.
    """
    for chunk in model_chunks:
        for linear in expert_linears(chunk):
            recorder, expt_tp = linear.recorder, linear.groups.expt_tp
            amax = recorder.amax()
            if amax is not None and expt_tp.size() > 1:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=expt_tp)
                if recorder.whole_amax is None:  # else loaded from a checkpoint
                    recorder.whole_amax = amax


def sharded_state_dict(
    self: Any,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: dict[str, Any] | None = None,
) -> Any:
    """Return Megatron's state of the experts, with the amax entries of portable experts.

    If amaxes are recorded, every layer has a ``.weight_amax`` entry, NaN if its weights are not
    quantized, since the keys of all layers may form one tensor. Calibrated ones are
    ``.calibrated_amax`` and ``.calibrated_input_amax``. Loading a state dict sets them. Keys of
    linears behind adapters do not contain the adapter. No rank communicates. ConfigError for
    ``singleton_local_shards`` with amaxes, StateError for offloaded weights.
    """
    are_recorded = _are_recorded(self.config)
    linears = [(unwrapped_name(name), linear) for name, linear in grouped_linears(self)]
    readers = calibrated_amax, calibrated_input_amax
    are_calibrated = any(of(linear) is not None for _, linear in linears for of in readers)
    for name, _ in linears if are_recorded or are_calibrated else ():
        if name not in LINEARS:  # no model without the wrapper would request such keys
            outer = name.partition(".")[0]
            raise unknown_wrapper(f"experts.{outer}", self.get_submodule(outer))
    has_key_each = (metadata or {}).get("singleton_local_shards", False)
    if has_key_each:
        refuse(
            {"record_amax": are_recorded, "calibrated amaxes": are_calibrated},
            expected="singleton_local_shards: expected one key for the amaxes of all experts",
            remedy="Save with Megatron's default metadata.",
        )
    for storage in (one for _, linear in linears for one in recorder_of(linear).storages()):
        storage.require_present()
    state = original(_TARGET)(self, prefix, sharded_offsets, metadata)
    for name, linear in () if has_key_each else linears:
        place = AmaxPlace.of(linear.num_gemms, sharded_offsets, linear._pg_collection)
        entries = amax_entries(linear, f"{prefix}experts.{name}", place, are_recorded=are_recorded)
        state |= {f"{prefix}{name}.{kind}": entry for kind, entry in entries.items()}
    listen(self)
    return state


def listen(module: Module) -> None:
    """Hook a module's grouped linears to load amaxes with their weights, through adapters too.

    Casts of the linears then leave calibrated amaxes fp32.
    """
    linears = [linear for _, linear in grouped_linears(module)]
    for linear in linears:
        linear._apply = _Apply(linear)
    wrappers = [one for one in module.modules() if is_wrapper(one)]
    hooks: list[tuple[Module, Callable[..., None]]] = [
        (wrapper, _pass_on)
        for wrapper in wrappers
        if any(linear is base_of(wrapper) for linear in linears)
    ]
    hooks += [(linear, _take) for linear in linears]
    for one, hook in hooks:
        if one not in _LISTENING:
            one.register_load_state_dict_pre_hook(hook)
            _LISTENING.add(one)


class _Apply:
    """``_apply`` of one linear, which casts all but calibrated amaxes.

    Its copies are those of copies of the linear, which goes with its last other reference.
    """

    def __init__(self, linear: Module) -> None:
        self._linear = ref(linear)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Apply, (self._linear(),)

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        linear: Any = self._linear()
        amaxes = held_amaxes(linear)
        type(linear)._apply(linear, fn, recurse)
        move_amaxes(linear, amaxes, fn)
        return linear


def _are_recorded(model: Any) -> bool:
    config = installed_config()
    if config is None:
        return False
    config = config.resolved((*native_formats(native_recipe(model)), "bf16")[0])
    if config.format == "bf16":
        return False
    return config.record_amax or get_format(config.format).has_global_amax


def _pass_on(_wrapper: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in (_RECORDED, *BUFFERS):
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}{BASE}.{name}"] = state_dict.pop(f"{prefix}{name}")


def _take(linear: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    recorder = recorder_of(linear)
    assert isinstance(recorder, LinearRecorder)
    recorder.forget_amax()
    recorder.take_amax(state_dict.pop(f"{prefix}{_RECORDED}", None))
    name, key = prefix.removesuffix(".") or recorder.name, f"{prefix}{CALIBRATED_AMAX}"
    if isinstance(found := state_dict.get(key), Tensor):
        ep = linear._pg_collection.ep
        state_dict[key] = local_amaxes(found, linear.num_gemms, (ep.rank(), ep.size()))
    take_calibrated_amaxes(linear, state_dict, prefix, linear.num_gemms, name)
