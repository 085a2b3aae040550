"""One load of a torch_dist checkpoint: metadata is vetted once, data is checked as it is read.

The first rank reads and vets ``.metadata``, and sends what it describes to all ranks, which give it
to Megatron: none opens another. Sizes of all files are compared first, each by one rank. Megatron
then reads through :class:`CheckedReader`, which compares the checksums of every archive while it
reads it, once.
Megatron unpickles objects without restrictions, so those that would run code are refused. Weights
of another model are refused before any is read, by the arguments that differ.
"""

import argparse
import dataclasses
import enum
import io
import logging
import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future as FutureOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from moe_optim.calibration.state_entries import CalibratedEntry, OptionalShardedTensor
from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.folders import (
    CHECKSUM_MANIFEST,
    COMMON_FILE,
    CONFIG_FILE,
    iteration_folders,
)
from moe_optim.checkpoint.files.metadata import METADATA, Blob, BlobTable, read_blobs
from moe_optim.checkpoint.files.pickles import MEGATRONS_PACKAGES, Named, foreign_name
from moe_optim.checkpoint.files.reader import TensorInfo, is_state
from moe_optim.checkpoint.files.torch_dist import TorchDistReader, dtype_named
from moe_optim.checkpoint.integrity import (
    OTHER_FILE,
    Vetted,
    checkpoint_defect,
    require_intact,
    require_none,
    size_defects,
    vet,
)
from moe_optim.checkpoint.staging import replaced, with_views
from moe_optim.errors import LayoutError, listed
from moe_optim.integration.agreement import agree, from_first, gather_objects, reduce_max
from moe_optim.integration.engine import original
from moe_optim.integration.installation import config_or_bf16

logger = logging.getLogger(__name__)


def stored_metadata(table: BlobTable) -> Metadata:
    """Return metadata of tensors and objects as torch reads it; places in files are not among it.

    Chunks are made when asked for.
    """
    entries: dict[str, Any] = {}
    for key, stored in table.keys_stored.items():
        if stored.dtype:
            properties = TensorProperties(dtype=dtype_named(stored.dtype))
            chunks: Any = _Chunks(table, key)
            entries[key] = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
        else:
            entries[key] = BytesStorageMetadata()
    return Metadata(entries, None, {})


class _Chunks(Sequence[ChunkStorageMetadata]):
    def __init__(self, table: BlobTable, key: str) -> None:
        self._table, self._key = table, key
        self._made: list[ChunkStorageMetadata] | None = None

    def __getitem__(self, number: Any) -> Any:
        if self._made is None:
            self._made = [
                ChunkStorageMetadata(torch.Size(blob.corner), torch.Size(blob.shape))
                for blob in self._table[self._key]
            ]
        return self._made[number]

    def __len__(self) -> int:
        return len(self._table.keys_stored[self._key].rows)


