"""Gives harmed checkpoints to the commands, in a process of its own with bounded memory.

``python -m tests.support.hostile.hostile_run FOLDER SEED FIRST LAST`` prints one line of JSON a
case, which says what went wrong; with one number N for FIRST LAST it keeps case N in FOLDER.
"""

import contextlib
import functools
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moe_optim.checkpoint.files.metadata import read_blobs, read_metadata
from moe_optim.checkpoint.files.pickles import foreign_name
from moe_optim.checkpoint.files.torch_dist import TorchDistReader
from moe_optim.checkpoint.integrity import corrupt_files
from moe_optim.checkpoint.sealing import record_checksums
from moe_optim.checkpoint.state_manifest import MANIFEST, StateManifest
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion import (  # noqa: F401  # before the clock
    comparison,
    conversion,
    opening,  # noqa: F401  # before the clock
)
from moe_optim.commands.train.run_folder import find_resume_point
from moe_optim.errors import MoEOptimError, StateError
from tests.support.hostile.hostile_checkpoints import KINDS, SECRET, make_case

CPU_S, WALL_S = 5.0, 60.0
MEMORY_BYTES = 2**30
ROOM_BYTES = 8 * 2**30
"""Address space that a case may take: more fails at once, and does not harm the machine."""


class Late(BaseException):
    """A case takes too long, though it does nothing."""


def prepare(sandbox: Path) -> None:
    """Make the checkpoints that cases are made of, and what lies outside of them."""
    for kind, write in KINDS.items():
        (sandbox / "templates").mkdir(exist_ok=True)
        write(sandbox / "templates" / kind)
    outside = sandbox / "outside"
    outside.mkdir()
    torch.save({"weight": torch.tensor(list(SECRET), dtype=torch.uint8)}, outside / "secret.pt")
    for suffix in ("", ".json", ".distcp", ".txt", ".partial"):
        (outside / f"secret{suffix}").write_bytes(SECRET)
    from safetensors.torch import save_file

    values = torch.tensor(list(SECRET), dtype=torch.uint8)
    save_file({"norm": values}, outside / "secret.safetensors")


def run_case(sandbox: Path, seed: str, *, keep: bool = False) -> dict[str, Any]:
    """Make a case, give it to every command, and return what is wrong, empty if nothing."""
    rng = random.Random(seed)
    kind = rng.choice([*KINDS] * 3 + ["torch_dist", "of a run"] * 3)
    root, done = make_case(kind, sandbox, rng)
    parts = [root, sandbox / "outside", sandbox / "templates"]
    before = [_listing(folder) for folder in parts]
    faults = [fault for name in (*COMMANDS, *CALLS) for fault in _run(name, root, sandbox)]
    if (sandbox / "canary").exists():
        faults.append("code ran")
        (sandbox / "canary").rmdir()
    for folder, listing in zip(parts, before, strict=True):
        if _listing(folder) != listing:
            faults.append(f"something was changed in {folder.name}")
    known = {"templates", "outside", "case", "out", "cwd"}
    strange = [*(sandbox / "cwd").iterdir(), *(p for p in sandbox.iterdir() if p.name not in known)]
    faults += [f"{path} was written" for path in strange]
    faults += _leaks(sandbox / "out")
    if not keep:
        for folder in ("case", "out"):
            shutil.rmtree(sandbox / folder, ignore_errors=True)
    return {"seed": seed, "kind": kind, "done": done, "faults": faults}


