"""What the check of a checkpoint says, how ranks share it, and what it costs."""

import json
import pickle
import re
import shutil
import tracemalloc
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.checkpoint.files import metadata as metadata_file
from moe_optim.checkpoint.files import untrusted_files
from moe_optim.checkpoint.files.archives import BLOCK_BYTES
from moe_optim.checkpoint.files.folders import CHECKSUM_MANIFEST, DamageError
from moe_optim.checkpoint.integrity import (
    checkpoint_defect,
    corrupt_files,
    require_intact,
)
from moe_optim.checkpoint.sealing import invalidate, mark_unfinished, record_checksums
from moe_optim.errors import StateError
from tests.support.checkpoints.stored_checkpoints import STATES, stored_tensors, write_torch_dist
from tests.support.hostile.damage import (
    flip_in,
    save_legacy,
    save_with_megatron,
)
from tests.support.hostile.hostile_pickles import Command
from tests.support.ranks import run_ranks

ITERATIONS = (10, 20)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    run_ranks(1, save_with_megatron, root, ITERATIONS, False)
    return root


@pytest.fixture
def checkpoint(saved, tmp_path):
    """The newer of two checkpoints, to be damaged."""
    return shutil.copytree(saved, tmp_path / "checkpoints") / "iter_0000020"


def test_a_foreign_pickle_is_refused_and_runs_no_code(checkpoint, tmp_path):
    ran = tmp_path / "ran"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Command(ran)))
    defect = ".metadata is truncated or not torch's: it names posix.mkdir"
    assert checkpoint_defect(checkpoint) == defect
    assert not ran.exists()


def test_an_error_names_every_defective_file_and_what_to_load_instead(checkpoint):
    (checkpoint / "__0_0.distcp").unlink()
    with (checkpoint / "__0_1.distcp").open("r+b") as file:
        file.truncate(100)
    expected = (
        r"iter_0000020: expected every file .* __0_0.distcp is missing.*; "
        r"__0_1.distcp is cut off: 100 of \d+ bytes. .*iter_0000010 .* --ckpt-step 10"
    )
    for thorough in (True, False):
        with pytest.raises(StateError, match=expected):
            require_intact(checkpoint, thorough=thorough)
    shutil.rmtree(checkpoint.with_name("iter_0000010"))
    with pytest.raises(StateError, match="No other checkpoint beside it is complete"):
        require_intact(checkpoint, thorough=False)


@pytest.mark.parametrize("at_once", [0, 2**18], ids=["large archives", "small ones"])
def test_a_flipped_bit_in_data_is_found_with_its_file_and_key(checkpoint, at_once, monkeypatch):
    monkeypatch.setattr(untrusted_files, "_READ_AT_ONCE", at_once)
    for key in ("experts.weight", "moment", "count", "rng", "common_state"):
        kept = {path: path.read_bytes() for path in checkpoint.glob("*.distcp")}
        name = flip_in(checkpoint, key)
        assert checkpoint_defect(checkpoint) is None  # bytes of data are not read
        (defect,) = corrupt_files(checkpoint)
        assert (defect.file, defect.key.partition("/")[0].partition(" ")[0]) == (name, key)
        (checkpoint / name).write_bytes(kept[checkpoint / name])


