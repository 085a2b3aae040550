"""Hooks into Megatron's saving: what is saved, when it counts as complete, and its checksums.

A save records checksums before it declares a torch_dist checkpoint complete. For ``--ckpt-format
torch``, each rank writes its own files, and Megatron does not record when all are complete: such a
save begins with a checksum manifest that marks the checkpoint unfinished.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from moe_optim.calibration.state_entries import complete_amaxes, synchronize_amax
from moe_optim.checkpoint.files.folders import is_local
from moe_optim.checkpoint.sealing import (
    invalidate,
    mark_unfinished,
    record_checksums,
    record_config,
    record_data,
)
from moe_optim.checkpoint.staging import (
    described,
    plan_quickly,
    replaced,
    replaced_in_writers,
    staging,
)
from moe_optim.checkpoint.state_manifest import BY_NAME, SHARDING_TYPE, states_with_manifests
from moe_optim.errors import StateError, listed
from moe_optim.integration.agreement import (
    agree,
    announce,
    failing_together,
    from_first,
    gather_objects,
    reduce_max,
)
from moe_optim.integration.engine import original
from moe_optim.integration.installation import installed_config
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.names import BASE, is_wrapper, unwrapped_name
from moe_optim.weights.partial_loads import require_loaded
from moe_optim.weights.te.fields import is_tensorwise, read_values, te_formats_of

_CHECKPOINTING = "megatron.training.checkpointing"
_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_STRATEGIES = (TorchDistSaveShardedStrategy, FullyParallelSaveStrategyWrapper)

_INCOMPLETE = (
    "The checkpoint is incomplete; those before it are as they were. Save again, or elsewhere."
)

_TOLD_BYTES = 4096
"""Longest error of a writer of local checkpoints."""

_planned: WeakKeyDictionary[Any, list[tuple[Any, ...]]] = WeakKeyDictionary()
"""Entries of this rank that strategies that keep plans have saved last."""


def save(  # noqa: PLR0913  # Megatron's
    sharded_state_dict: Any,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Any = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = "nvrx",
    verify_integrity: bool = False,
) -> Any:
    """Save a distributed checkpoint; arguments and result are Megatron's. Every rank must call it.

    An overwritten checkpoint counts as incomplete until the new one is complete and its checksums
    are recorded. States that this package did not produce pass unchanged.

    Raises:
        Exception: a rank failed; on every rank, with the number of that rank and its error.
    """
    stock = original("megatron.core.dist_checkpointing:save")
    more = preprocess_common_before_consistancy_check, content_metadata
    if installed_config() is None and not any(states_with_manifests(sharded_state_dict)):
        given = sharded_strategy, validate_access_integrity, async_sharded_save, *more
        return stock(sharded_state_dict, checkpoint_dir, *given, async_strategy, verify_integrity)
    folder = Path(checkpoint_dir) if is_local(checkpoint_dir) else None
    _prepare(sharded_state_dict, folder)
    if not isinstance(sharded_strategy, _STRATEGIES):
        sharded_strategy = TorchDistSaveShardedStrategy()
    if _forget_other_plans(sharded_strategy, sharded_state_dict):
        validate_access_integrity = True

    def write() -> Any:
        given = sharded_strategy, validate_access_integrity, True, *more
        strategy = async_strategy if async_sharded_save else "mcore"
        request = stock(sharded_state_dict, checkpoint_dir, *given, strategy, verify_integrity)
        if not async_sharded_save:
            _execute(request)
        return request

    try:
        with plan_quickly(), staging(is_synchronous=not async_sharded_save):
            request = agree(write, None)
    except BaseException:
        _forget_plans(sharded_strategy)
        raise
    collecting = request.finalize_fns[: -2 if verify_integrity else -1]
    config = CheckpointingConfig(sharded_strategy.backend, sharded_strategy.version)
    request.finalize_fns[:] = [
        partial(_collect, collecting, checkpoint_dir),
        *([] if folder is None else [partial(record_data, folder)]),
        partial(from_first, partial(_complete, checkpoint_dir, config, verify_integrity), None),
    ]
    if async_sharded_save:
        if folder is not None:  # another save into this folder may have ended since the call
            request.finalize_fns.insert(0, partial(from_first, partial(invalidate, folder), None))
        return request
    for finalize in request.finalize_fns:
        finalize()
    announce(True)
    return None


def _prepare(sharded_state_dict: Any, folder: Path | None) -> None:
    """Do what may fail on one rank alone, before Megatron communicates.

    The first collective of a save is this agreement, as :func:`generate_state_dict` announces.
    """
    announce(False)

    def prepare() -> None:
        if installed_config() is not None:
            _save_values(sharded_state_dict)
        kinds = ShardedTensor | ShardedTensorFactory
        entries = (one for one in nested_values(sharded_state_dict) if isinstance(one, kinds))
        require_loaded(lambda: (entry.data for entry in entries))
        apply_factories(sharded_state_dict)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    agree(prepare, None)
    if installed_config() is not None:
        complete_amaxes(sharded_state_dict)
    if folder is not None:
        from_first(lambda: invalidate(folder), None)


def _forget_other_plans(strategy: Any, sharded_state_dict: Any) -> bool:
    """Forget plans that were kept for entries other than those to save, and return whether so.

    Every rank must call it. Megatron would save what was planned, and nothing else, in silence.
    """
    base = getattr(strategy, "base_strategy", strategy)
    if not getattr(base, "use_cached_ckpt_structure", False):  # of a strategy of one's own
        return False
    names = ("key", "dtype", "global_shape", "local_shape", "global_offset", "replica_id")
    planned = _planned.get(base)
    _planned[base] = entries = [
        tuple(getattr(entry, name, None) for name in names)
        for entry in nested_values(sharded_state_dict)
        if isinstance(entry, ShardedBase)
    ]
    is_other = reduce_max([planned not in (None, entries)], None) != [0]
    if is_other:
        _forget_plans(strategy)
    return is_other


def _forget_plans(strategy: Any) -> None:
    """Forget what ``--ckpt-assume-constant-structure`` keeps: ranks may have kept other plans.

    A rank that uses a kept plan does not communicate, and the others would wait for it.
    """
    if isinstance(strategy, FullyParallelSaveStrategyWrapper):
        strategy.cached_distribution = None
        strategy = strategy.base_strategy
    strategy.cached_central_plan = strategy.cached_local_plan = None
    strategy.cached_global_metadata = strategy._metadata_cache = None
    strategy.validated_cache_reuse = strategy.validated_loaded_metadata_reuse = False


def _execute(request: Any) -> None:
    """Write what a request of Megatron's is for, without the barrier that it ends with."""
    rank, buckets, results = request.async_fn_args or (None, None, None)
    if request.async_fn is not None:
        request.async_fn(rank, request.preload_fn() if request.preload_fn else buckets, results)


