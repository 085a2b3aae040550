"""What one rank vets is what all ranks look up: every blob, at its place in its file."""

import pickle
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from moe_optim.checkpoint.files.metadata import Blob, BlobTable
from moe_optim.checkpoint.files.torch_dist import dtype_named
from moe_optim.checkpoint.load_session import stored_metadata

ROWS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@st.composite
def checkpoints(draw):
    """Blobs in file order: tensors cut along the first axis, scalars, and objects."""
    blobs, ends = [], defaultdict(int)

    def add(key, offset, shape=(), dtype=""):
        file, length = draw(st.sampled_from(["a", "b"])), draw(st.integers(1, 9))
        blobs.append(Blob(file, ends[file], length, key, offset, shape, dtype))
        ends[file] += length

    for number, (rows, rest) in enumerate(
        draw(st.lists(st.tuples(ROWS, st.sampled_from([(), (2,), (2, 3)])), max_size=4))
    ):
        for at, count in enumerate(rows):
            offset = (sum(rows[:at]), *(0 for _ in rest))
            add(f"tensor {number}", offset, (count, *rest), "torch.bfloat16")
    for number in range(draw(st.integers(0, 2))):
        add(f"object {number}", None)
        add(f"scalar {number}", (), (), "torch.float32")
    return sorted(blobs, key=lambda blob: (blob.file, blob.start))


@given(blobs=checkpoints())
def test_a_table_sent_to_another_rank_has_every_blob_at_its_place(blobs):
    table = pickle.loads(pickle.dumps(BlobTable(blobs)))
    assert sorted(table) == sorted({blob.key for blob in blobs})
    for key, found in table.items():
        assert found == [blob for blob in blobs if blob.key == key]
        of_files = {name: [one for one in blobs if one.file == name] for name in ("a", "b")}
        assert list(table.places(key)) == [of_files[one.file].index(one) for one in found]


@given(blobs=checkpoints())
def test_metadata_of_a_table_is_that_of_the_tensors_and_objects(blobs):
    entries = stored_metadata(BlobTable(blobs)).state_dict_metadata
    for key, entry in entries.items():
        found = [blob for blob in blobs if blob.key == key]
        if found[0].offset is None:
            assert isinstance(entry, BytesStorageMetadata)
            continue
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.properties.dtype == dtype_named(found[0].dtype)
        ends = [blob.corner[0] + blob.shape[0] for blob in found if blob.shape]
        assert tuple(entry.size) == ((max(ends), *found[0].shape[1:]) if ends else ())
        assert [(chunk.offsets, chunk.sizes) for chunk in entry.chunks] == [
            (blob.corner, blob.shape) for blob in found
        ]
        assert len(entry.chunks) == len(found)
        assert entries[key] is entry  # Megatron sets a size in it
