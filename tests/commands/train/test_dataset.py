"""A dataset holds exactly the bytes of its text, and is whole or absent."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from moe_optim.commands.train import dataset as module
from moe_optim.commands.train.dataset import (
    END_OF_DOCUMENT,
    SPLITS,
    build_dataset,
    find_text,
    load_dataset,
)
from moe_optim.errors import ConfigError, StateError

pytest.importorskip("megatron.core")


@pytest.fixture
def text(tmp_path):
    """Three files, one of them with every byte there is: each is cut into three splits."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, content in {
        "all.bin": bytes(range(256)) * 40,
        "latin.txt": "Grüße, Welt\n".encode() * 300,
        "short.txt": b"abc" * 50,
    }.items():
        (folder / name).write_bytes(content)
    return folder


def documents(dataset, split):
    """Return the documents of one split as Megatron reads them, a list of token ids each."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    indexed = IndexedDataset(str(dataset.folder / split))
    ends = indexed.document_indices
    return [
        np.concatenate([indexed[item] for item in range(start, end)]).tolist()
        for start, end in zip(ends, ends[1:], strict=False)
    ]


def test_megatron_reads_back_the_bytes_of_every_file_and_their_ends(text, tmp_path, monkeypatch):
    """Also for files larger than what is read at a time; the end mark is never an item alone."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1000)
    files = find_text([text])
    dataset = build_dataset(files, tmp_path / "data")
    splits = [documents(dataset, split) for split in SPLITS]
    for file, *parts in zip(files, *splits, strict=True):
        assert all(part[-1] == END_OF_DOCUMENT for part in parts)
        assert bytes(sum((part[:-1] for part in parts), [])) == file.path.read_bytes()
    for split, found in zip(SPLITS, splits, strict=True):
        assert sum(map(len, found)) == dataset.tokens(split)
    held_out = [token for document in splits[1] for token in document[:-1]]
    shares = np.bincount(held_out) / len(held_out)
    assert dataset.byte_entropy == pytest.approx(-sum(p * math.log(p) for p in shares if p))


def test_a_dataset_is_loaded_if_it_is_finished(text, tmp_path):
    folder = tmp_path / "data"
    assert load_dataset(folder) is None
    built = build_dataset(find_text([text]), folder)
    assert load_dataset(folder) == built
    (folder / "dataset.json").write_text("{")
    with pytest.raises(StateError, match="expected the facts of a dataset"):
        load_dataset(folder)
    assert build_dataset(find_text([text]), folder) == built


def test_text_shorter_than_one_sample_is_refused_by_split(text, tmp_path):
    dataset = build_dataset(find_text([text]), tmp_path / "data")
    enough = min(dataset.tokens(split) for split in SPLITS) - 1
    dataset.require_sequence_length(enough)
    with pytest.raises(ConfigError, match=f"(validation|test) text: .*{enough + 1} bytes.*--text"):
        dataset.require_sequence_length(enough + 1)


def test_megatron_takes_the_flags_and_ends_documents_with_256(text, tmp_path):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    dataset = build_dataset(find_text([text]), tmp_path / "data")
    argv = dataset.megatron_argv(tmp_path / "cache")
    flags = dict(zip(argv[::2], argv[1::2], strict=True))
    assert flags["--data-cache-path"] == str(tmp_path / "cache")
    for flag in ("--train-data-path", "--valid-data-path", "--test-data-path"):
        assert (dataset.folder / f"{flags[flag]}.idx").is_file()
    args = SimpleNamespace(
        tokenizer_type=flags["--tokenizer-type"],
        vocab_size=int(flags["--vocab-size"]),
        pad_vocab_size=False,
    )
    assert build_tokenizer(args).eod == END_OF_DOCUMENT
