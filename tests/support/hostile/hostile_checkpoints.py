"""Small checkpoints of every kind, and what somebody could make of them who means harm."""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo

from moe_optim.checkpoint.sealing import record_checksums
from tests.support.checkpoints.stored_checkpoints import (
    common_state,
    stored_tensors,
    write_torch_dist,
)
from tests.support.hostile.damage import save_legacy
from tests.support.hostile.hostile_pickles import mutate_archive, mutate_pickle

SECRET = b"only for its owner"
"""In every file outside of the checkpoint."""
TRACKER = "latest_checkpointed_iteration.txt"
INDEX = "model.safetensors.index.json"
MANIFEST_KEY = "optimizer.distributed.dp_group_idx_0.moe_optim_manifest.0badcafe/shard_0_1"
HEAD = "model.layers.0.mlp.experts."


def _manifest() -> dict[str, Any]:
    place = {"name": f"{HEAD}linear_fc1.weight", "shape": (4, 16, 6), "start": 0}
    bucket = {"numel": 384, "parameters": (place,)}
    return {
        "version": 1,
        "buffers": ({"dtype": "(torch.bfloat16, torch.float32)", "buckets": (bucket,)},),
        "glu_interleave": None,
        "versions": {"torch": "2.11"},
    }


def _torch_dist(folder: Path) -> None:
    write_torch_dist(folder, {**stored_tensors(), MANIFEST_KEY: [_manifest()]}, common_state(2))


def _of_a_run(folder: Path) -> None:
    """A run's folder, with a checkpoint with our checksums and one with Megatron's."""
    for iteration in (7, 8):
        _torch_dist(folder / f"iter_{iteration:07d}")
    record_checksums(folder / "iter_0000007")
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / "iter_0000008").iterdir()
    }
    manifest = {"algorithm": "sha256", "files": files}
    (folder / "iter_0000008" / "integrity.json").write_text(json.dumps(manifest))
    (folder / TRACKER).write_text("8")


def _with_common_file(folder: Path) -> None:
    """As older Megatrons save."""
    write_torch_dist(folder, stored_tensors(states=False), common_state(), one_file=False)
    rewrite(folder, drop="common_state/shard_0_1")
    torch.save(common_state(2), folder / "common.pt")