class VettedReader(TorchDistReader):
    """A checkpoint whose metadata was vetted, by this rank or by the first one.

    Attributes:
        metadata: content of ``.metadata`` as torch reads it; chunks are made when asked for.
        vetted: metadata and checksums that one rank read for all.
        version: identity of the save on this host, which another save changes.
        is_checked: whether all ranks have compared sizes, and read everything if that was asked.
        has_read: whether the load that is running has begun to read tensors; on this rank, or on
            any once it has failed to read.
    """

    def __init__(self, path: Path, vetted: Vetted) -> None:
        """Take vetted metadata; data stays in the files.

        Args:
            path: folder of one iteration.
            vetted: metadata and checksums, as one rank read them.
        """
        self.vetted, self.version, self.is_checked = vetted, _version_of(path), False
        self.has_read = False
        self._compares = config_or_bf16().check_on_load != "quick"
        self.metadata = stored_metadata(vetted.table)
        self._places: dict[str, dict[Any, tuple[Blob, int]]] = {}
        entries = self.metadata.state_dict_metadata
        tensors = {
            name: TensorInfo(tuple(entry.size), entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._set(path, vetted.table, tensors)

    def _archive(self, stream: IO[bytes], blob: Blob) -> Archive:
        archive = Archive(stream, compares=self._compares)
        recorded = self.vetted.checksums.archives.get(blob.file)
        if self._compares and recorded is not None:
            at = 8 * (0 if blob.file == COMMON_FILE else self.places(blob.key)[blob.offset][1])
            if recorded[at : at + 8] != archive.table_checksum():
                raise ValueError(OTHER_FILE)
        return archive

    def places(self, key: str) -> dict[Any, tuple[Blob, int]]:
        """Return each blob of a key with its place among the archives of its file, by offset."""
        if key not in self._places:
            table = self.vetted.table
            places = zip(table[key], table.places(key), strict=True)
            self._places[key] = {blob.offset: (blob, place) for blob, place in places}
        return self._places[key]


_kept: VettedReader | None = None
"""Reader of the checkpoint that is being loaded, for all calls of one load."""


def open_session(folder: Path, group: Any) -> VettedReader:
    """Open a checkpoint for a load, and check it as ``check_on_load`` says.

    Every rank of ``group`` must call it. StateError on all ranks names all missing and damaged
    files that were found.
    """
    global _kept
    stored = agree(partial(_find_kept, folder), group)  # a rank that fails before may join it
    mine = (None, False) if stored is None else (stored.vetted.identity, stored.is_checked)
    everywhere = gather_objects(mine, group)
    identities = {identity for identity, _ in everywhere}
    if stored is None or len(identities) > 1:
        vetted = from_first(partial(vet, folder), group)
        _kept = stored = agree(partial(VettedReader, folder, vetted), group)
    if all([is_checked for _, is_checked in everywhere]):
        return stored
    rank, ranks, ends = dist.get_rank(group), dist.get_world_size(group), stored.vetted.ends
    share = {name: ends[name] for name in sorted(ends)[rank::ranks]}
    found = gather_objects(list(size_defects(folder, share)), group)
    require_none(folder, sorted({defect for one in found for defect in one}, key=str))
    if from_first(partial(_must_read_all, folder, stored.vetted), group):
        agree(partial(require_intact, folder, thorough=True, part=rank, parts=ranks), group)
    stored.is_checked = True
    read_blobs.cache_clear()
    return stored


def open_alone(folder: Path) -> VettedReader:
    """Open a checkpoint for reads of this rank alone, and compare sizes; no rank communicates.

    StateError names missing and cut files.
    """
    global _kept
    stored = _find_kept(folder)
    if stored is None:
        vetted = vet(folder)
        require_none(folder, size_defects(folder, vetted.ends))
        _kept = stored = VettedReader(folder, vetted)
    return stored


def end_session() -> None:
    """Forget the checkpoint that was opened last, and free its metadata."""
    global _kept
    _kept = None
    read_blobs.cache_clear()


def _find_kept(folder: Path) -> VettedReader | None:
    if _kept is None or _kept.path != folder or _kept.version != _version_of(folder):
        return None
    return _kept


def _version_of(folder: Path) -> list[tuple[int, ...]]:
    found = [folder / name for name in (METADATA, CONFIG_FILE, CHECKSUM_MANIFEST, COMMON_FILE)]
    stats = [path.stat() for path in found if path.exists()]
    return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in stats]


def _must_read_all(folder: Path, vetted: Vetted) -> bool:
    """Return whether a load begins with a thorough check; the first rank alone calls it."""
    mode = config_or_bf16().check_on_load
    if mode != "loaded":
        return mode == "thorough"
    if vetted.checksums.tables:
        logger.warning("%s: checksums of an older version are compared by reading all", folder)
        return True
    folders = iteration_folders(folder.parent)  # newest first
    names = [other.name for other in folders]
    newer = folders[: names.index(folder.name)] if folder.name in names else []
    if any([checkpoint_defect(other) is not None for other in newer]):
        logger.warning("%s: the last save did not finish, so all of this one is read", folder)
        return True
    return False


_STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"

_open: tuple[VettedReader, Any] | None = None
"""Checkpoint that is being read through this package, if any, and the group that loads it."""


@contextmanager
def reading(stored: VettedReader | None, group: Any = None, strategy: Any = None) -> Iterator[None]:
    """Have Megatron read a checkpoint through ``stored`` in this context; None changes nothing.

    Tensors are read into views of parameters, instead of copies, except by strategies by which
    ranks exchange what they read, and send contiguous tensors.

    Args:
        stored: checkpoint that is open in this package.
        group: process group of the ranks that load it together.
        strategy: Megatron's load strategy; None for its default.
    """
    global _open
    name = "sharded_tensor_to_torch_sharded_tensor"
    are_views = type(strategy) in (type(None), strategies.TorchDistLoadShardedStrategy)
    before, _open = _open, None if stored is None else (stored, group)
    try:
        with replaced(strategies, name, with_views) if stored and are_views else nullcontext():
            yield
    finally:
        _open = before


def together(act: Callable[[], Any]) -> Any:
    """Call ``act``; in a load of states, raise an error of one rank on all."""
    return act() if _open is None else agree(act, _open[1])


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise the first error that torch has collected of all ranks instead of torch's around it."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def get_filesystem_reader(
    checkpoint_dir: str | Path, cache_metadata: bool = False, async_strategy: str = "mcore"
) -> Any:
    """Return the reader of a checkpoint; arguments are Megatron's."""
    if _open is not None and Path(checkpoint_dir) == _open[0].path:
        return CheckedReader(_open[0])
    stock = original(f"{_STRATEGIES}:_get_filesystem_reader")
    return stock(checkpoint_dir, cache_metadata, async_strategy)


