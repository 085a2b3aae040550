"""Experts leave by layer: one transfer, views of what arrives, and an order that is kept."""

import math
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rollout.test_export_weights import (
    EXPERTS,
    FFN,
    HIDDEN,
    Setup,
    build,
    expected,
    exported,
    initialize,
    step,
)
from tests.support.bytes import assert_same_tensors
from tests.support.ranks import run_ranks

pytest.importorskip("megatron.core")

LAYERS = 2
FC1 = 2 * (2 * FFN * HIDDEN + 2 * FFN * HIDDEN // 32)
"""Bytes of fc1 of one expert of each of two ranks: data and scales of MXFP8."""
SETUPS = {
    "experts over ranks": Setup({"expert_model_parallel_size": 2}),
    "experts cut": Setup({"expert_tensor_parallel_size": 2}, model={"moe_ffn_hidden_size": 256}),
    "layers over ranks": Setup({"pipeline_model_parallel_size": 2}),
}


class Collectives(TorchDispatchMode):
    """Names the collectives that are called while it is entered."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _on_two_ranks():
    initialize()
    exchanges = _exchanges()  # first, since orders are kept
    return _transfers(), exchanges, _started()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, _on_two_ranks)


def _transfers():
    import moe_optim

    facts = {}
    for name, setup in SETUPS.items():
        chunks, _ = build(setup)
        for layout in ("hf_per_expert", "hf"):
            pairs, calls = moe_optim.export_weights(chunks, layout=layout), Collectives()
            own = {one for one, _ in moe_optim.export_weights(chunks, layout=layout, experts="own")}
            with calls:
                given = {key: tensor for key, tensor in pairs if ".experts." in key}
            dense = [call for call in calls.names if "coalesced" not in call]
            memory = {one.untyped_storage().data_ptr() for one in given.values()}
            arrived = {one.untyped_storage().data_ptr() for k, one in given.items() if k not in own}
            whole = [one.data_ptr() % 16 for key, one in given.items() if layout == "hf"]
            facts[name, layout] = (
                len(calls.names) - len(dense),
                len(memory),
                len(arrived),
                sum(whole),
            )
    return facts


def test_a_layer_arrives_in_one_transfer_and_its_tensors_are_views_of_one_bucket(ranks):
    """Of both linears of all local experts, data and scales; aligned."""
    for facts, *_ in ranks:
        for layout in ("hf_per_expert", "hf"):
            calls, memory, arrived, unaligned = facts["experts over ranks", layout]
            assert (calls, memory, unaligned) == (LAYERS, LAYERS, 0)
            assert facts["experts cut", layout][0] == LAYERS
            calls, memory, arrived, unaligned = facts["layers over ranks", layout]
            assert (calls, arrived, unaligned) == (0, LAYERS // 2, 0)


def _exchanges():
    counts = []
    mxfp8, blocks = (
        Setup({"expert_model_parallel_size": 2}, {"format": format})
        for format in ("mxfp8", "fp8_block")
    )
    for setup in (mxfp8, blocks, mxfp8):
        chunks, optimizer = build(setup)
        for _ in range(2):
            step(chunks, optimizer)
            with patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
                given = exported(chunks)
            counts.append(exchange.call_count)
            assert_same_tensors(given, expected(chunks, optimizer))
    return counts


def test_ranks_exchange_their_records_once_for_equal_models(ranks):
    """Values are read at every export; the order is kept, also for a model built again."""
    first, again = 1, 0
    for _, counts, _ in ranks:
        assert counts == [first, again, first, again, again, again]


def _started():
    """Return the exchanges that have begun when the first expert is yielded, by bucket size."""
    import moe_optim

    chunks, _ = build(SETUPS["experts over ranks"])
    counts = {}
    for nbytes in (1, FC1):
        calls = Collectives()
        with calls:
            pairs = moe_optim.export_weights(chunks, bucket_bytes=nbytes)
            next(key for key, _ in pairs if ".experts." in key)
            counts[nbytes] = sum("coalesced" in call for call in calls.names)
            assert all(pairs)
    return counts


def test_exchanges_are_ahead_of_what_is_yielded_one_at_least_and_more_where_they_fit(ranks):
    for *_, counts in ranks:
        assert counts == {1: 2, FC1: 3}


def _order(linears, nbytes, layout):
    """Plan bf16 experts of two ranks."""
    from moe_optim.experts.keys.layouts import get_layout
    from moe_optim.rollout.exported_as import ExportedAs
    from moe_optim.rollout.order import ExportOptions, make_order
    from moe_optim.rollout.units import HeldExperts

    records = {
        rank: [
            HeldExperts(
                linear=f"decoder.layers.{linear}", hf_layer=0, kind="weight",
                first=EXPERTS * rank, count=EXPERTS, shape=(128, 128), format="bf16",
            )
            for linear in linears
        ]
        for rank in range(2)
    }  # fmt: skip
    options = ExportOptions(
        exported=ExportedAs(get_layout(layout), None), own=False, bucket_bytes=nbytes,
        vocab_size=None, heads=None,
    )  # fmt: skip
    return make_order(options, records, rank=0)


EACH = 2 * 128 * 128 * 2
"""Bytes of one expert of both ranks."""


def test_buckets_hold_no_more_than_asked_and_at_least_an_expert_of_each_rank():
    for nbytes, units in ((1, 4), (EACH, 4), (3 * EACH, 2), (4 * EACH, 1)):
        for layout in ("sequential", "grouped"):
            order = _order(["0.mlp.experts.linear_fc2"], nbytes, layout)
            assert len(order.batches) == (units if layout == "sequential" else 1)
            found = [unit for batch in order.batches for unit in batch]
            names = [name for unit in found for name in unit.names]
            assert len(set(names)) == len(names) == (2 * EXPERTS if layout == "sequential" else 1)
            covered = math.fsum(unit.stop - unit.start for unit in found)
            assert covered == EXPERTS


def test_linears_of_a_layer_share_a_bucket_that_holds_both_and_layers_never_do():
    names = ("0.mlp.experts.linear_fc1", "0.mlp.experts.linear_fc2", "1.mlp.experts.linear_fc1")
    both = 2 * EXPERTS * EACH
    for nbytes, sizes in ((both - 1, [1, 1, 1]), (both, [2, 1]), (10 * both, [2, 1])):
        for layout in ("sequential", "grouped"):
            order = _order(names, nbytes, layout)
            of_linears = [list(dict.fromkeys(u.held.linear for u in one)) for one in order.batches]
            assert list(map(len, of_linears)) == sizes
            assert sum(of_linears, []) == [f"decoder.layers.{name}" for name in names]
