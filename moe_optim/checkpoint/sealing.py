"""Checksum manifests, written so that no complete torch_dist checkpoint is without one.

``metadata.json`` declares a checkpoint complete. The manifest is written before it, once all data
and ``.metadata`` are there, and again after it, with its own checksum. A save that is killed in
between leaves an incomplete checkpoint, or a complete one with the checksums of all its data.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from moe_optim.checkpoint.files.folders import (
    CHECKSUM_MANIFEST,
    COMMON_FILE,
    CONFIG_FILE,
    MEGATRONS_MANIFEST,
    Checksums,
    read_checksums,
    remove_record,
    sha256_of,
    write_checksums,
)
from moe_optim.checkpoint.integrity import archives_of, table_checksums
from moe_optim.integration.agreement import agree, from_first, gather_objects

_WRITER = re.compile(r".*__(\d+)_\d+\.distcp")


def record_checksums(checkpoint: Path) -> None:
    """Write the checksum manifest of ``checkpoint``, a complete iteration folder.

    One process must call this, after all writes. The manifest contains the SHA-256 of each metadata
    file and the CRC-32 of each archive's table (names, offsets and CRCs of records). Data is not
    read again.

    Raises:
        StateError: checkpoint is incomplete, or the manifest cannot be written.
    """
    checkpoint = Path(checkpoint)
    remove_record(checkpoint, CHECKSUM_MANIFEST)
    whole, ranges = archives_of(checkpoint)
    of_files = {name: table_checksums(checkpoint, name, ranges[name]) for name in ranges}
    write_checksums(checkpoint, Checksums(whole, of_files))


def record_data(checkpoint: Path) -> None:
    """Write the manifest of a torch_dist checkpoint that is complete but for ``metadata.json``.

    Every rank must call it. Each reads the tables of the files that it wrote. StateError on all
    ranks if a file is incomplete.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, ranges = from_first(lambda: archives_of(checkpoint, is_finished=False), None)
    mine = agree(
        lambda: {
            name: table_checksums(checkpoint, name, ranges[name])
            for name in ranges
            if _writer_of(name) % ranks == rank
        },
        None,
    )
    everywhere = gather_objects(mine, None)
    of_files = {name: digests for one in everywhere for name, digests in one.items()}
    from_first(lambda: write_checksums(checkpoint, Checksums(whole, of_files)), None)


def record_config(checkpoint: Path) -> None:
    """Add the checksum of ``metadata.json`` to the manifest; one process must call this."""
    found = read_checksums(checkpoint)
    whole = {**found.whole, CONFIG_FILE: sha256_of(checkpoint, CONFIG_FILE)}
    write_checksums(checkpoint, replace(found, whole=whole))


def _writer_of(name: str) -> int:
    match = _WRITER.fullmatch(name)
    return int(match[1]) if match else 0


def invalidate(checkpoint: Path) -> None:
    """Mark ``checkpoint``, a torch_dist iteration folder, incomplete before it is overwritten.

    One process must call this before any rank writes: the old ``metadata.json`` would declare the
    folder complete. Also removes its checksums, and the common state of older Megatrons; StateError
    if a file cannot be removed.
    """
    # the first decides; Megatron would prefer an old common state to the one that it saves
    for name in (CONFIG_FILE, MEGATRONS_MANIFEST, CHECKSUM_MANIFEST, COMMON_FILE):
        remove_record(Path(checkpoint), name)


def mark_unfinished(checkpoint: Path) -> None:
    """Mark ``checkpoint``, a ``--ckpt-format torch`` folder, incomplete until its save ends.

    One process must call this before any rank writes: per-rank files do not show whether those of
    other ranks exist and belong to the same save. Creates a missing folder.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_checksums(checkpoint, None)
