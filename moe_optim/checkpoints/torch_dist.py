"""Reads Megatron's ``torch_dist`` checkpoints: torch's distributed format, and a common state."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from moe_optim.checkpoints.archives import contents_defect
from moe_optim.checkpoints.byte_ranges import FileRange
from moe_optim.checkpoints.pickles import load_object
from moe_optim.checkpoints.reader import FileFormat, Recorded, TensorInfo
from moe_optim.checkpoints.stored_metadata import METADATA, Blob, read_blobs
from moe_optim.errors import LayoutError, StateError

COMMON_STATE = "common_state"
COMMON_FILE = "common.pt"
"""Where older Megatrons keep what others store under ``COMMON_STATE``."""
CONFIG_FILE = "metadata.json"
OWN_STATE = "moe_optim"
"""Key of the common state for what is recorded where Megatron's arguments are not known."""
INTERLEAVE_ARG = "moe_mlp_glu_interleave_size"
MANIFEST_INTERLEAVE = "glu_interleave"
"""What the manifests of optimizer states call the same."""
_BLOCK_BYTES = 8 * 2**20
SIZES = {  # what a parallel size is called, and Megatron's argument
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

    def __init__(self, path: Path) -> None:
        """Read what lies where; values stay in the files.

        Args:
            path: a folder such as ``iter_0000160`` that holds ``.metadata``.

        Raises:
            StateError: metadata is missing or damaged, or of an unfinished checkpoint.
            LayoutError: it is of another format.
        """
        self.path = path
        self.config = _read_config(path)
        blobs: dict[str, list[Blob]] = defaultdict(list)
        for blob in _read_blobs(path):
            blobs[blob.key].append(blob)
        self.blobs: Mapping[str, list[Blob]] = blobs
        self._intact: set[Blob] = set()
        self.tensors = {
            name: _tensor_info(path, of_key)
            for name, of_key in blobs.items()
            if of_key[0].offset is not None
        }
        self.objects = {
            name: of_key[0].length for name, of_key in blobs.items() if of_key[0].offset is None
        }

    def read(self, name: str, first: int | None = None) -> Tensor:
        """Return a tensor, or its part at place ``first`` of the first axis."""
        info = self.tensors[name]
        axes = len(info.shape)
        start = (0,) * axes if first is None else (first, *[0] * (axes - 1))
        shape = info.shape if first is None else (1, *info.shape[1:])
        whole = None
        for blob in self.blobs[name]:
            if (blob.offset, blob.shape) == (start, shape):
                whole = self._load_chunk(blob)
                break
            if all(_overlap(start, shape, blob)):
                whole = torch.empty(shape, dtype=info.dtype) if whole is None else whole
                into, taken = whole, self._load_chunk(blob)
                for axis, common in enumerate(_overlap(start, shape, blob)):
                    into = into.narrow(axis, common.start - start[axis], len(common))
                    taken = taken.narrow(axis, common.start - blob_start(blob)[axis], len(common))
                into.copy_(taken)
        if whole is None:  # no elements, no pieces
            whole = torch.empty(shape, dtype=info.dtype)
        return whole if first is None else whole[0]

    def _load_chunk(self, blob: Blob) -> Tensor:
        with self.opened(blob) as file:
            tensor = torch.load(file, map_location="cpu", weights_only=True)
        found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "none"
        if found != f"{blob.dtype} {blob.shape}":
            raise StateError(
                f"{self.path / blob.file}: {blob.name}: expected a tensor of {blob.dtype} "
                f"{blob.shape}, got {found}. The file is damaged: take another checkpoint."
            )
        return cast(Tensor, tensor).contiguous()

    @contextmanager
    def opened(self, blob: Blob) -> Iterator[IO[bytes]]:
        """Open the bytes of one blob; whatever fails inside is a damaged checkpoint.

        Raises:
            StateError: the file is missing, cut off or damaged.
        """
        path = self.path / blob.file
        try:
            with path.open("rb") as file:
                if (size := file.seek(0, os.SEEK_END)) < blob.end:
                    raise EOFError(f"a file of {size:,} bytes")
                archive = cast(IO[bytes], FileRange(file, blob.start, blob.length))
                self._compare_checksums(blob, archive)
                yield archive
        except FileNotFoundError as error:
            raise StateError(
                f"{path}: expected a file with {blob.name}, got none. "
                "The checkpoint is not complete: take another one."
            ) from error
        except Exception as error:  # whatever torch makes of damaged bytes
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise StateError(
                f"{path}: {blob.name}: expected what torch.save wrote, {blob.length:,} bytes from "
                f"{blob.start:,}, got {said}. The file is cut off or damaged: take another "
                "checkpoint."
            ) from error

    def _compare_checksums(self, blob: Blob, archive: IO[bytes]) -> None:
        """Read an archive to its end, unless that was done before, and go back to its start."""
        if blob in self._intact:
            return
        if (defect := contents_defect(archive)) is not None:
            raise ValueError(defect)
        self._intact.add(blob)
        archive.seek(0)

    def blocks(self, blob: Blob) -> Iterator[bytes]:
        """Yield the bytes of one blob as they are stored; what is done with them is not its own.

        Raises:
            StateError: the file is missing, cut off or damaged.
        """
        with self.opened(blob) as file:
            while block := file.read(_BLOCK_BYTES):
                yield block

    def read_bytes(self, name: str) -> bytes:
        """Return the bytes of an object as they are stored."""
        return b"".join(self.blocks(self.blobs[name][0]))

    def read_object(self, name: str) -> Any:
        """Return an object, whatever it names of unknown classes made inert.

        Raises:
            StateError: its bytes are missing or damaged.
        """
        with self.opened(self.blobs[name][0]) as file:
            (value,) = load_object(file)
        return value

    @cached_property
    def common_key(self) -> str | None:
        """Name of the object that holds the common state; None in older checkpoints."""
        names = [name for name in self.objects if name.partition("/")[0] == COMMON_STATE]
        return names[0] if names else None

    @cached_property
    def common_state(self) -> Mapping[str, Any]:
        """What is the same on all ranks, objects of unknown classes made inert."""
        common_file = self.path / COMMON_FILE
        if self.common_key is not None:
            blob = self.blobs[self.common_key][0]
        elif common_file.is_file():
            blob = Blob(COMMON_FILE, 0, common_file.stat().st_size, "the common state", None)
        else:
            return {}
        with self.opened(blob) as file:
            state = load_object(file)
            if self.common_key is not None:  # a list of the objects under that key
                (state,) = state
            return dict(state)

    @cached_property
    def recorded(self) -> Recorded:
        """What the common state says."""
        state = self.common_state
        said = state.get("args", {})
        args = dict(said) if isinstance(said, Mapping) else vars(said)
        own = {**state.get(OWN_STATE, {}), **args}
        version = state.get("checkpoint_version")
        content = state.get("content_metadata") or {}
        return Recorded(
            glu_interleave=(own[INTERLEAVE_ARG] or 0) if INTERLEAVE_ARG in own else None,
            layout=None,
            iteration=state.get("iteration"),
            version=None if version is None else str(version),
            optimizer_sharding=content.get("distrib_optim_sharding_type"),
            parallel_sizes={short: args[name] for short, name in SIZES.items() if args.get(name)},
        )


def _tensor_info(path: Path, blobs: list[Blob]) -> TensorInfo:
    """Return what a tensor is of which these pieces cover every element once."""
    corners = [[a + n for a, n in zip(blob_start(b), b.shape, strict=True)] for b in blobs]
    shape = tuple(max(ends) for ends in zip(*corners, strict=True))
    name = blobs[0].dtype
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(
            f"{path / METADATA}: {blobs[0].key}: expected a dtype of torch, got {name!r}. "
            "The file is damaged: take another checkpoint."
        )
    return TensorInfo(shape, dtype)


def blob_start(blob: Blob) -> tuple[int, ...]:
    """Return where in its tensor a piece begins."""
    return blob.offset or ()


def _overlap(start: tuple[int, ...], shape: tuple[int, ...], blob: Blob) -> list[range]:
    """Return, for each axis, what a box and a piece of a tensor have in common."""
    return [
        range(max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(start, shape, blob_start(blob), blob.shape, strict=True)
    ]


def _read_blobs(path: Path) -> list[Blob]:
    file = path / METADATA
    try:
        return read_blobs(file.read_bytes(), is_verified=False)
    except FileNotFoundError as error:
        raise StateError(
            f"{file}: expected what lies where in the checkpoint, got no such file. "
            "Saving was not finished: take another checkpoint."
        ) from error
    except StateError as error:
        raise StateError(f"{path}: {error}. Take another checkpoint.") from error


def _read_config(path: Path) -> Mapping[str, Any]:
    """Return ``metadata.json``."""
    file = path / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise StateError(
            f"{file}: expected Megatron's description of a complete checkpoint, got no such file. "
            "Saving was not finished: take an earlier checkpoint."
        ) from error
    except ValueError as error:
        raise StateError(
            f"{file}: expected JSON, got: {error}. Take another checkpoint."
        ) from error
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    if backend != "torch_dist":
        raise LayoutError(
            f"{path}: expected a torch_dist checkpoint, got sharded_backend {backend!r}. "
            "Save with --ckpt-format torch_dist."
        )
    return dict(config)
