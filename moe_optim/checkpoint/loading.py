"""Hooks into Megatron's loading: checkpoints are opened here, and states fitted to what they hold.

A load opens a torch_dist checkpoint in this package, reads manifests, and drops requests for
optional entries that the checkpoint lacks; what Megatron then reads is checked as it is read.
States that this package did not produce pass unchanged.

Megatron reads ``common.pt`` and ``--ckpt-format torch`` with ``weights_only``, which runs no code.

States that Megatron saves whole, without ``--use-distributed-optimizer`` or of Muon, are keyed by
parameter name like ``fully_reshardable`` ones, except for the keys of masters, and for the number
of their optimizer where ``dp_reshardable`` is the sharding type:

    optimizer.state.fp32_param.NAME
    chained_0.optimizer.state.momentum_buffer.NAME

Muon's layer-wise optimizer steps the matrices. Where it lays out buffers, the other parameters have
a distributed optimizer, whose states are flat beside them. Megatron's distributed optimizer loads
none of these checkpoints.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag
from torch.distributed.checkpoint.api import CheckpointException

from moe_optim import checkpoint
from moe_optim.calibration.state_entries import CalibratedEntry, OptionalShardedTensor
from moe_optim.checkpoint.files.folders import TRACKER, is_local, iteration_of
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.flat_states import (
    ManifestRequest,
    flat_states_to_load,
    require_same_interleave,
)
from moe_optim.checkpoint.integrity import require_intact
from moe_optim.checkpoint.load_session import (
    differing_arguments,
    end_session,
    get_filesystem_reader,
    misfits,
    of_another_model,
    open_alone,
    open_session,
    own_errors,
    reading,
    require_same_tensors,
    together,
)
from moe_optim.checkpoint.staging import plan_quickly, replaced
from moe_optim.checkpoint.state_manifest import (
    BY_NAME,
    BY_NAME_KEY,
    MANIFEST,
    MASTER,
    MOMENTUM,
    SHARDING_TYPE,
    WHOLE_MASTER,
    StateManifest,
    flat_groups,
    require_same_optimizer,
    state_kinds,
    states_with_manifests,
)
from moe_optim.errors import LayoutError, StateError, listed, shorten
from moe_optim.integration.agreement import (
    agree,
    announce,
    failing_together,
    gather_objects,
    meet,
)
from moe_optim.integration.engine import original
from moe_optim.integration.installation import (
    config_or_bf16,
    installed_config,
    installed_optimizer,
)
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.partial_loads import expect_agreement, replacing

_ACCOUNTED = "moe_optim_accounted"
_OBJECT_KEY = re.compile(r"[^/]+/shard_[0-9.]+_[0-9.]+")
_GROUPS = r"chained_{}\.optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.*"
"""Key of the parameter groups of an optimizer by number, where they are an object."""
_CORE = "megatron.core.dist_checkpointing"
_TRAINING = "megatron.training"
_ONE_FOLDER = "Name a folder that all nodes share, or copy the whole of it to every node."
_TENSORS_METADATA = f"{_CORE}.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata"


def load(  # noqa: PLR0913  # Megatron's
    sharded_state_dict: Any,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: Any = None,
) -> Any:
    """Load a distributed checkpoint; arguments and result are Megatron's. Every rank must call it.

    Tensors are read into the memory of weights and states, so a load that raises while it reads
    leaves some of them replaced, which the next step or save refuses, until another load ends.

    Raises:
        StateError: files of the checkpoint are missing or damaged; lists all of them.
        LayoutError: flat optimizer states have other parameters, or an order that cannot be
            derived; gate and up are interleaved differently; or objects are not plain data.
    """
    stored, handling = None, parse_strict_flag(strict)
    if process_group is None:
        expect_agreement()
    requesting = list(states_with_manifests(sharded_state_dict))
    if not is_local(checkpoint_dir):
        for state in requesting:  # Megatron loads manifests; they are compared with the states
            asked = state[MANIFEST]
            form = asked.global_shape, asked.global_offset, asked.replica_id
            state[MANIFEST] = ShardedObject(asked.key, None, *form)
    elif installed_config() is not None or requesting:
        stored = open_session(Path(checkpoint_dir), process_group)

    def fit() -> None:
        if stored is not None:
            may_lack = handling != StrictHandling.ASSUME_OK_UNEXPECTED
            require_same_tensors(nested_values(sharded_state_dict), stored, may_lack=may_lack)
            if requesting:
                _fit_states(requesting, stored)
        _fit_entries(sharded_state_dict, stored)  # last: states are found by their weights

    fit() if stored is None else agree(fit, process_group)
    if stored is not None and StrictHandling.requires_global_app_metadata(handling):
        sharded_state_dict = {**sharded_state_dict, _ACCOUNTED: _read_already(stored)}

    def targets() -> Iterator[torch.Tensor]:
        kinds = ShardedTensor | ShardedTensorFactory
        entries = nested_values(sharded_state_dict)
        return (entry.data for entry in entries if isinstance(entry, kinds))

    meets_next = announce(False)
    try:
        with (
            replacing(targets, checkpoint_dir, lambda: stored is not None and stored.has_read),
            reading(stored, process_group, sharded_strategy),
            plan_quickly(),
        ):
            result = original(f"{_CORE}:load")(
                sharded_state_dict,
                checkpoint_dir,
                sharded_strategy,
                validate_access_integrity,
                strict,
                verify_integrity,
                **({} if process_group is None else {"process_group": process_group}),
            )
    finally:
        end_session()
    announce(meets_next)
    state = result[0] if isinstance(result, tuple) else result
    state.pop(_ACCOUNTED, None)
    return result


def _read_already(stored: TorchDistReader) -> dict[str, ShardedObject]:
    """Return requests for the manifests already read, which strict loads expect."""
    rank = dist.get_rank()
    return {
        key: ShardedObject.empty_from_unique_key(key, replica_id=rank)
        for key in stored.objects
        if f".{MANIFEST}." in key and _OBJECT_KEY.fullmatch(key)
    }


def load_common_state_dict(checkpoint_dir: str | Path) -> Any:
    """Load the common state, the first part that is read.

    No rank communicates, except in a load of states: there an error of one rank is raised on all.
    StateError lists all missing or damaged files; LayoutError if the state is not plain data.
    """
    return together(partial(_load_common, checkpoint_dir))


def _load_common(checkpoint_dir: str | Path) -> Any:
    stock = original(f"{_CORE}:load_common_state_dict")
    if installed_config() is None or not is_local(checkpoint_dir):
        return stock(checkpoint_dir)
    folder = Path(checkpoint_dir)
    stored = open_alone(folder)
    if (file := stored.common_file) is not None:
        with stored.opened(file) as archive:
            archive.compare_checksums()  # Megatron opens it itself
    with own_errors():
        try:
            with reading(stored):
                common = stock(checkpoint_dir)
        except CheckpointException:
            raise
        except Exception:  # arbitrary errors of damaged files; report the file if that is the cause
            require_intact(folder, thorough=True)
            raise
    _declare_by_name(common, stored)
    return common


def _declare_by_name(common: dict[str, Any], stored: TorchDistReader) -> None:
    """Declare whole states ``fully_reshardable`` in ``common``, the common state of ``stored``.

    Adds parameter groups of a distributed optimizer beside a layer-wise one, saved as objects.
    """
    content = common.get("content_metadata")
    if not isinstance(content, dict) or WHOLE_MASTER not in state_kinds(stored.tensors):
        return
    content[SHARDING_TYPE] = BY_NAME
    states = common["optimizer"]  # one optimizer's, or a dict of several
    for number, state in [(0, states)] if "optimizer" in states else states.items():
        state["param_state_sharding_type"] = BY_NAME
        if "optimizer" not in state:
            pattern = re.compile(_GROUPS.format(number))
            groups = next((key for key in stored.objects if pattern.fullmatch(key)), None)
            if groups is not None:  # the same in all data-parallel groups
                state["optimizer"] = stored.read_object(groups)


def load_tensors_metadata(self: Any, checkpoint_dir: Path, metadata: Any = None) -> Any:
    """Return the tensors of a checkpoint without data; arguments and result are Megatron's.

    Megatron passes every recorded tensor property to a constructor. torch 2.15 records strides,
    which no constructor accepts, so all strict loads would fail without this hook.
    """
    if metadata is None:
        metadata = get_filesystem_reader(checkpoint_dir).read_metadata()
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):  # a tensor
            vars(entry.properties).pop("strides", None)
    return original(_TENSORS_METADATA)(self, checkpoint_dir, metadata)


def get_checkpoint_format(checkpoint_name: str, args: Any) -> Any:
    """Return the format of a checkpoint and open or verify it; arguments are Megatron's.

    Every rank of an initialized process group must call it: ranks share the reading. StateError
    lists all missing or damaged files, or the formats if ranks have found several.
    """
    stock = partial(original(f"{_TRAINING}.checkpointing:_get_checkpoint_format"), checkpoint_name)
    folder = Path(checkpoint_name)
    if installed_config() is None or not is_local(checkpoint_name):
        return stock(args)
    if not dist.is_initialized():  # only arguments are read
        found = stock(args)
        if found == "torch":
            require_intact(folder, thorough=False)
        return found
    found, *others = gather_objects(agree(partial(stock, args), None), None)
    if set(others) - {found}:
        raise StateError(
            f"{folder}: expected a checkpoint of one format on all ranks, got {found} on rank 0, "
            f"others elsewhere. {_ONE_FOLDER}"
        )
    if found == "torch":
        expect_agreement()
        thorough = config_or_bf16().check_on_load != "quick"
        part, parts = dist.get_rank(), dist.get_world_size()
        agree(partial(require_intact, folder, thorough=thorough, part=part, parts=parts), None)
    elif found == "torch_dist":
        open_session(folder, None)
    announce(found in ("torch", "torch_dist"))
    return found


def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint; arguments and result are Megatron's. Every rank must call it.

    An error of one rank is raised on all, except where Megatron's own collectives come next.
    StateError if only some ranks find a checkpoint to load: Megatron has them wait for the others.
    LayoutError for a local or ``--ckpt-format torch`` checkpoint of another model, once Megatron
    fails to load it; the message names the arguments that differ.
    """
    from megatron.training import checkpointing, get_args

    stock = original(f"{_TRAINING}.checkpointing:load_checkpoint")
    given = inspect.signature(stock).bind(*args, **kwargs).arguments
    manager = (given.get("checkpointing_context") or {}).get("local_checkpoint_manager")
    read: list[tuple[Any, Any]] = []
    iterations: dict[Path, int] = {}

    def remember(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state, name, *more = found = stock(*args, **kwargs)
        if checkpointing.CheckpointType.GLOBAL not in more:
            read.append((name, getattr(state, "common", state)))
        if checkpointing.CheckpointType.LEGACY in more and not found[2]:  # folder/iter/mp_rank/file
            folder = Path(name).parents[1]
            iterations[folder.parent] = iteration_of(folder)
        return found

    def follow(stock: Callable[..., Any], tracker: str) -> tuple[int, bool]:
        """Megatron takes states of ``--ckpt-format torch`` from the newest, despite --ckpt-step."""
        newest, is_release = stock(tracker)
        return iterations.get(Path(tracker).parent, newest), is_release

    with (
        failing_together(),
        _meeting(given["optimizer"], manager),
        replaced(checkpointing, "_load_base_checkpoint", remember),
        replaced(checkpointing, "read_metadata", follow),
        replaced(type(manager), "load", remember) if manager else nullcontext(),
    ):
        try:
            if dist.is_initialized():
                _require_same_trackers(get_args(), given.get("load_arg", "load"))
            return stock(*args, **kwargs)
        except (AssertionError, KeyError, LayoutError, RuntimeError) as error:
            name, state = read[-1] if read else (None, None)
            saved = getattr((state or {}).get("args"), "__dict__", {})
            is_other = isinstance(error, StateError | torch.OutOfMemoryError | dist.DistError)
            if is_other or not differing_arguments(saved):
                raise
            raise of_another_model(name, shorten(str(error)), saved) from error


def _require_same_trackers(args: Any, load_arg: str) -> None:
    """Raise StateError on all ranks if only some have the tracker file of a folder to load from."""
    load, apart = getattr(args, load_arg), args.non_persistent_global_ckpt_dir
    flag = f"--{load_arg.replace('_', '-')}"
    named = {flag: load, "--pretrained-checkpoint": getattr(args, "pretrained_checkpoint", None)}
    if args.non_persistent_ckpt_type == "global":
        named["--non-persistent-global-ckpt-dir"] = apart or (load and f"{load}/non_persistent")
    folders = {flag: Path(name) for flag, name in named.items() if name and is_local(name)}
    found = agree(lambda: [flag for flag in folders if _has_tracker(folders[flag])], None)
    everywhere = gather_objects(found, None)
    for flag, folder in folders.items():
        lacking = [str(rank) for rank, flags in enumerate(everywhere) if flag not in flags]
        if 0 < len(lacking) < len(everywhere):
            raise StateError(
                f"{flag} {folder}: expected {TRACKER} on all ranks or on none, got it on "
                f"{len(everywhere) - len(lacking)} of {len(everywhere)}, not on ranks "
                f"{listed(lacking)}. {_ONE_FOLDER}"
            )


def _has_tracker(folder: Path) -> bool:
    """Return whether Megatron finds a checkpoint; StateError where it would exit with status 0."""
    path = folder / TRACKER
    if not path.is_file():
        return False
    said = path.read_text(errors="replace").strip()
    if said != "release" and not said.isdecimal():
        raise StateError(
            f"{path}: expected the iteration to load, got {said[:40]!r}. Write the number of a "
            "complete iteration into it."
        )
    return True


@contextmanager
def _meeting(optimizer: Any, manager: Any) -> Iterator[None]:
    """Have ranks meet before and after Megatron, or ``manager`` of local checkpoints, reads.

    Also when the model is loaded, after ``optimizer`` takes masters from it, and at Megatron's
    barrier.
    """
    from megatron.training import checkpointing

    if not dist.is_initialized():
        yield
        return

    def read(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        meet(meets_next=False)  # until the format is known: Megatron reduces the iteration
        found = stock(*args, **kwargs)
        meet(meets_next=True)
        return found

    def read_local(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        meet(meets_next=True)
        found = stock(*args, **kwargs)
        meet(meets_next=False)  # ranks may exchange what they have read
        return found

    def go_on(stock: Callable[..., Any], *args: Any) -> Any:
        meet(meets_next=optimizer is None or hasattr(optimizer, "stepping"))
        return stock(*args)

    def reload(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        announce(False)  # ranks gather weights
        stock(*args, **kwargs)
        meet(meets_next=True)

    def barrier(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs) if args or kwargs else meet(meets_next=False)

    announce(True)
    with (
        replaced(checkpointing, "_load_base_checkpoint", read),
        replaced(type(manager), "load", read_local) if manager else nullcontext(),
        replaced(checkpointing, "fix_query_key_value_ordering", go_on),
        replaced(type(optimizer), "reload_model_params", reload),
        replaced(dist, "barrier", barrier),
    ):
        yield


def _fit_entries(state: Any, stored: TorchDistReader | None) -> None:
    """Drop requests for optional entries that a checkpoint lacks; fit the others to it.

    Quantized weights are loaded into bf16 memory, which ``load_state_dict`` copies into them; their
    own values are not needed.
    """
    entries = list(state.items() if isinstance(state, dict) else enumerate(state))
    for key, value in reversed(entries):  # so that list indices stay valid
        if isinstance(value, dict | list):
            _fit_entries(value, stored)
            continue
        is_tensor = isinstance(value, ShardedTensor | ShardedTensorFactory)
        if is_tensor and isinstance(value.data, GroupedWeight):
            shape, device = value.data.shape, value.data.device
            value.data = torch.empty(shape, dtype=torch.bfloat16, device=device)
        if stored is None or not isinstance(value, OptionalShardedTensor | CalibratedEntry):
            continue
        if value.key not in stored.tensors:
            del state[key]
        elif isinstance(value, CalibratedEntry):
            state[key] = value.request(stored.tensors[value.key].shape)


def _fit_states(requesting: list[dict[Any, Any]], stored: TorchDistReader) -> None:
    """Fit the states of optimizers, which ask for a manifest, to what a checkpoint holds."""
    where = str(stored.path)
    manifests = [key for key in stored.objects if f".{MANIFEST}." in key]
    kinds = state_kinds(stored.tensors)
    beside = flat_groups(stored.tensors) if WHOLE_MASTER in kinds else []
    optimizers = [state[MANIFEST].requester.optimizer for state in requesting]
    have_matrices = [MOMENTUM in one.optimizer_state_keys for one in optimizers]
    is_muon = installed_optimizer() == "muon"
    require_same_optimizer(kinds, where, is_muon=is_muon, has_matrices=any(have_matrices))
    # all record the same interleave
    saved = [StateManifest.from_dict(stored.read_object(key), key) for key in manifests[:1]]
    for state, optimizer, has_matrices in zip(requesting, optimizers, have_matrices, strict=True):
        request = state.pop(MANIFEST)
        is_flat = request.requester.is_flat
        for any_manifest in saved:
            require_same_interleave(optimizer, any_manifest, where, is_flat=is_flat)
        if is_flat:
            state["param_state"] = _request_flat(request, stored, manifests)
        elif beside and not has_matrices:  # stock's Muon, whose other states are flat
            alike = [group for group in beside if group.endswith(f".{request.group}")]
            request.key = f"{[*alike, request.group][0]}.{MANIFEST}.none"
            state["param_state"] = _request_flat(request, stored, [])
        else:
            fit_by_name(state["param_state"], stored)


def fit_by_name(param_state: Any, stored: TorchDistReader) -> None:
    """Rewrite the keys of requests by name, in place, to those in ``stored``.

    LayoutError if ``stored`` lacks a requested state, or has it in another shape.
    """
    requests = [one for one in nested_values(param_state) if hasattr(one, "global_shape")]
    absent = [request for request in requests if request.key not in stored.tensors]
    found: dict[tuple[str, str], str] = {}
    is_whole = False
    if absent:  # saved whole, or not at all
        found = {_address(key): key for key in stored.tensors if BY_NAME_KEY.fullmatch(key)}
        is_whole = WHOLE_MASTER in state_kinds(stored.tensors)
    for request in absent:
        kind, name = _address(request.key)
        request.key = found.get((kind, name), request.key)
        if is_whole and kind == MASTER and (kind, name) not in found:
            raise LayoutError(
                f"{stored.path}: expected optimizer.state.{WHOLE_MASTER}.{name}, got none: "
                "without --use-distributed-optimizer Megatron saves masters of bf16 and fp16 "
                "weights alone. Load with --no-load-optim."
            )
    if faults := misfits(requests, stored):
        raise LayoutError(
            f"{stored.path}: expected the optimizer states of this model, got others: "
            f"{listed(faults)}. Start with the model that the checkpoint was saved from, or take "
            "the weights alone (--no-load-optim)."
        )


def _address(key: str) -> tuple[str, str]:
    """Return kind of state and parameter name of a key, the same for both names of masters."""
    match = BY_NAME_KEY.fullmatch(key)
    assert match is not None
    return MASTER if match["kind"] == WHOLE_MASTER else match["kind"], match["name"]


def _request_flat(
    request: ManifestRequest, stored: TorchDistReader, manifests: list[str]
) -> dict[str, Any]:
    """Return requests for flat states by one of ``manifests``, or by a derived one without any.

    LayoutError if the manifests are those of other groups.
    """
    group = request.group
    of_group = [key for key in manifests if key.startswith(f"{group}.{MANIFEST}.")]
    exact = [key for key in of_group if key.startswith(f"{request.key}/")]
    if of_group:
        key = [*exact, *of_group][0]
        saved = StateManifest.from_dict(stored.read_object(key), key)
    elif manifests:
        others = sorted({key.partition(f".{MANIFEST}.")[0] for key in manifests})
        raise LayoutError(
            f"{stored.path}: expected flat optimizer states of {group}, got those of "
            f"{', '.join(others)}. Load with the tensor, pipeline and expert parallel sizes they "
            "were saved with, or a checkpoint that was saved fully reshardable "
            "(--dist-ckpt-optim-fully-reshardable)."
        )
    else:
        derive = checkpoint.states_without_manifest.manifest_of_groups_states
        key, saved = derive(request, stored)
    return flat_states_to_load(request.requester.optimizer, saved, key)
