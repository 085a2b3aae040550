"""Reads Megatron's ``torch_dist`` checkpoints: torch's distributed format, and a common state."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from moe_optim.checkpoint.files.archives import Archive, reason_of
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
COMMON_FILE = "common.pt"
"""Where older Megatrons keep what others store under ``COMMON_STATE``."""
CONFIG_FILE = "metadata.json"
OWN_STATE = "moe_optim"
"""Key of the common state for what is recorded where Megatron's arguments are not known."""
OWN_ARGUMENTS = "arguments"
"""Key of it for Megatron's arguments that a model was converted for."""
INTERLEAVE_ARG = "moe_mlp_glu_interleave_size"
MANIFEST_INTERLEAVE = "glu_interleave"
"""Name of the same in manifests of optimizer states."""
_BLOCK_BYTES = 8 * 2**20
_OBJECT_BYTES = 64 * 2**20  # to change a number in one
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
    """A ``torch_dist`` checkpoint under the names it was stored by.

    What is read is compared with its checksums, once; torch itself does not look at them.
    """

    format: FileFormat = "torch_dist"
    """Format of the files."""

    def __init__(self, path: Path, blobs: Sequence[Blob] = ()) -> None:
        """Read where tensors and objects lie; values stay in the files.

        Args:
            path: folder of one iteration, such as ``iter_0000160``.
            blobs: content of ``.metadata``, where that has been read.

        Raises:
            StateError: metadata is missing or damaged, or of an unfinished checkpoint.
            LayoutError: it is of another format.
        """
        self.path = path
        self.config = _read_config(path)
        by_key: dict[str, list[Blob]] = defaultdict(list)
        for blob in blobs or _read_blobs(path):
            by_key[blob.key].append(blob)
        self.blobs: Mapping[str, list[Blob]] = by_key
        self._intact: set[Blob] = set()
        self.tensors: dict[str, TensorInfo] = {}
        self.objects: dict[str, int] = {}
        for name, (first, *others) in by_key.items():
            if first.offset is None:
                self.objects[name] = first.length
            else:
                self.tensors[name] = _tensor_info([first, *others])

    def read(self, name: str, first: int | None = None) -> Tensor:
        """Return a tensor of its own on the CPU, contiguous, in the stored shape and dtype.

        Args:
            name: one of ``tensors``.
            first: place on the first axis; the result is without that axis. None: the whole.

        Raises:
            StateError: a file that holds some of it is missing, cut off or damaged.
        """
        shape = self.tensors[name].shape
        if first is None:
            return self.read_box(name, (0,) * len(shape), shape)
        return self.read_box(name, (first, *[0] * (len(shape) - 1)), (1, *shape[1:]))[0]

    def read_box(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return a part of a tensor, of ``shape``, of its own on the CPU, in the stored dtype.

        Args:
            name: one of ``tensors``.
            start: index of the first element of the part, one number an axis.
            shape: shape of the part, which lies inside of the tensor.

        Raises:
            StateError: a file that holds some of it is missing, cut off or damaged.
        """
        alone = (blob for blob in self.blobs[name] if (blob.offset, blob.shape) == (start, shape))
        if (blob := next(alone, None)) is not None:
            return self._load_chunk(blob)
        parts = [blob for blob in self.blobs[name] if all(_overlap(start, shape, blob))]
        for blob in parts:
            with self._file_of(blob):  # all of them are there, before memory for them is taken
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
    def opened(self, blob: Blob) -> Iterator[Archive]:
        """Open one ``blob``; whatever fails inside, but for our own errors, is damage.

        Raises:
            StateError: the file is missing, cut off or damaged.
        """
        with self._file_of(blob) as file:
            stream = file_range(file, blob.start, blob.length)
            try:
                archive = Archive(stream)
                if blob not in self._intact:
                    archive.compare_checksums()
                    self._intact.add(blob)
            except Exception as error:  # whatever a zip makes of damaged bytes
                raise ValueError(reason_of(error)) from error
            yield archive

    @contextmanager
    def _file_of(self, blob: Blob) -> Iterator[IO[bytes]]:
        """Open the file of a blob, which is as long as it has to be, as :meth:`opened` does."""
        path = self.path / blob.file
        try:
            with open_file(self.path, blob.file) as file:
                if (size := file.seek(0, os.SEEK_END)) < blob.end:
                    raise EOFError(f"a file of {size:,} bytes")
                yield file
        except MoEOptimError:
            raise
        except FileNotFoundError as error:
            raise StateError(
                f"{path}: expected a file with {blob.name}, got none. "
                "The checkpoint is not complete: take another one."
            ) from error
        except Exception as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            said = ((text or "").splitlines() or [type(error).__name__])[0]
            raise StateError(
                f"{path}: {blob.name}: expected what torch.save wrote, {blob.length:,} bytes from "
                f"{blob.start:,}, got {said}. The file is cut off or damaged: take another "
                "checkpoint."
            ) from error

    def blocks(self, blob: Blob) -> Iterator[bytes]:
        """Yield the bytes of one ``blob`` as they are stored, some MiB at a time.

        Raises:
            StateError: the file is missing, cut off or damaged.
        """
        with self.opened(blob) as archive:
            archive.stream.seek(0)
            while block := archive.stream.read(_BLOCK_BYTES):
                yield block

    def read_bytes(self, blob: Blob) -> bytes:
        """Return the bytes of a ``blob``, an object, as they are stored.

        Raises:
            StateError: they are missing, damaged, or more than any object has.
        """
        if blob.length > _OBJECT_BYTES:
            raise StateError(
                f"{self.path}: {blob.name}: expected an object of at most {_OBJECT_BYTES:,} bytes, "
                f"got {blob.length:,}. The checkpoint is damaged: take another one."
            )
        return b"".join(self.blocks(blob))

    def read_object(self, name: str) -> Any:
        """Return the object called ``name`` as plain data: nothing that it names is called.

        Raises:
            StateError: the file is missing, cut off or damaged.
        """
        with self.opened(self.blobs[name][0]) as archive:
            (value,) = archive.load()  # a list of the objects under that key
        return value

    def foreign_objects(
        self, names: Iterable[str], knows: Callable[[Named], bool] | None = None
    ) -> dict[str, str]:
        """Return why objects may run code where Megatron unpickles them, by name of those that may.

        Args:
            names: objects to check; nothing that they name is called.
            knows: predicate as in :func:`foreign_name`.

        Raises:
            StateError: a file is missing or damaged.
        """
        found = {}
        for name in names:
            with self.opened(self.blobs[name][0]) as archive:
                if (why := foreign_name(archive.pickled(), knows)) is not None:
                    found[name] = why
        return found

    @cached_property
    def common_key(self) -> str | None:
        """Name of the object that holds the common state; None in older checkpoints."""
        return next((name for name in self.objects if name.partition("/")[0] == COMMON_STATE), None)

    @property
    def common_file(self) -> Blob | None:
        """Where older checkpoints keep the common state; None in others."""
        if self.common_key is not None or not is_file(self.path, COMMON_FILE):
            return None
        return Blob(COMMON_FILE, 0, size_of(self.path, COMMON_FILE), "the common state", None)

    @cached_property
    def common_state(self) -> Mapping[str, Any]:
        """State that is the same on all ranks, as :meth:`read_object` returns it."""
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
        """Megatron's arguments when it was saved, by name; empty where there are none.

        Raises:
            StateError: there is something else in their place.
        """
        said = self.common_state.get("args")
        return self._checked("args", said.state if isinstance(said, Made) else said, dict) or {}

    @cached_property
    def model_arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments, or those that a conversion has recorded; empty without either.

        Raises as :attr:`arguments` does.
        """
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
        """Return a value of the common state, which has to be None or of some kinds."""
        is_kind = value is None or (isinstance(value, kinds) and not isinstance(value, bool))
        if is_kind and isinstance(value, str):
            is_kind = value.isprintable()
        if is_kind and isinstance(value, int):
            is_kind = 0 <= value <= MAX_NUMBER
        if not is_kind:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise StateError(
                f"{self.path}: {name}: expected {wanted} in what Megatron saved, got something "
                "else. The checkpoint is damaged: take another one."
            )
        return value


def _tensor_info(blobs: list[Blob]) -> TensorInfo:
    corners = [[a + n for a, n in zip(b.corner, b.shape, strict=True)] for b in blobs]
    shape = tuple(max(ends) for ends in zip(*corners, strict=True))
    return TensorInfo(shape, getattr(torch, blobs[0].dtype.removeprefix("torch.")))


def _overlap(start: tuple[int, ...], shape: tuple[int, ...], blob: Blob) -> list[range]:
    """Return, for each axis, what a box and a piece of a tensor have in common."""
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
            f"{path / METADATA}: {expected} no such file. Saving was not finished: take another "
            "checkpoint."
        ) from error
    except OSError as error:
        raise StateError(
            f"{path / METADATA}: {expected}: {error.strerror}. Take another checkpoint."
        ) from error
    except StateError as error:
        raise StateError(f"{path}: {error}. Take another checkpoint.") from error


def _read_config(path: Path) -> Mapping[str, Any]:
    """Return ``metadata.json``."""
    file = path / CONFIG_FILE
    try:
        config = parse_json(read_file(path, CONFIG_FILE))
        if not isinstance(config, dict) or any(isinstance(v, dict | list) for v in config.values()):
            raise ValueError("not an object of names and values")
    except FileNotFoundError as error:
        raise StateError(
            f"{file}: expected Megatron's description of a complete checkpoint, got no such file. "
            "Saving was not finished: take an earlier checkpoint."
        ) from error
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise StateError(f"{file}: expected JSON, got: {said}. Take another checkpoint.") from error
    backend = config.get("sharded_backend")
    if backend != "torch_dist":
        named = repr(backend)[:40] if isinstance(backend, str) else "none"
        raise LayoutError(
            f"{path}: expected a torch_dist checkpoint, got sharded_backend {named}. "
            "Save with --ckpt-format torch_dist."
        )
    return config
