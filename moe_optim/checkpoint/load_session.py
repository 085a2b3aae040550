"""One load of a torch_dist checkpoint: metadata is vetted once, data is checked as it is read.

The first rank reads and vets ``.metadata``; all ranks unpickle its bytes, so that Megatron opens no
other. Each rank then compares the checksums of every archive that it reads, and of an object also
what its unpickling would call. Sizes of all files are compared first, each by one rank.
"""

import logging
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.checksum_manifest import CHECKSUM_MANIFEST
from moe_optim.checkpoint.files.folders import COMMON_FILE, CONFIG_FILE, iteration_folders
from moe_optim.checkpoint.files.metadata import METADATA, Blob, read_blobs
from moe_optim.checkpoint.files.pickles import no_collections
from moe_optim.checkpoint.files.reader import TensorInfo
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.integrity import (
    OTHER_FILE,
    Vetted,
    checkpoint_defect,
    require_intact,
    require_none,
    size_defects,
    vet,
)
from moe_optim.integration.agreement import agree, from_first, gather_objects
from moe_optim.integration.installation import config_or_bf16

logger = logging.getLogger(__name__)


class VettedReader(TorchDistReader):
    """A checkpoint whose metadata was vetted, by this rank or by the first one.

    Attributes:
        metadata: content of ``.metadata``, unpickled as torch does.
        vetted: metadata and checksums that one rank read for all.
        version: identity of the save on this host, which another save changes.
        is_checked: whether all ranks have compared sizes, and read everything if that was asked.
    """

    def __init__(self, path: Path, vetted: Vetted) -> None:
        """Unpickle vetted metadata; data stays in the files.

        Args:
            path: folder of one iteration.
            vetted: metadata and checksums, as one rank read them.
        """
        self.vetted, self.version, self.is_checked = vetted, _version_of(path), False
        self._compares = config_or_bf16().check_on_load != "quick"
        with no_collections():
            self.metadata: Metadata = pickle.loads(vetted.metadata)  # noqa: S301  # vetted
        super().__init__(path)

    def _index(self, _: object = ()) -> Mapping[str, list[Blob]]:
        blobs = _Blobs(self.metadata)
        for name, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)
            else:
                self.objects[name] = blobs[name][0].length
        return blobs

    def _archive(self, stream: IO[bytes], blob: Blob) -> Archive:
        archive = Archive(stream, compares=self._compares)
        recorded = self.vetted.checksums.archives.get(blob.file)
        if self._compares and recorded is not None:
            at = 8 * self._places[blob.file][blob.start]
            if recorded[at : at + 8] != archive.table_checksum():
                raise ValueError(OTHER_FILE)
        return archive

    @cached_property
    def _places(self) -> dict[str, dict[int, int]]:
        starts: dict[str, list[int]] = defaultdict(list)
        for place in self.metadata.storage_data.values():
            starts[place.relative_path].append(place.offset)
        starts[COMMON_FILE] = [0]
        return {
            name: {start: number for number, start in enumerate(sorted(found))}
            for name, found in starts.items()
        }

    def chunk(self, index: MetadataIndex) -> Blob:
        """Return what is stored under an index of ``metadata``."""
        return _blob_at(self.metadata, index)


def _blob_at(metadata: Metadata, index: MetadataIndex) -> Blob:
    place = metadata.storage_data[index]
    where = place.relative_path, place.offset, place.length, index.fqn
    entry = metadata.state_dict_metadata[index.fqn]
    if not isinstance(entry, TensorStorageMetadata) or index.offset is None:
        return Blob(*where, None)
    chunk = entry.chunks[index.index or 0]
    if chunk.offsets != index.offset:
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)
    return Blob(*where, tuple(chunk.offsets), tuple(chunk.sizes), str(entry.properties.dtype))


class _Blobs(Mapping[str, list[Blob]]):
    """Blobs of vetted metadata by key, made when asked for."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def __getitem__(self, key: str) -> list[Blob]:
        entry = self._metadata.state_dict_metadata[key]
        indices = (
            [MetadataIndex(key, chunk.offsets, at) for at, chunk in enumerate(entry.chunks)]
            if isinstance(entry, TensorStorageMetadata)
            else [MetadataIndex(key)]
        )
        return [_blob_at(self._metadata, index) for index in indices]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata.state_dict_metadata)

    def __len__(self) -> int:
        return len(self._metadata.state_dict_metadata)


_kept: VettedReader | None = None
"""Reader of the checkpoint that is being loaded, for all calls of one load."""


def open_session(folder: Path, group: Any) -> VettedReader:
    """Open a checkpoint for a load, and check it as ``check_on_load`` says.

    Every rank of ``group`` must call it. StateError on all ranks names all missing and damaged
    files that were found.
    """
    stored = _find_kept(folder)
    mine = (None, False) if stored is None else (stored.vetted.identity, stored.is_checked)
    everywhere = gather_objects(mine, group)
    identities = {identity for identity, _ in everywhere}
    if stored is None or len(identities) > 1:
        vetted = from_first(lambda: vet(folder), group)
        stored = agree(lambda: _keep(folder, vetted), group)
    if not all(is_checked for _, is_checked in everywhere):
        _check(folder, stored.vetted, group)
        stored.is_checked = True
    return stored


def _check(folder: Path, vetted: Vetted, group: Any) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    share = {name: vetted.ends[name] for name in sorted(vetted.ends)[rank::ranks]}
    found = gather_objects(list(size_defects(folder, share)), group)
    require_none(folder, sorted({defect for one in found for defect in one}, key=str))
    if from_first(lambda: _must_read_all(folder, vetted), group):
        agree(lambda: require_intact(folder, thorough=True, part=rank, parts=ranks), group)


def open_alone(folder: Path) -> VettedReader:
    """Open a checkpoint for reads of this rank alone, and compare sizes; no rank communicates.

    StateError names missing and cut files.
    """
    stored = _find_kept(folder)
    if stored is None:
        vetted = vet(folder)
        require_none(folder, size_defects(folder, vetted.ends))
        stored = _keep(folder, vetted)
    return stored


def end_session() -> None:
    """Forget the checkpoint that was opened last, and free its metadata."""
    global _kept
    _kept = None
    read_blobs.cache_clear()


def _keep(folder: Path, vetted: Vetted) -> VettedReader:
    global _kept
    _kept = VettedReader(folder, vetted)
    return _kept


def _find_kept(folder: Path) -> VettedReader | None:
    if _kept is None or _kept.path != folder or _kept.version != _version_of(folder):
        return None
    return _kept


def _version_of(folder: Path) -> tuple[tuple[int, ...], ...]:
    found = [folder / name for name in (METADATA, CONFIG_FILE, CHECKSUM_MANIFEST, COMMON_FILE)]
    stats = [path.stat() for path in found if path.exists()]
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats)


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
    if any(checkpoint_defect(other) is not None for other in newer):
        logger.warning("%s: the last save did not finish, so all of this one is read", folder)
        return True
    return False