REFUSED = {
    "is a file, expected a folder": lambda path: (shutil.rmtree(path), path.write_text("")),
    "does not exist": shutil.rmtree,
    "no metadata.json": lambda path: [each.unlink() for each in path.iterdir()],
    "names the backend 'zarr'": lambda path: (path / "metadata.json").write_text(
        json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1})
    ),
    "metadata.json is cut off or damaged": lambda path: (path / "metadata.json").write_text("[]"),
    "seal.json is damaged": lambda path: (path / "moe_optim.seal.json").write_text("{}"),
    ".metadata cannot be read: it points outside the checkpoint": lambda path: (
        (path / ".metadata").unlink(),
        (path / ".metadata").symlink_to("/proc/self/mem"),
    ),
    "integrity.json cannot be read": lambda path: (path / "integrity.json").write_text("{"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_checkpoint_is_refused_for_its_reason(checkpoint, what):
    REFUSED[what](checkpoint)
    assert what in checkpoint_defect(checkpoint)
    with pytest.raises(StateError, match="iter_0000010"):
        require_intact(checkpoint, thorough=True)


@pytest.mark.parametrize("recorded", [False, True])
def test_ranks_that_share_the_reading_find_every_defect_once(checkpoint, recorded):
    if recorded:
        record_checksums(checkpoint)
    for key in ("experts.weight", "moment", "common_state"):
        flip_in(checkpoint, key)
    whole = sorted(map(str, corrupt_files(checkpoint)))
    assert len(whole) == 3
    for parts in (1, 2, 3, 16):
        shares = [corrupt_files(checkpoint, part=part, parts=parts) for part in range(parts)]
        assert sorted(str(defect) for share in shares for defect in share) == whole


def test_checksums_tell_a_file_from_that_of_another_checkpoint(checkpoint):
    """Such files are whole, and fit the metadata: only what was recorded tells them apart."""
    record_checksums(checkpoint)
    file = checkpoint / "__0_1.distcp"
    shutil.copy(checkpoint.with_name("iter_0000010") / file.name, file)
    defects = list(corrupt_files(checkpoint))
    assert {defect.file for defect in defects} == {file.name}
    assert all("is another file" in defect.what for defect in defects)


MOMENTS = [f"optimizer.state.{kind}.decoder.layers.mlp.router.weight" for kind in STATES[1:]]


def exchange(metadata):
    """Have the bytes of one moment be those of the other, which has the same shape and dtype."""
    first, second = [
        next(index for index in metadata.storage_data if index.fqn == key) for key in MOMENTS
    ]
    places = metadata.storage_data
    places[first], places[second] = places[second], places[first]


def retype(metadata):
    """Have a moment be of another dtype of as many bytes an element."""
    metadata.state_dict_metadata[MOMENTS[0]].properties.dtype = torch.int32


@pytest.mark.parametrize("edit", [exchange, retype])
def test_exchanged_moments_and_another_dtype_are_found_by_checksums(edit, tmp_path):
    """Without one, the dtype is found by reading everything, and exchanged moments are not."""
    folder = write_torch_dist(tmp_path / "iter_0000010", stored_tensors())
    shutil.copytree(folder, tmp_path / "unrecorded")
    record_checksums(folder)
    for damaged in (folder, tmp_path / "unrecorded"):
        path = damaged / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        edit(metadata)
        path.write_bytes(pickle.dumps(metadata))
    assert checkpoint_defect(folder) == ".metadata does not have the SHA-256 that was recorded"
    assert checkpoint_defect(tmp_path / "unrecorded") is None
    found = [str(defect) for defect in corrupt_files(tmp_path / "unrecorded")]
    assert [MOMENTS[0] in one for one in found] == ([] if edit is exchange else [True])


def test_checksums_are_recorded_of_a_complete_checkpoint_alone(checkpoint):
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(StateError, match="__0_0.distcp is missing"):
        record_checksums(checkpoint)


def test_a_file_that_the_checksums_lack_is_refused(checkpoint):
    """Nothing says that it belongs to the save, though its own checksums fit."""
    record_checksums(checkpoint)
    record = checkpoint / CHECKSUM_MANIFEST
    content = json.loads(record.read_text())
    name, _ = content["archives"].popitem()
    record.write_text(json.dumps(content))
    assert f"{name} was not there when the checksums" in str(checkpoint_defect(checkpoint))


def test_a_checkpoint_that_is_written_over_counts_as_incomplete(checkpoint):
    record_checksums(checkpoint)
    invalidate(checkpoint)
    assert checkpoint_defect(checkpoint).startswith("no metadata.json")
    invalidate(checkpoint)
    invalidate(checkpoint.with_name("iter_0000030"))  # a new folder


def test_a_byte_behind_the_end_of_a_file_is_found_by_sizes_alone(checkpoint, tmp_path):
    save_legacy(tmp_path / "legacy", ITERATIONS)
    said = {
        checkpoint / "__0_1.distcp": r"__0_1.distcp is too long: (\d+) of (\d+) bytes",
        tmp_path / "legacy" / "iter_0000010" / "mp_rank_00" / "distrib_optim.pt": "no table of rec",
    }
    for file, what in said.items():
        folder = file.parent if file.suffix == ".distcp" else file.parents[1]
        assert checkpoint_defect(folder) is None
        with file.open("ab") as opened:
            opened.write(b"\0")
        assert re.search(what, checkpoint_defect(folder))


def test_files_of_ranks_count_as_incomplete_from_the_start_of_a_save_to_its_end(tmp_path):
    """A save that dies between them may leave files of two saves, all of them whole."""
    save_legacy(tmp_path, ITERATIONS)
    for folder in (tmp_path / "iter_0000010", tmp_path / "new" / "iter_0000030"):
        mark_unfinished(folder)
        mark_unfinished(folder)
        assert checkpoint_defect(folder) == "it was not saved to the end"
    with pytest.raises(StateError, match=r"--ckpt-step 20\."):
        require_intact(tmp_path / "iter_0000010", thorough=False)
    record_checksums(tmp_path / "iter_0000010")
    assert list(corrupt_files(tmp_path / "iter_0000010")) == []


def test_checking_takes_the_memory_of_a_few_blocks_whatever_the_size(tmp_path):
    folder = tmp_path / "iter_0000010" / "mp_rank_00"
    folder.mkdir(parents=True)
    values = torch.zeros(16 * BLOCK_BYTES, dtype=torch.uint8)
    torch.save({"weight": values}, folder / "model_optim_rng.pt")
    tracemalloc.start()
    try:
        assert list(corrupt_files(tmp_path / "iter_0000010")) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * BLOCK_BYTES


def boxes_of(size):
    axes = [
        st.tuples(st.integers(0, extent), st.integers(1, extent)).map(sorted) for extent in size
    ]
    box = st.tuples(*axes).map(
        lambda ends: (tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
    )
    return st.lists(box, max_size=3)


def tiling(cuts):
    """A grid: on each axis, the extents of its parts."""
    starts = [[sum(parts[:i]) for i in range(len(parts))] for parts in cuts]
    places = [list(zip(*axis, strict=True)) for axis in zip(starts, cuts, strict=True)]
    return [
        (tuple(start for start, _ in cell), tuple(extent for _, extent in cell))
        for cell in product(*places)
    ]


@given(
    cuts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3),
    data=st.data(),
)
def test_chunks_pass_exactly_if_they_hold_every_element_once(cuts, data):
    """Grids with chunks left out and others put in, counted element by element."""
    size = tuple(map(sum, cuts))
    grid = tiling(cuts)
    kept = (
        data.draw(st.lists(st.sampled_from(grid), unique=True))
        if data.draw(st.booleans())
        else grid
    )
    boxes = [box for box in kept + data.draw(boxes_of(size)) if 0 not in box[1]]
    count = torch.zeros(size, dtype=torch.int)
    for offset, shape in boxes:
        window = tuple(slice(low, low + n) for low, n in zip(offset, shape, strict=True))
        count[window] += 1
    try:
        offsets, shapes = [offset for offset, _ in boxes], [shape for _, shape in boxes]
        metadata_file.require_tiling("weight", offsets, shapes, size)
    except ValueError:
        assert not bool((count == 1).all())
    else:
        assert bool((count == 1).all())


def test_metadata_that_contradicts_itself_is_refused(checkpoint):
    """One chunk's place is that of another: the same bytes would be loaded for both."""
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    first, second = [index for index in metadata.storage_data if index.fqn == "experts.weight"]
    metadata.storage_data[first] = metadata.storage_data[second]
    with pytest.raises(DamageError, match="overlaps the blob before it"):
        metadata_file.read_blobs(pickle.dumps(metadata))
