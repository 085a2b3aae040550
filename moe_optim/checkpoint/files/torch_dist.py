"""Reader of Megatron's ``torch_dist`` checkpoints."""

import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from operator import contains
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from moe_optim.checkpoint.files.archives import Archive, reason_of
from moe_optim.checkpoint.files.folders import COMMON_FILE, CONFIG_FILE
from moe_optim.checkpoint.files.metadata import (
    MAX_NUMBER,
    METADATA,
    Blob,
    read_blobs,
    read_metadata,
)
from moe_optim.checkpoint.files.pickles import Made, Named, foreign_name
from moe_optim.checkpoint.files.reader import FileFormat, Recorded, TensorInfo
from moe_optim.checkpoint.files.untrusted_files import (
    file_range,
    is_file,
    open_file,
    parse_json,
    read_file,
    size_of,
)
from moe_optim.errors import LayoutError, MoEOptimError, StateError

COMMON_STATE = "common_state"
OWN_STATE = "moe_optim"
"""Common-state key of facts recorded when Megatron's arguments are unknown."""
OWN_ARGUMENTS = "arguments"
"""Key within it of the Megatron arguments that a model was converted for."""
INTERLEAVE_ARG = "moe_mlp_glu_interleave_size"
MANIFEST_INTERLEAVE = "glu_interleave"
"""Name of the interleave in state manifests."""
_BLOCK_BYTES = 8 * 2**20
_OBJECT_BYTES = 64 * 2**20  # objects are small
SIZES = {  # kind of parallelism -> Megatron's argument
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert tensor": "expert_tensor_parallel_size",
    "data": "data_parallel_size",
}