def load_tensors(
    self: Any, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore"
) -> Any:
    """Load tensors and objects of this rank; arguments and result are Megatron's.

    While a checkpoint is open in this package, every rank must call it: an error is raised on all.
    """
    stock = original(f"{_STRATEGIES}:TorchDistLoadShardedStrategy.load")
    read = partial(stock, self, sharded_state_dict, checkpoint_dir, async_strategy)
    if _open is None:
        return read()
    stored, group = _open
    try:
        return agree(own_errors()(read), group)
    except BaseException:  # on every rank
        stored.has_read = reduce_max([stored.has_read], group) != [0]
        raise


_READERS = 4
"""Archives that a rank reads at a time."""
_AHEAD_BYTES = 2**28
"""Bytes of these archives from which on no further one is begun."""


@dataclass(frozen=True, slots=True)
class _Read:
    """An archive that a thread reads into a target, or into other memory."""

    blob: Blob
    items: list[ReadItem]
    targets: list[torch.Tensor]
    is_in_place: bool
    values: FutureOf[torch.Tensor]

    def finish(self, planner: LoadPlanner) -> None:
        """Wait for the values, and copy them into the targets."""
        values = self.values.result()
        for item, target in zip(self.items, self.targets, strict=True):
            if not self.is_in_place:
                part = values
                for axis, start in enumerate(item.storage_offsets):
                    part = part.narrow(axis, start, item.lengths[axis])
                target.copy_(part)
            planner.commit_tensor(item, target)