def _collect(parts: Sequence[Callable[[], None]], checkpoint_dir: str) -> None:
    """Collect what ranks wrote, as Megatron does; raise failures of any of them on all ranks.

    Megatron names failures of writers on the first rank alone, and has the others wait where that
    rank fails to write ``.metadata``, or any rank to ask its writer what was written.
    """
    failures: dict[int, str] = {}

    def retrieve(stock: Any, self: Any) -> Any:
        try:
            return stock(self)
        except Exception as error:  # the process that keeps results is gone
            return _wrap_exception(StateError(described(error)))

    def finish(stock: Any, self: Any, *args: Any) -> None:
        try:
            stock(self, *args)
        except Exception as error:
            failures[0] = described(error)

    with (
        replaced_in_writers("retrieve_write_results", retrieve),
        replaced_in_writers("finish", finish),
    ):
        try:
            for part in parts:
                part()
        except CheckpointException as error:
            failures |= {rank: str(wrapped[0]) for rank, wrapped in error.failures.items()}
    found = [failures]
    torch.distributed.broadcast_object_list(found, src=0)
    if found[0]:
        raise StateError(f"{checkpoint_dir}: {_expected_all(found[0])}. {_INCOMPLETE}")


def _complete(checkpoint_dir: str, config: CheckpointingConfig, verify_integrity: bool) -> None:
    """Declare a checkpoint complete, whose data is there with its checksums."""
    folder = Path(checkpoint_dir) if is_local(checkpoint_dir) else None
    try:
        save_config(config, checkpoint_dir)
        if folder is not None:
            record_config(folder)
        if verify_integrity:
            save_integrity_manifest(checkpoint_dir)
    except Exception:
        if folder is not None:
            invalidate(folder)
        raise