class TorchDistReader:
    """A ``torch_dist`` checkpoint under its stored names.

    Compares checksums of all that it reads, which torch does not. All reads raise StateError if a
    file is missing, cut off or damaged.
    """

    format: FileFormat = "torch_dist"
    """Format of the files."""

    def __init__(self, path: Path) -> None:
        """Read the metadata of ``path``, an iteration folder; values stay in the files.

        Args:
            path: folder of one iteration, such as ``iter_0000160``.

        Raises:
            StateError: metadata is missing, damaged, or of an unfinished checkpoint.
            LayoutError: checkpoint has another format.
        """
        self.config = _read_config(path)
        blobs: dict[str, list[Blob]] = defaultdict(list)
        for blob in _read_blobs(path):
            blobs[blob.key].append(blob)
        chunks = {name: of_key for name, of_key in blobs.items() if of_key[0].dtype}
        self._set(path, blobs, {name: _tensor_info(of_key) for name, of_key in chunks.items()})

    def _set(
        self, path: Path, blobs: Mapping[str, list[Blob]], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path, self.blobs, self.tensors = path, blobs, tensors
        self.objects = {name: blobs[name][0].length for name in blobs if name not in tensors}
        self._open: tuple[str, IO[bytes]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs; it reads objects again."""
        parsed = ("common_state", "arguments", "model_arguments")
        return {name: value for name, value in vars(self).items() if name not in parsed}

    def read(self, name: str, *index: int | range) -> Tensor:
        """Return a tensor or a part of it; arguments are those of ``CheckpointReader.read``."""
        spans = [one if isinstance(one, range) else range(one, one + 1) for one in index]
        rest = self.tensors[name].shape[len(spans) :]
        start = (*(span.start for span in spans), *(0 for _ in rest))
        kept = (len(one) for one in index if isinstance(one, range))
        return self.read_box(name, start, (*map(len, spans), *rest)).view((*kept, *rest))

    def cuts(self, name: str, *index: int) -> Sequence[int]:
        """Return where an axis can be cut; arguments are those of ``CheckpointReader.cuts``."""
        axis, found, reached = len(index), [], 0
        boxes = [
            [range(at, at + size) for at, size in zip(blob.corner, blob.shape, strict=True)]
            for blob in self.blobs[name]
        ]
        spans = {box[axis] for box in boxes if all(map(contains, box, index))}
        for span in sorted(spans, key=lambda span: span.start):
            if span.start >= reached:
                found.append(span.start)
            reached = max(reached, span.stop)
        return [*found, reached]

    def read_box(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return a region of a tensor as a new CPU tensor of ``shape``, in the stored dtype.

        Args:
            name: key in ``tensors``.
            start: index of the region's first element, one number per axis.
            shape: shape of the region, within the tensor.
        """
        alone = (blob for blob in self.blobs[name] if (blob.offset, blob.shape) == (start, shape))
        if (blob := next(alone, None)) is not None:
            return self._load_chunk(blob)
        parts = [blob for blob in self.blobs[name] if all(_overlap(start, shape, blob))]
        for blob in parts:
            with self._file_of(blob):  # check all files before allocating memory
                pass
        whole = torch.empty(shape, dtype=self.tensors[name].dtype, device="cpu")
        for blob in parts:
            into, taken = whole, self._load_chunk(blob)
            for axis, common in enumerate(_overlap(start, shape, blob)):
                into = into.narrow(axis, common.start - start[axis], len(common))
                taken = taken.narrow(axis, common.start - blob.corner[axis], len(common))
            into.copy_(taken)
        return whole

    def _load_chunk(self, blob: Blob) -> Tensor:
        with self.opened(blob) as archive:
            return archive.read_tensor(blob.dtype, blob.shape)

    @contextmanager
    def opened(self, blob: Blob, *, at_once: bool = False) -> Iterator[Archive]:
        """Open the archive of ``blob``; report every foreign error inside the context as damage.

        ``at_once`` reads all of it into memory, so that no byte can change after it was compared.
        """
        with self._file_of(blob) as file:
            stream = file_range(file, blob.start, blob.length)
            if at_once:
                stream = io.BytesIO(stream.read())
            try:
                archive = self._archive(stream, blob)
            except Exception as error:  # zipfile raises arbitrary errors for damaged archives
                raise ValueError(reason_of(error)) from error
            yield archive

    def _archive(self, stream: IO[bytes], blob: Blob) -> Archive:
        return Archive(stream)

    @contextmanager
    def holding(self, name: str) -> Iterator[None]:
        """Hold file ``name`` open, so that archives in it are read through one descriptor."""
        with self._file_of(Blob(name, 0, 0, name, None)):
            pass  # errors of the context are not those of the file
        with open_file(self.path, name) as file:
            self._open = name, file
            try:
                yield
            finally:
                self._open = None

    @contextmanager
    def _file_of(self, blob: Blob) -> Iterator[IO[bytes]]:
        """Open the file of a blob and check its length; raises like :meth:`opened`."""
        path = self.path / blob.file
        try:
            name, held = self._open or ("", None)
            with (
                nullcontext(held)
                if held and name == blob.file
                else open_file(self.path, blob.file) as file
            ):
                if (size := file.seek(0, os.SEEK_END)) < blob.end:
                    raise EOFError(f"a file of {size:,} bytes")
                yield file
        except MoEOptimError:
            raise
        except FileNotFoundError as error:
            raise StateError(
                f"{path}: expected a file with {blob.name}, got none. "
                "The checkpoint is not complete: use another one."
            ) from error
        except Exception as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            said = ((text or "").splitlines() or [type(error).__name__])[0]
            raise StateError(
                f"{path}: {blob.name}: expected what torch.save wrote, {blob.length:,} bytes from "
                f"{blob.start:,}, got {said}. The file is truncated or damaged: use another "
                "checkpoint."
            ) from error

    def blocks(self, blob: Blob) -> Iterator[bytes]:
        """Yield the stored bytes of ``blob`` in blocks of a few MiB."""
        with self.opened(blob) as archive:
            archive.compare_checksums()
            archive.stream.seek(0)
            while block := archive.stream.read(_BLOCK_BYTES):
                yield block

    def read_bytes(self, blob: Blob) -> bytes:
        """Return the stored bytes of ``blob``; StateError if they are too many for an object."""
        if blob.length > _OBJECT_BYTES:
            raise StateError(
                f"{self.path}: {blob.name}: expected an object of at most {_OBJECT_BYTES:,} bytes, "
                f"got {blob.length:,}. The checkpoint is damaged: use another one."
            )
        with self.opened(blob, at_once=True) as archive:
            archive.compare_checksums()
            archive.stream.seek(0)
            return archive.stream.read()

    def read_object(self, name: str) -> Any:
        """Return the object called ``name`` as plain data; code that it names does not run."""
        with self.opened(self.blobs[name][0]) as archive:
            (value,) = archive.load()  # list of the objects with that key
        return value

    def foreign_objects(
        self, names: Iterable[str], knows: Callable[[Named], bool] | None = None
    ) -> dict[str, str]:
        """Return the objects that may run code when Megatron unpickles them -> reason.

        Args:
            names: objects to check; no code that they name runs.
            knows: predicate as in ``foreign_name``.
        """
        found = {}
        for name in names:
            with self.opened(self.blobs[name][0]) as archive:
                archive.compare_checksums()  # Megatron reads it with torch
                if (why := foreign_name(archive.pickled(), knows)) is not None:
                    found[name] = why
        return found

    @cached_property
    def common_key(self) -> str | None:
        """Name of the common-state object; None in older checkpoints."""
        named = [name for name in self.objects if name.partition("/")[0] == COMMON_STATE]
        return named[0] if named else None

    @property
    def common_file(self) -> Blob | None:
        """Location of the common state in older checkpoints; None in others."""
        if self.common_key is not None or not is_file(self.path, COMMON_FILE):
            return None
        return Blob(COMMON_FILE, 0, size_of(self.path, COMMON_FILE), "the common state", None)

    @cached_property
    def common_state(self) -> Mapping[str, Any]:
        """State that all ranks share, as :meth:`read_object` returns it."""
        if self.common_key is not None:
            state = self.read_object(self.common_key)
        elif (blob := self.common_file) is not None:
            with self.opened(blob) as archive:
                state = archive.load()
        else:
            state = {}
        return self._checked("the common state", state, dict) or {}

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments when saved, by name; empty if not recorded."""
        said = self.common_state.get("args")
        return self._checked("args", said.state if isinstance(said, Made) else said, dict) or {}

    @cached_property
    def model_arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments, else those recorded by a conversion; empty without either."""
        own = self._checked(OWN_STATE, self.common_state.get(OWN_STATE), dict) or {}
        return self.arguments or self._checked(OWN_ARGUMENTS, own.get(OWN_ARGUMENTS), dict) or {}

    @cached_property
    def recorded(self) -> Recorded:
        """Facts in the common state; StateError for a value that Megatron does not write."""
        state, args = self.common_state, self.arguments
        own = {**(self._checked(OWN_STATE, state.get(OWN_STATE), dict) or {}), **args}
        content = self._checked("content_metadata", state.get("content_metadata"), dict) or {}
        version = state.get("checkpoint_version")
        version = self._checked("checkpoint_version", version, float, int, str)
        sizes = {short: self._checked(name, args.get(name), int) for short, name in SIZES.items()}
        rows = self._checked(INTERLEAVE_ARG, own.get(INTERLEAVE_ARG), int)
        return Recorded(
            glu_interleave=(rows or 0) if INTERLEAVE_ARG in own else None,
            layout=None,
            iteration=self._checked("iteration", state.get("iteration"), int),
            version=None if version is None else str(version),
            optimizer_sharding=self._checked(
                "distrib_optim_sharding_type", content.get("distrib_optim_sharding_type"), str
            ),
            parallel_sizes={short: size for short, size in sizes.items() if size},
        )

    def _checked(self, name: str, value: Any, *kinds: type) -> Any:
        """Return a common-state value after verifying that it is None or of an expected type."""
        is_kind = value is None or (isinstance(value, kinds) and not isinstance(value, bool))
        if is_kind and isinstance(value, str):
            is_kind = value.isprintable()
        if is_kind and isinstance(value, int):
            is_kind = 0 <= value <= MAX_NUMBER
        if not is_kind:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise StateError(
                f"{self.path}: {name}: expected {wanted} in what Megatron saved, got something "
                "else. The checkpoint is damaged: use another one."
            )
        return value


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype by name, such as ``torch.bfloat16``."""
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _tensor_info(blobs: list[Blob]) -> TensorInfo:
    corners = [[a + n for a, n in zip(b.corner, b.shape, strict=True)] for b in blobs]
    shape = tuple(max(ends) for ends in zip(*corners, strict=True))
    return TensorInfo(shape, dtype_named(blobs[0].dtype))


def _overlap(start: tuple[int, ...], shape: tuple[int, ...], blob: Blob) -> list[range]:
    return [
        range(max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(start, shape, blob.corner, blob.shape, strict=True)
    ]


def _read_blobs(path: Path) -> Sequence[Blob]:
    expected = "expected the index of the checkpoint, got"
    try:
        return read_blobs(read_metadata(path))
    except FileNotFoundError as error:
        raise StateError(
            f"{path / METADATA}: {expected} no such file. Saving was not finished: use another "
            "checkpoint."
        ) from error
    except OSError as error:
        raise StateError(
            f"{path / METADATA}: {expected}: {error.strerror}. Use another checkpoint."
        ) from error
    except StateError as error:
        raise StateError(f"{path}: {error}. Use another checkpoint.") from error


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / CONFIG_FILE
    try:
        config = parse_json(read_file(path, CONFIG_FILE))
        if not isinstance(config, dict) or any(isinstance(v, dict | list) for v in config.values()):
            raise ValueError("not an object of names and values")
    except FileNotFoundError as error:
        raise StateError(
            f"{file}: expected Megatron's description of a complete checkpoint, got no such file. "
            "Saving was not finished: use an earlier checkpoint."
        ) from error
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise StateError(f"{file}: expected JSON, got: {said}. Use another checkpoint.") from error
    backend = config.get("sharded_backend")
    if backend != "torch_dist":
        named = repr(backend)[:40] if isinstance(backend, str) else "none"
        raise LayoutError(
            f"{path}: expected a torch_dist checkpoint, got sharded_backend {named}. "
            "Save with --ckpt-format torch_dist."
        )
    return config
