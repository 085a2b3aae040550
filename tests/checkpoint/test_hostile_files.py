"""What a checkpoint may not do to whoever reads it: each fault by its file, and in one line."""

import hashlib
import io
import json
import pickle
import shutil
import signal
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_optim.checkpoint.integrity import checkpoint_defect
from moe_optim.checkpoint.sealing import record_checksums
from moe_optim.commands.cli import main as cli
from moe_optim.commands.conversion.opening import open_checkpoint
from moe_optim.commands.conversion.safetensors_files import SafetensorsReader
from moe_optim.commands.train.run_folder import find_resume_point
from moe_optim.errors import LayoutError, StateError
from tests.support.checkpoints.stored_checkpoints import (
    EMBEDDING,
    common_state,
    stored_tensors,
    write_torch_dist,
)
from tests.support.hostile.hostile_checkpoints import FILES, rewrite
from tests.support.hostile.hostile_pickles import BOMBS, Command

COMMON = "common_state/shard_0_1"
TRACKER = "latest_checkpointed_iteration.txt"
INDEX = "model.safetensors.index.json"
HEAD = "model.layers.0.mlp.experts."
EXPERTS = {f"{HEAD}gate_up_proj": torch.ones(4, 16, 6), f"{HEAD}down_proj": torch.ones(4, 6, 8)}