def _save_values(sharded_state_dict: Any) -> None:
    """Replace quantized weights by bf16 values where Megatron's writers would not.

    Megatron's writers convert Transformer Engine's on GPUs only, and block formats only on some of
    them. Other weights are left to them, which convert one weight at a time.
    """
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory):
            weight = entry.data
            is_on_host = isinstance(weight, torch.Tensor) and weight.device.type == "cpu"
            if te_formats_of(weight) or (is_on_host and is_tensorwise(weight)):
                entry.data = read_values(weight)
            elif isinstance(entry, ShardedTensor) and isinstance(weight, GroupedWeight):
                entry.data = weight.dequantize()  # of a layer of one's own; factories do it


def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Save a checkpoint; arguments and result are Megatron's. Every rank must call it.

    StateError if a per-rank file is incomplete, or the checksum manifest cannot be written.
    """
    return _save_files(original(f"{_CHECKPOINTING}:save_checkpoint"), iteration, *args, **kwargs)


def save_checkpoint_in_loop(iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Equivalent to :func:`save_checkpoint`, for the name that the training loop imports."""
    stock = original("megatron.training.training:save_checkpoint")
    return _save_files(stock, iteration, *args, **kwargs)


def _save_files(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.training import get_args

    given = inspect.signature(stock).bind(*args, **kwargs)
    given.apply_defaults()
    folder = _folder_of_ranks(given.arguments)
    if folder is not None:
        from_first(lambda: mark_unfinished(folder), None)
        result = _save_together(partial(stock, *args, **kwargs), folder)
        from_first(lambda: record_checksums(folder), None)
        return result
    is_apart = given.arguments["non_persistent_ckpt"]
    if is_apart and get_args().non_persistent_ckpt_type == "local":
        manager = given.arguments["checkpointing_context"]["local_checkpoint_manager"]
        with writing_together(manager, is_synchronous=not get_args().async_save):
            return stock(*args, **kwargs)
    return _save_together(partial(stock, *args, **kwargs), None)


@contextmanager
def writing_together(manager: Any, *, is_synchronous: bool) -> Iterator[None]:
    """Have a manager of local checkpoints raise an error of one rank that writes on all.

    It lets the others wait for that rank, and leaves an error of an asynchronous writer in its log.
    """

    def write(stock: Any, *args: Any) -> Any:
        return agree(partial(stock, *args), None)

    def save(stock: Any, *args: Any, **kwargs: Any) -> Any:
        request = stock(*args, **kwargs)
        told = torch.zeros(_TOLD_BYTES, dtype=torch.uint8, device="cpu").share_memory_()
        return request._replace(
            async_fn=partial(_write_and_tell, request.async_fn, told),
            finalize_fns=[partial(_finalize_local, request.finalize_fns, told)],
        )

    name, quick = ("_save_fn", write) if is_synchronous else ("save", save)
    with replaced(type(manager), name, quick):
        yield


def _write_and_tell(
    write: Callable[..., None], told: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """Call ``write`` in a writer; put an error into ``told``, shared memory of the trainer.

    A writer that raised would not say that it is done, and the trainer would wait for it.
    """
    try:
        write(*args, **kwargs)
    except Exception as error:
        text = described(error).encode()[: len(told)]
        told[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _finalize_local(parts: Sequence[Callable[[], None]], told: torch.Tensor) -> None:
    """Finalize a local save; StateError on all ranks names errors of their writers."""
    mine = bytes(told.tolist()).rstrip(b"\0").decode(errors="replace")
    errors = {rank: text for rank, text in enumerate(gather_objects(mine, None)) if text}
    failure = None
    try:
        for part in parts:
            part()
    except Exception as error:  # on every rank
        failure = error
    if errors:
        raise StateError(
            f"{failure or 'local checkpoint'}: {_expected_all(errors)}. Local checkpoints before "
            "it are as they were. Save again, or elsewhere."
        ) from failure
    if failure is not None:
        raise failure


def _expected_all(errors: Mapping[int, str]) -> str:
    said = listed([f"rank {rank}: {error}" for rank, error in errors.items()], "; ")
    return f"expected every rank to write its part, got {said}"


def _save_together(act: Callable[[], Any], files_of_ranks: Path | None) -> Any:
    """Call ``act``, Megatron's save; raise an error around :func:`save` of one rank on all.

    Where ranks write files of their own, an error of these is raised at Megatron's barrier: until
    then the others gather states with this rank.
    """
    from megatron.training import checkpointing

    failures: list[Exception] = []

    def write(stock: Any, *args: Any, **kwargs: Any) -> None:
        try:
            stock(*args, **kwargs)
        except Exception as error:
            failures.append(error)

    def require_written() -> None:
        if failures:
            said = f"{files_of_ranks}: expected to write a file, got {described(failures[0])}"
            raise StateError(f"{said}. {_INCOMPLETE}") from failures[0]

    def barrier(stock: Any, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            stock(*args, **kwargs)
            return
        agree(require_written, None)
        announce(True)

    with ExitStack() as stack:
        stack.enter_context(failing_together())
        stack.enter_context(replaced(torch.distributed, "barrier", barrier))
        if files_of_ranks is not None:
            stack.enter_context(replaced(torch, "save", write))
            stack.enter_context(replaced(checkpointing, "ensure_directory_exists", write))
        return act()


def _folder_of_ranks(given: dict[str, Any]) -> Path | None:
    from megatron.training import get_args
    from megatron.training.checkpointing import get_checkpoint_name

    args = get_args()
    is_other = args.use_dist_ckpt or given["non_persistent_ckpt"]
    if is_other or installed_config() is None or not is_local(args.save):
        return None
    return Path(
        get_checkpoint_name(args.save, given["iteration"], given["release"], return_base_dir=True)
    )


def generate_state_dict(  # noqa: PLR0913  # Megatron's
    args: Any,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    rng_state: Any,
    iteration: int | None = None,
    optim_sd_kwargs: dict[str, Any] | None = None,
    model_sd_kwargs: dict[str, Any] | None = None,
    rerun_state: Any = None,
) -> Any:
    """Return the state to save or to load into; arguments and result are Megatron's.

    Every rank must call it. If parameters are frozen in some layers only, states by name are saved
    under per-layer keys, which the checkpoint's metadata declares.
    """
    synchronize_amax(model)
    options = optim_sd_kwargs or {}
    is_saved = optimizer is not None and not args.no_save_optim and not options.get("is_loading")
    sharding = (options.get("metadata") or {}).get(SHARDING_TYPE)
    if is_saved and sharding == BY_NAME and _differ_in_frozen(model):
        # A tensor across all layers would lack the states of frozen ones. Megatron passes this dict
        # to model and optimizer, and saves it for loading.
        options["metadata"]["non_homogeneous_layers"] = True
    agrees = not is_saved or hasattr(optimizer, "stepping")  # others communicate when it collects
    if not options.get("is_loading"):
        announce(agrees and args.ckpt_format in ("torch_dist", "torch"))
    return original(f"{_CHECKPOINTING}:generate_state_dict")(
        args,
        model,
        optimizer,
        opt_param_scheduler,
        rng_state,
        iteration,
        optim_sd_kwargs,
        model_sd_kwargs,
        rerun_state,
    )


def _differ_in_frozen(model: list[Any]) -> bool:
    """Return whether any parameter is frozen in one layer and trained in another, across ranks.

    A linear behind an adapter counts as trained in its layer.
    """
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for chunk in model:
        for name, param in chunk.named_parameters():
            names[param.requires_grad].add(_LAYER.sub("*", unwrapped_name(name)))
        for name, module in chunk.named_modules():
            if not name.endswith(f".{BASE}"):
                names[is_wrapper(module)].add(_LAYER.sub("*", unwrapped_name(name)))
    of_ranks = gather_objects(names, None)
    trained = set().union(*(of_rank[True] for of_rank in of_ranks))
    return any(trained & of_rank[False] for of_rank in of_ranks)