def _run(name: str, root: Path, sandbox: Path) -> Iterator[str]:
    """Run one command or call, and yield what is wrong with how it ends and what it takes."""
    _reset_peak()
    began, memory, said = time.process_time(), _peak(), io.StringIO()
    try:
        with _limited(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if name in CALLS:
                CALLS[name](root)
            else:
                yield from _run_command(name, root, sandbox, said)
    except MoEOptimError as error:
        said.write(str(error))
    except (Exception, Late):
        yield f"{name}: {traceback.format_exc(limit=-6)}"
    if (seconds := time.process_time() - began) > CPU_S:
        yield f"{name}: {seconds:.1f} s"
    if (taken := _peak() - memory) > MEMORY_BYTES:
        yield f"{name}: {taken / 2**20:,.0f} MiB"
    if SECRET.decode() in said.getvalue():
        yield f"{name}: shows what lies outside"


COMMANDS = {
    "inspect": "inspect {root}",
    "inspect --thorough": "inspect {root} --thorough --json",
    "verify": "verify {root} {whole}",
    "verify the other way round": "verify {whole} {root} --weights-only",
    "convert to safetensors": "convert {root} {out}/a --experts hf --format safetensors",
    "convert to transformers": "convert {root} {out}/c --to hf",
    "convert to torch_dist": "convert {root} {out}/b --experts grouped --format torch_dist "
    "--glu-interleave 4 --weights-only",
}


def _run_command(name: str, root: Path, sandbox: Path, said: io.StringIO) -> Iterator[str]:
    """Run one command and yield what is wrong with how it ends."""
    whole = sandbox / "templates" / "torch_dist"
    words = COMMANDS[name].split(" ")
    argv = [word.format(root=root, whole=whole, out=sandbox / "out") for word in words]
    code = cli.main(argv)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    if code not in (0, 1, 2) or (code == 2) != (len(lines) == 1):
        yield f"{name}: exit code {code} and {len(lines)} lines of errors"


def _folders(root: Path) -> list[Path]:
    return sorted(root.glob("iter_*")) or [root]


def _check(root: Path) -> None:
    for folder in _folders(root):
        list(corrupt_files(folder))


def _resume(root: Path) -> None:
    """On a copy: what is found to be whole is written into the tracker file."""
    copy = root.with_name("out") / "resumed"
    shutil.copytree(root, copy, symlinks=True, ignore=_no_pipes)
    find_resume_point(copy)


def _record(root: Path) -> None:
    copy = root.with_name("out") / "recorded"
    shutil.copytree(root, copy, symlinks=True, ignore=_no_pipes)
    for folder in _folders(copy):
        with contextlib.suppress(StateError):
            record_checksums(folder)


def _no_pipes(folder: str, names: list[str]) -> list[str]:
    """Leave out what cannot be copied, or not in time."""
    paths = [Path(folder, name) for name in names]
    return [
        path.name
        for path in paths
        if not (path.is_symlink() or path.is_dir())
        and (not path.is_file() or path.stat().st_size > 2**30)
    ]


def _load(root: Path) -> None:
    """What a load reads first; what it lets pass, Python's own unpickler then reads as well."""
    for folder in _folders(root):
        content = read_metadata_or_none(folder)
        if content is None:
            continue
        read_blobs(content)
        _unpickle(content)
        stored = TorchDistReader(folder)
        for key in stored.objects:
            blob = stored.blobs[key][0]
            with stored.opened(blob) as archive:
                if foreign_name(archive.pickled(), lambda _: False) is not None:
                    continue
                archive.stream.seek(0)
                with contextlib.suppress(Exception):
                    torch.load(archive.stream, weights_only=False, map_location="cpu")
            if MANIFEST in key:
                StateManifest.from_dict(stored.read_object(key), key).addresses()


def read_metadata_or_none(folder: Path) -> bytes | None:
    try:
        return read_metadata(folder)
    except OSError:
        return None


def _unpickle(content: bytes) -> None:
    with contextlib.suppress(Exception):
        pickle.loads(content)


CALLS = {"check": _check, "resume": _resume, "record": _record, "load": _load}


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Late(f"more than {WALL_S} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _peak() -> int:
    """Return the most bytes that were in memory since :func:`_reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _listing(folder: Path) -> list[tuple[str, ...]]:
    """Return what lies in a folder: names, kinds, sizes, times and targets of links."""
    return sorted(
        (
            str(path.relative_to(folder)),
            *map(str, (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns)),
            str(path.readlink()) if path.is_symlink() else "",
        )
        for path in folder.rglob("*")
    )


def _leaks(out: Path) -> Iterator[str]:
    for path in out.rglob("*") if out.exists() else ():
        is_short = path.is_file() and not path.is_symlink() and path.stat().st_size < 2**24
        if is_short and SECRET in path.read_bytes():
            yield f"{path.name} holds what lies outside"


def main() -> None:
    """Run cases, each with its own seed."""
    sandbox, seed, first, *last = Path(sys.argv[1]), *sys.argv[2:]
    torch.set_num_threads(1)
    cli.build_parser = functools.cache(cli.build_parser)  # a fifth of the time
    (sandbox / "cwd").mkdir(parents=True)
    os.chdir(sandbox / "cwd")
    prepare(sandbox)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))
    for number in range(int(first), int(last[0]) if last else int(first) + 1):
        print(json.dumps(run_case(sandbox, f"{seed}/{number}", keep=not last)), flush=True)


if __name__ == "__main__":
    main()