class CheckedReader(FileSystemReader):
    """Reads an open checkpoint for torch; opens each file and reads each archive once.

    Threads read archives and compare checksums; the calling thread alone calls the planner and
    copies values.
    """

    def __init__(self, stored: VettedReader) -> None:
        super().__init__(stored.path)
        self._stored = stored
        self._memory: list[torch.Tensor | None] = [None] * _READERS
        self._started = 0

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata that was vetted."""
        return self._stored.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan; StateError for damage, LayoutError for code in an object."""
        wanted: dict[Blob, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            offset = item.storage_index.offset
            places = self._stored.places(item.storage_index.fqn)
            wanted[places[None if offset is None else tuple(offset)][0]].append(item)
        in_order = sorted(wanted, key=attrgetter("file", "start"))
        for name, of_file in groupby(in_order, attrgetter("file")):
            with self._stored.holding(name), ThreadPoolExecutor(_READERS) as readers:
                reads: deque[_Read] = deque()
                for blob in of_file:
                    items = wanted[blob]
                    if items[0].type == LoadItemType.BYTE_IO:
                        content = _plain_bytes(self._stored, blob)
                        for item in items:
                            planner.load_bytes(item, io.BytesIO(content))
                        continue
                    targets = [planner.resolve_tensor(item).detach() for item in items]
                    reads.append(self._start(blob, items, targets, readers))
                    ahead = sum(read.blob.length for read in reads)
                    while len(reads) == _READERS or (reads and ahead > _AHEAD_BYTES):
                        ahead -= reads[0].blob.length
                        reads.popleft().finish(planner)
                for read in reads:
                    read.finish(planner)
        self._memory = [None] * _READERS
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _start(
        self,
        blob: Blob,
        items: list[ReadItem],
        targets: list[torch.Tensor],
        readers: ThreadPoolExecutor,
    ) -> _Read:
        self._stored.has_read = True
        target, is_alone = targets[0], len(items) == 1
        is_memory = type(target) is torch.Tensor and target.device.type == "cpu"
        is_alike = str(target.dtype) == blob.dtype and target.is_contiguous()
        is_whole = tuple(items[0].lengths) == blob.shape == tuple(target.shape)
        is_in_place = is_alone and is_memory and is_alike and is_whole
        into = target if is_in_place else self._memory_of(blob)
        mode = torch.is_inference_mode_enabled()  # each thread has its own
        values = readers.submit(self._read, blob, into, mode)
        return _Read(blob, items, targets, is_in_place, values)

    def _read(self, blob: Blob, into: torch.Tensor | None, mode: bool) -> torch.Tensor:
        with torch.inference_mode(mode), self._stored.opened(blob) as archive:
            return archive.read_tensor(blob.dtype, blob.shape, into=into)

    def _memory_of(self, blob: Blob) -> torch.Tensor | None:
        """Return memory of a chunk that no unfinished read uses.

        It is used again and again, since new pages cost more than reading.
        """
        dtype = dtype_named(blob.dtype)
        nbytes = math.prod(blob.shape) * dtype.itemsize
        if nbytes > blob.length:  # of what metadata alone states
            return None
        self._started += 1
        slot = self._started % _READERS  # of a read that has finished, since reads finish in order
        memory = self._memory[slot]
        if memory is None or memory.numel() < nbytes:
            self._memory[slot] = None  # before there is more
            self._memory[slot] = memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return memory[:nbytes].view(dtype).view(blob.shape)


def _plain_bytes(stored: VettedReader, blob: Blob) -> bytes:
    """Return an object as it is stored, once its checksums fit.

    LayoutError if its unpickling would run code, unless ``trust_checkpoint_code`` allows that.
    """
    content = stored.read_bytes(blob)
    if config_or_bf16().trust_checkpoint_code:
        return content
    why = foreign_name(Archive(io.BytesIO(content)).pickled(), _is_passive)
    if why is not None:
        raise LayoutError(
            f"{stored.path / blob.file}: {blob.key}: expected plain data, got an object that "
            f"Megatron would run code for while it loads: {why}. If you trust its author (types of "
            "your own among its arguments are such code, too), set "
            "moe_optim.trust_checkpoint_code=true; else load another checkpoint."
        )
    return content


def _is_passive(named: Named) -> bool:
    """Return whether a name is an enumeration or dataclass of Megatron's packages.

    Considers loaded modules only: a checkpoint cannot cause an import.
    """
    found = getattr(sys.modules.get(named.module), named.name, None)
    if not isinstance(found, type):
        return False
    # check the class's own module, too: modules may re-export foreign classes
    packages = {module.partition(".")[0] for module in (named.module, found.__module__)}
    is_value = issubclass(found, enum.Enum) or dataclasses.is_dataclass(found)
    return is_value and packages <= MEGATRONS_PACKAGES


_SHAPING = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention",
    "kv_channels", "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_layer_freq", "mtp_num_layers", "swiglu", "add_bias_linear", "qk_layernorm",
    "normalization", "untie_embeddings_and_output_weights", "padded_vocab_size",
    "transformer_impl", "fp8_param_gather", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
"""Arguments that determine names, shapes and places of parameters."""


def stored_tensors(entry: ShardedTensor | ShardedTensorFactory) -> Any:
    """Return the tensors that an entry of a model is stored as, nested and without values."""
    if isinstance(entry, ShardedTensor):
        return entry
    values = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    return dataclasses.replace(entry, data=values).build()


def require_same_tensors(
    entries: Iterable[Any], stored: TorchDistReader, *, may_lack: bool = False
) -> None:
    """Raise LayoutError for weights that ``stored`` lacks, or has in another shape.

    Args:
        entries: entries of a state to load; those of an optimizer, optional ones and objects pass.
        stored: checkpoint to load.
        may_lack: whether what is missing is left to Megatron.
    """
    weights = [
        stored_tensors(entry)
        for entry in entries
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
        and not isinstance(entry, OptionalShardedTensor | CalibratedEntry)
        and not is_state(entry.key)
    ]
    wanted = [part for part in nested_values(weights) if not may_lack or part.key in stored.tensors]
    if faults := misfits(wanted, stored):
        raise of_another_model(stored.path, listed(faults), stored.arguments)


def misfits(requests: Iterable[ShardedTensor], stored: TorchDistReader) -> list[str]:
    """Return which requested tensors ``stored`` lacks, or has in another shape, sorted."""
    faults = set()
    for request in requests:
        info = stored.tensors.get(request.key)
        if info is None:
            faults.add(f"{request.key} is missing")
        elif info.shape != tuple(request.global_shape) and not request.allow_shape_mismatch:
            shapes = f"{list(info.shape)}, expected {list(request.global_shape)}"
            faults.add(f"{request.key} is {shapes}")
    return sorted(faults)


def of_another_model(where: object, got: str, saved: Mapping[str, Any]) -> LayoutError:
    """Return the error of a checkpoint with the arguments ``saved``, of another model."""
    differing = differing_arguments(saved)
    remedy = f"Start with the arguments it was saved with ({listed(differing)})."
    return LayoutError(
        f"{where}: expected the tensors of this model, got others: {got.rstrip('.')}. "
        f"{remedy if differing else 'Load it into the model that it was saved from.'}"
    )


def differing_arguments(saved: Mapping[str, Any]) -> list[str]:
    """Return the model-shaping arguments that differ from those a checkpoint was saved with.

    Empty for checkpoints without arguments, or outside of Megatron's own training loop.
    """
    loop = sys.modules.get("megatron.training.global_vars")
    here = vars(getattr(loop, "_GLOBAL_ARGS", None) or argparse.Namespace())
    return [
        f"--{name.replace('_', '-')}: {saved[name]}, here {here[name]}"
        for name in _SHAPING
        if name in saved and name in here and saved[name] != here[name]
    ]