def _safetensors(folder: Path) -> None:
    folder.mkdir()
    notes = {"moe_optim.layout": "hf", "moe_optim.num_experts": "4", "iteration": "7"}
    first = {f"{HEAD}gate_up_proj": torch.ones(4, 16, 6), f"{HEAD}down_proj": torch.ones(4, 6, 8)}
    files = {"a.safetensors": first, "b.safetensors": {"norm": torch.ones(6).bfloat16()}}
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata=notes)
    names = {key: name for name, tensors in files.items() for key in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _legacy(folder: Path) -> None:
    save_legacy(folder, (7, 8))
    (folder / TRACKER).write_text("8")
    record_checksums(folder / "iter_0000007")


KINDS: dict[str, Callable[[Path], None]] = {
    "torch_dist": _torch_dist,
    "of a run": _of_a_run,
    "with common.pt": _with_common_file,
    "safetensors": _safetensors,
    "--ckpt-format torch": _legacy,
}


def rewrite(
    folder: Path,
    change: Callable[[str, bytes], bytes] = lambda _, content: content,
    edit: Callable[[Any], None] = lambda _: None,
    drop: str = "",
) -> None:
    """Write a torch_dist checkpoint again, so that its parts still fit together.

    Args:
        folder: of the checkpoint.
        change: gets key and bytes of every archive, and returns those to write.
        edit: gets the metadata, torch's own object, before it is written.
        drop: key of an object to leave out.
    """
    metadata = pickle.loads(_content(folder / ".metadata"))
    metadata.state_dict_metadata.pop(drop, None)
    places, content = {}, io.BytesIO()
    for index, place in metadata.storage_data.items():
        if index.fqn == drop:
            continue
        file = _content(folder / place.relative_path)
        archive = change(index.fqn, file[place.offset : place.offset + place.length])
        places[index] = _StorageInfo("__0_0.distcp", content.tell(), len(archive))
        content.write(archive)
    for path in folder.glob("*.distcp"):
        path.unlink()
    (folder / "__0_0.distcp").write_bytes(content.getvalue())
    metadata.storage_data = places
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _content(path: Path) -> bytes:
    """Read what an earlier mutation may have made a link, a pipe, a device or very large."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 2**24:
        raise OSError(f"{path} is not a small file of the checkpoint")
    return path.read_bytes()


# Each of the mutations below changes a checkpoint in place. `root` is what a command is given, and
# `folder` one checkpoint in it, which may be the same.


def _change_objects(folder: Path, canary: Path, rng: random.Random) -> None:
    keys = [key for key in ("common_state", "rng_state", MANIFEST_KEY) if rng.random() < 0.5]
    rewrite(
        folder,
        lambda key, content: (
            mutate_archive(content, canary, rng)
            if any(key.startswith(each) for each in keys)
            else content
        ),
    )


def _change_tensors(folder: Path, canary: Path, rng: random.Random) -> None:
    share = rng.choice((0.1, 1.0))
    rewrite(
        folder,
        lambda key, content: (
            mutate_archive(content, canary, rng)
            if "/shard" not in key and rng.random() < share
            else content
        ),
    )


def _change_metadata_pickle(folder: Path, canary: Path, rng: random.Random) -> None:
    path = folder / ".metadata"
    path.write_bytes(mutate_pickle(_content(path), canary, rng))


NUMBERS = (-1, 0, 1, 2, 3, 7, 2**31, 2**40, 2**62, 2**63, 10**100, True, None, 1.5, "3", "x" * 5000)
NAMES = (
    "", ".", "..", "../outside/secret.pt", "/dev/zero", "/etc/passwd", "a\0b", "\x1b[31m", "\n",
    "x" * 5000, "experts." * 400, "common_state", "\udc80", "ü", MANIFEST_KEY,
)  # fmt: skip


def _change_metadata(folder: Path, _canary: Path, rng: random.Random) -> None:
    """Have the metadata say something else of one tensor or one archive."""

    def edit(metadata: Any) -> None:
        entries, places = metadata.state_dict_metadata, metadata.storage_data
        tensors = [key for key, entry in entries.items() if hasattr(entry, "chunks")]
        key = rng.choice(tensors)
        entry, kind = entries[key], rng.randrange(10)
        if kind == 0:
            entry.size = _other_shape(entry.size, rng)
        elif kind == 1:
            chunk = rng.choice(entry.chunks)
            field = rng.choice(("offsets", "sizes"))
            setattr(chunk, field, _other_shape(getattr(chunk, field), rng))
        elif kind == 2:
            entry.properties.dtype = rng.choice((torch.float64, torch.uint8, torch.quint8, "x"))
        elif kind == 3:
            place = rng.choice(list(places.values()))
            setattr(place, rng.choice(("offset", "length")), rng.choice(NUMBERS))
        elif kind == 4:
            rng.choice(list(places.values())).relative_path = rng.choice(NAMES)
        elif kind == 5:
            entries[rng.choice(NAMES)] = entries.pop(rng.choice(list(entries)))
        elif kind == 6:
            _rename(metadata, key, rng.choice((*NAMES, "decoder.layers.0.mlp.experts.weight1")))
        elif kind == 7:
            entry.chunks = entry.chunks * rng.choice((0, 2, 1000))
        elif kind == 8:  # many axes, all of them cut
            axes = rng.choice((5, 8, 15, 16, 17, 64))
            entry.size = torch.Size([2] * axes)
            entry.chunks = [_box([0] * axes, [1] * axes), _box([1] * axes, [1] * axes)]
        else:  # all at one scale, so that they fit together
            _claim(metadata, key, rng)

    rewrite(folder, edit=edit)


def _box(offsets: list[int], sizes: list[int]) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def _other_shape(shape: Any, rng: random.Random) -> Any:
    numbers = list(shape) or [1]
    numbers[rng.randrange(len(numbers))] = rng.choice(NUMBERS)
    try:
        return torch.Size(rng.choice((numbers, numbers[:-1], [*numbers, 1], [1] * 40)))
    except (TypeError, OverflowError):
        return tuple(numbers)


def _rename(metadata: Any, key: str, name: str) -> None:
    """Give a tensor another name everywhere."""
    import dataclasses

    metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(key)
    metadata.storage_data = {
        dataclasses.replace(index, fqn=name) if index.fqn == key else index: place
        for index, place in metadata.storage_data.items()
    }


def _claim(metadata: Any, key: str, rng: random.Random) -> None:
    """Have a tensor of one chunk claim a shape whose elements are not there, or that has none."""
    shape = rng.choice(
        ([2**40, 4, 4, 0], [2**20, 4, 16, 6], [0, 4, 16, 6], [2**62], [3, 2**31, 2, 0], [2**16] * 3)
    )
    entry = metadata.state_dict_metadata[key]
    entry.size = torch.Size(shape)
    entry.chunks = [_box([0] * len(shape), shape)]
    first, *others = [index for index in metadata.storage_data if index.fqn == key]
    for index in others:
        del metadata.storage_data[index]
    place = metadata.storage_data.pop(first)
    metadata.storage_data[type(first)(key, torch.Size([0] * len(shape)))] = place


def _deep(depth: int) -> str:
    return rf"{'[' * depth}{']' * depth}"


JSON_TEXTS = (
    "9" * 5000, "-" + "9" * 5000, "1e99999", "NaN", "[" * 200_000, _deep(500), _deep(100_000),
    '{"a":' * 50_000, "null", "true", '"' + "x" * 100_000, "\ufeff{}", "", "{}", "[]", "[[], {}]",
    '"\\ud800"', '"../outside/secret.safetensors"', '"/etc/passwd"', '"\\u0000"', '"\\u001b[2J"',
)  # fmt: skip
"""Values, and what is none."""


def mutate_json(path: Path, rng: random.Random) -> None:
    """Put another value, or something that is none, somewhere into a JSON document."""
    text = path.read_text()
    kind = rng.random()
    if kind < 0.2:
        path.write_text(rng.choice(JSON_TEXTS))
        return
    if kind < 0.3:
        path.write_bytes(text.encode()[: rng.randrange(len(text))] + rng.randbytes(3))
        return
    document = json.loads(text)
    holder, steps = document, rng.randrange(3)
    for _ in range(steps):
        inner = [value for value in _values(holder) if isinstance(value, dict | list) and value]
        holder = rng.choice(inner) if inner else holder
    mark = "put something here"
    if isinstance(holder, dict) and rng.random() < 0.3:
        name = rng.choice((*NAMES, "../outside/secret.safetensors"))
        holder[name.encode(errors="replace").decode()] = mark
    elif isinstance(holder, dict):
        holder[rng.choice(list(holder))] = mark
    else:
        holder[rng.randrange(len(holder))] = mark
    path.write_text(json.dumps(document).replace(f'"{mark}"', rng.choice(JSON_TEXTS)))


def _values(holder: Any) -> list[Any]:
    return list(holder.values() if isinstance(holder, dict) else holder)


def _change_json(folder: Path, _canary: Path, rng: random.Random) -> None:
    found = [path for path in folder.iterdir() if path.suffix == ".json" and path.is_file()]
    names = ("integrity.json", "moe_optim.seal.json")
    if not found or rng.random() < 0.2:
        found = [folder / rng.choice(names)]
        found[0].write_text('{"algorithm": "sha256", "files": {}, "whole": {}, "tables": {}}')
    mutate_json(rng.choice(found), rng)


def _change_header(folder: Path, _canary: Path, rng: random.Random) -> None:
    """Change what a safetensors file says about its tensors."""
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = folder / "header"
    header.write_bytes(content[8 : 8 + length])
    mutate_json(header, rng)
    changed = header.read_bytes()
    header.unlink()
    said = rng.choice((len(changed),) * 5 + (0, 2**20, 2**40, 2**63))
    path.write_bytes(struct.pack("<Q", said) + changed + content[8 + length :])


SAID = (
    "²", "٧", "7" * 5000, "-1", "release", "..", "../outside", "", "\0", "\x1b[31m", "8\n9", "0x8",
    "iter_0000008", "nan", "1e3", "8" * 300, "x" * 5000,
)  # fmt: skip


def _change_tracker(root: Path, rng: random.Random) -> None:
    said = rng.choice(SAID)
    (root / TRACKER).write_bytes(said.encode(errors="surrogateescape") or rng.randbytes(8))


def _fifo(path: Path, _outside: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, _outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found:
        folder = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            found.bind(path.name)
        finally:
            os.chdir(folder)


def _sparse(path: Path, _outside: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


FILES: dict[str, Callable[[Path, Path], object]] = {
    "missing": lambda path, outside: None,
    "a pipe": _fifo,
    "a socket": _socket,
    "a folder": lambda path, outside: path.mkdir(),
    "a device": lambda path, outside: path.symlink_to("/dev/zero"),
    "a link out": lambda path, outside: path.symlink_to(outside / f"secret{path.suffix}"),
    "a relative link out": lambda path, outside: path.symlink_to(
        os.path.relpath(outside / f"secret{path.suffix}", path.parent)
    ),
    "a link to itself": lambda path, outside: path.symlink_to(path.name),
    "a link to nothing": lambda path, outside: path.symlink_to("nothing"),
    "a link to its folder": lambda path, outside: path.symlink_to("."),
    "empty": lambda path, outside: path.write_bytes(b""),
    "a terabyte of nothing": _sparse,
}


def _change_file(root: Path, outside: Path, rng: random.Random) -> None:
    """Put something else in the place of a file, or of one that need not be there."""
    found = sorted(path for path in root.rglob("*") if not path.is_dir())
    folder = found[0].parent
    extra = ("integrity.json", "moe_optim.seal.json", "common.pt", TRACKER, INDEX, "c.safetensors")
    beside = (".moe_optim.seal.json.partial", f".{TRACKER}.partial")
    names = [folder / name for name in extra] + [root / TRACKER, root / beside[1]]
    path = rng.choice(found * 2 + names + [folder / beside[0]])
    path.unlink(missing_ok=True)
    rng.choice(list(FILES.values()))(path, outside)


def _add_file(root: Path, rng: random.Random) -> None:
    """Put one more file there, with a name that would not show as it is."""
    name = rng.choice(("\x1b[2J", "error: another\n", "x" * 200, "[/red]", "\udc80", "ü"))
    suffix = rng.choice(("", ".safetensors", ".distcp", ".pt", ".json"))
    folder = rng.choice([root, *(path for path in sorted(root.iterdir()) if path.is_dir())])
    (folder / f"{name}{suffix}").write_bytes(rng.randbytes(9))


def make_case(kind: str, sandbox: Path, rng: random.Random) -> tuple[Path, list[str]]:
    """Make a checkpoint of the kind in a sandbox, and harm it in one to three ways.

    Args:
        kind: of ``KINDS``, whose checkpoint lies in ``templates`` of the sandbox.
        sandbox: with ``templates`` and ``outside``.
        rng: decides.

    Returns:
        What a command is given, and what was done to it.
    """
    root = sandbox / "case"
    shutil.copytree(sandbox / "templates" / kind, root)
    canary, outside = sandbox / "canary", sandbox / "outside"
    folders = sorted(root.glob("iter_*")) or [root]
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        folder = rng.choice(folders)
        ways: dict[str, Callable[[], None]] = {
            "json": lambda folder=folder: _change_json(folder, canary, rng),
            "file": lambda: _change_file(root, outside, rng),
            "tracker": lambda: _change_tracker(root, rng),
            "one more file": lambda: _add_file(root, rng),
        }
        if (folder / ".metadata").is_file() and "pickle" not in done:  # which is read below
            ways |= {
                "objects": lambda folder=folder: _change_objects(folder, canary, rng),
                "tensors": lambda folder=folder: _change_tensors(folder, canary, rng),
                "metadata": lambda folder=folder: _change_metadata(folder, canary, rng),
                "pickle": lambda folder=folder: _change_metadata_pickle(folder, canary, rng),
            }
        elif kind == "safetensors":
            ways["header"] = lambda folder=folder: _change_header(folder, canary, rng)
        else:
            ways["archive"] = lambda folder=folder: _change_legacy(folder, canary, rng)
        name = rng.choice([way for way in ways if way != "tracker"] * 3 + ["tracker"])
        try:
            ways[name]()
        except Exception as error:  # what was harmed before can no longer be harmed in this way
            name += f" (not done: {type(error).__name__})"
        done.append(name)
    if rng.random() < 0.2:  # its writer can also record checksums
        for folder in folders:
            _record(folder)
            done.append("recorded")
    return root, done


def _change_legacy(folder: Path, canary: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.rglob("*.pt")))
    path.write_bytes(mutate_archive(_content(path), canary, rng))


def _record(folder: Path) -> None:
    """Write checksums of what is there, whether it makes sense or not."""
    whole = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / ".metadata", folder / "metadata.json")
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 2**24
    }
    content = {"algorithm": "sha256", "whole": whole, "tables": {}}
    path = folder / "moe_optim.seal.json"
    if not path.exists() and not path.is_symlink():
        path.write_text(json.dumps(content))