@pytest.fixture(autouse=True)
def no_endless_wait():
    """Reading a pipe that nobody writes to ends the test, and not all of them."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits, or computes, for a minute"))
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    root = tmp_path_factory.mktemp("templates")
    write_torch_dist(root / "torch_dist", stored_tensors(states=False), common_state(2))
    (root / "safetensors").mkdir()
    save_file(EXPERTS, root / "safetensors" / "model.safetensors")
    return root


@pytest.fixture
def checkpoint(templates, tmp_path):
    """A torch_dist checkpoint, to be harmed; ``secret.*`` lie in ``outside`` beside it."""
    (tmp_path / "outside").mkdir()
    for suffix in ("", ".json", ".distcp", ".txt"):
        (tmp_path / "outside" / f"secret{suffix}").write_text("{}")
    return shutil.copytree(templates / "torch_dist", tmp_path / "checkpoint")


@pytest.fixture
def weights(templates, tmp_path):
    """A folder with a safetensors file."""
    return shutil.copytree(templates / "safetensors", tmp_path / "weights")


@pytest.fixture
def refused(templates, tmp_path, capsys):
    """Return a function that gives a path to the commands, each of which has to refuse it."""

    def check(path: Path, reason: str) -> None:
        whole, to_hf = templates / "torch_dist", ["--experts", "hf", "--format", "safetensors"]
        for words in (
            ["inspect", path],
            ["inspect", path, "--thorough", "--json"],
            ["verify", path, whole],
            ["verify", whole, path],
            ["convert", path, tmp_path / "out", *to_hf],
        ):
            code = cli.main(list(map(str, words)))
            said = capsys.readouterr()
            assert (code, said.out) == (2, ""), words
            assert said.err.count("\n") == said.err.count("error: ") == 1, said.err
            assert reason in said.err, words
        assert not (tmp_path / "out").exists()

    return check


def assert_refused(path: Path, reason: str) -> None:
    """What all commands open a checkpoint with refuses it, in one line."""
    with pytest.raises((LayoutError, StateError)) as refusal:
        _ = open_checkpoint(path).recorded
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


class Script(torch.nn.Module):
    """In TorchScript it is a program of its own, which runs where it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: typing.Tuple[str, bool]) -> None:  # noqa: UP006  # of TorchScript
        self.path, self.training = state
        torch.save(torch.zeros(1), self.path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def archive_of_script(path: Path) -> bytes:
    content = io.BytesIO()
    torch.jit.save(torch.jit.script(Script(str(path))), content)
    return content.getvalue()


@pytest.mark.parametrize("key", [COMMON, EMBEDDING])
def test_no_command_runs_a_program_in_torchscript(key, checkpoint, refused, tmp_path):
    """``torch.load`` knows one by its records, and runs it whatever its pickle says."""
    ran = tmp_path / "ran"
    archive = archive_of_script(ran)
    assert not ran.exists()
    torch.jit.load(io.BytesIO(archive))
    assert ran.exists(), "it does nothing"
    ran.unlink()
    rewrite(checkpoint, lambda name, content: archive if name == key else content)
    if key == COMMON:
        refused(checkpoint, "a TorchScript program, which is no part of a checkpoint")
    else:  # values are read for the conversion alone
        with pytest.raises(StateError, match="does not fit|a TorchScript program"):
            open_checkpoint(checkpoint).read(key)
    assert not ran.exists()


def test_no_command_calls_what_the_pickle_of_an_object_names(checkpoint, refused, tmp_path):
    content = io.BytesIO()
    torch.save([{"iteration": Command(tmp_path / "ran")}], content)
    rewrite(checkpoint, lambda key, old: content.getvalue() if key == COMMON else old)
    refused(checkpoint, "iteration: expected int in what Megatron saved, got something else")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("bomb", BOMBS)
def test_metadata_is_read_in_the_memory_of_what_it_says(bomb, checkpoint):
    """Also where its own checksum fits: its writer can record one."""
    content = b"\x80\x04" + BOMBS[bomb] + b"."
    (checkpoint / ".metadata").write_bytes(content)
    assert_refused(checkpoint, ".metadata is ")
    whole = {".metadata": hashlib.sha256(content).hexdigest()}
    record = {"algorithm": "sha256", "whole": whole, "archives": {}}
    (checkpoint / "moe_optim.seal.json").write_text(json.dumps(record))
    assert ".metadata is " in checkpoint_defect(checkpoint)


def cut(axes: int, chunks: int) -> Callable[[typing.Any], None]:
    """Return an edit of metadata: a tensor of many axes, of which the first chunks are there."""

    def edit(metadata: typing.Any) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

        entry = metadata.state_dict_metadata[EMBEDDING]
        (index,) = [index for index in metadata.storage_data if index.fqn == EMBEDDING]
        place = metadata.storage_data.pop(index)
        entry.size, entry.chunks = torch.Size([2] * axes), []
        for number in range(chunks):
            offset = torch.Size([number >> axis & 1 for axis in range(axes)])
            entry.chunks.append(ChunkStorageMetadata(offset, torch.Size([1] * axes)))
            metadata.storage_data[MetadataIndex(EMBEDDING, offset)] = place

    return edit


@pytest.mark.parametrize(
    ("axes", "chunks", "reason"),
    [(30, 1, "at most 16 axes, got 30"), (16, 300, "chunks of 5 cut axes at most, got 16")],
)
def test_axes_of_a_tensor_are_counted_before_corners_of_its_chunks(
    axes, chunks, reason, checkpoint
):
    """There are 2 ** axes corners a chunk."""
    rewrite(checkpoint, edit=cut(axes, chunks))
    assert_refused(checkpoint, reason)


def test_a_chunk_has_the_bytes_of_its_elements(checkpoint):
    """Before memory for elements is asked for that are not there."""

    def edit(metadata: typing.Any) -> None:
        entry = metadata.state_dict_metadata[EMBEDDING]
        entry.size = entry.chunks[0].sizes = torch.Size([2**30, 6])

    rewrite(checkpoint, edit=edit)
    assert_refused(checkpoint, "torch.bfloat16 (1073741824, 6) does not fit in")


def test_records_that_are_none_are_a_defect(checkpoint):
    for record in ("integrity.json", "moe_optim.seal.json"):
        for text in ("[" * 200_000, '{"algorithm": ' + "9" * 5000 + "}"):
            (checkpoint / record).write_text(text)
            assert checkpoint_defect(checkpoint).startswith(f"{record} cannot be read: ")
        (checkpoint / record).unlink()


def test_records_name_files_of_the_checkpoint_alone(checkpoint):
    for name in ("../outside/secret", "/etc/passwd", "a\0b"):
        content = {"algorithm": "sha256", "files": {name: "0"}}
        (checkpoint / "integrity.json").write_text(json.dumps(content))
        assert "is not a file of the checkpoint" in checkpoint_defect(checkpoint)


KINDS = {
    "a pipe": "it is a pipe, expected a file",
    "a socket": "it is a socket, expected a file",
    "a folder": "it is a folder, expected a file",
    "a device": "it points outside the checkpoint",
    "a link out": "it points outside the checkpoint",
    "a relative link out": "it points outside the checkpoint",
    "a link to itself": "Too many levels of symbolic links",
    "a link to its folder": "it is a folder, expected a file",
    "a terabyte of nothing": "it has 1,099,511,627,776 bytes, expected at most 16,777,216",
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_checkpoint_are_regular_files_inside_it(kind, checkpoint, refused):
    """Every command refuses metadata that is none; other files are defects."""
    outside = checkpoint.with_name("outside")
    names = (".metadata", "metadata.json", "integrity.json", "moe_optim.seal.json", "__0_0.distcp")
    for name in names:
        path, kept = checkpoint / name, checkpoint / "kept"
        if is_there := path.exists():
            path.rename(kept)
        FILES[kind](path, outside)
        if name == ".metadata":
            refused(checkpoint, f"got: {KINDS[kind]}")
        elif name == "metadata.json":
            assert_refused(checkpoint, f"got: {KINDS[kind]}")
        elif name.endswith(".distcp") and kind == "a terabyte of nothing":
            assert "is too long" in checkpoint_defect(checkpoint)
        else:
            assert checkpoint_defect(checkpoint) == f"{name} cannot be read: {KINDS[kind]}"
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        if is_there:
            kept.rename(path)


def test_links_within_a_checkpoint_and_of_a_cache_of_hugging_face_are_followed(
    checkpoint, weights, tmp_path
):
    (checkpoint / "__0_0.distcp").rename(checkpoint / "elsewhere")
    (checkpoint / "__0_0.distcp").symlink_to("elsewhere")
    assert checkpoint_defect(checkpoint) is None
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    assert checkpoint_defect(link) is None
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0a1b", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (weights / "model.safetensors").rename(blobs / "4f2e")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4f2e")
    for path in (snapshot, snapshot / "model.safetensors"):
        assert SafetensorsReader(path).tensors.keys() == EXPERTS.keys()


SAID = ("²", "7" * 5000, "..", "../outside", "\x1b[31m", "x" * 400, "")


def test_a_tracker_file_names_a_folder_beside_it(checkpoint, tmp_path, refused):
    run = tmp_path / "run"
    run.mkdir()
    checkpoint.rename(run / "iter_0000007")
    too_long = "expected a checkpoint, got: it has 5,000 bytes, expected at most 4,096"
    for said in SAID:
        (run / TRACKER).write_text(said)
        reason = too_long if len(said) > 4096 else f"of a folder beside it, got {said[:40]!r}"
        (refused if said == SAID[0] else assert_refused)(run, reason)
        if len(said) < 4096:
            assert find_resume_point(run).iteration == 7
            assert (run / TRACKER).read_text() == "7"


def test_writing_a_tracker_file_or_checksums_follows_no_link(checkpoint, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    checkpoint = checkpoint.rename(run / "iter_0000007")
    (run / f".{TRACKER}.partial").symlink_to(victim)
    (checkpoint / ".moe_optim.seal.json.partial").symlink_to(victim)
    find_resume_point(run)
    record_checksums(checkpoint)
    assert victim.read_text() == "mine"


INDEXED = {
    "../outside/secret.safetensors": "it points outside the checkpoint",
    "/etc/passwd": "it points outside the checkpoint",
    "/dev/zero": "it points outside the checkpoint",
    "a\0b": "not a valid name",
    "x" * 4000: "File name too long",
    "": "it is a folder, expected a file",
}


def test_an_index_names_files_of_its_folder_alone(weights, tmp_path):
    (tmp_path / "outside").mkdir()
    save_file({"k": torch.ones(3)}, tmp_path / "outside" / "secret.safetensors")
    for name, reason in INDEXED.items():
        (weights / INDEX).write_text(json.dumps({"weight_map": {"k": name}}))
        assert_refused(weights, reason)


SAID_OF_ITSELF = {
    "iteration": ({"iteration": "abc"}, "iteration: expected int"),
    "huge iteration": ({"iteration": 10**400}, "iteration: expected int"),
    "negative iteration": ({"iteration": -5}, "iteration: expected int"),
    "arguments": ({"args": 3}, "args: expected dict"),
    "sizes": ({"args": {"expert_model_parallel_size": "x"}}, "parallel_size: expected int"),
    "rows": ({"args": {"moe_mlp_glu_interleave_size": [1]}}, "interleave_size: expected int"),
    "version": ({"checkpoint_version": [3]}, "checkpoint_version: expected float or int or str"),
}


@pytest.mark.parametrize("name", SAID_OF_ITSELF)
def test_what_a_checkpoint_says_of_itself_is_of_its_kind(name, tmp_path):
    changed, reason = SAID_OF_ITSELF[name]
    folder = tmp_path / "c"
    write_torch_dist(folder, stored_tensors(states=False), common_state(2) | changed)
    assert_refused(folder, reason)


def test_objects_that_may_run_code_are_named_where_they_are_copied(checkpoint, tmp_path, capsys):
    """Objects that the conversion need not understand are copied, and none of them is run."""
    content = io.BytesIO()
    torch.save([Command(tmp_path / "ran")], content)
    rewrite(checkpoint, lambda key, old: content.getvalue() if "rng_state" in key else old)
    target = tmp_path / "out"
    assert cli.main(["convert", str(checkpoint), str(target), "--experts", "grouped"]) == 0
    metadata = pickle.loads((target / "iter_0000007" / ".metadata").read_bytes())
    assert any(index.fqn.startswith("rng_state") for index in metadata.storage_data)
    said = "rng_state/shard_0_1: it names posix.mkdir"
    converted = "".join(capsys.readouterr().out.split("\n"))
    assert f"may run code when Megatron unpickles it: {said}" in converted
    assert cli.main(["inspect", str(target), "--thorough", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["foreign"]["rng_state/shard_0_1"] in said
    assert cli.main(["inspect", str(target), "--thorough"]) == 0
    assert f"may run code {said}" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "ran").exists()
