"""Experts reach an engine on the same GPU in another process, and on other GPUs over NCCL."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from moe_optim.errors import LayoutError
from moe_optim.rollout.gpu_sharing import open_tensors, share_tensors
from moe_optim.rollout.shards import EngineLayout, Shard
from moe_optim.rollout.transfer_plan import plan_of_shards
from moe_optim.rollout.transfers import execute
from tests.rollout.test_transfer_execution import ITEMS, TENSORS, update_random_bytes
from tests.support.bytes import assert_same_tensors

pytestmark = pytest.mark.gpu
EVERYTHING = Shard(experts=tuple(range(6)))
TIMEOUT_S = 120


def whole_tensors():
    """Return every tensor of six experts, of seeded random bytes."""
    generator = torch.Generator().manual_seed(3)
    return {
        one.name: torch.randint(256, one.shape, generator=generator)
        .to(torch.uint8)
        .view(ITEMS[one.itemsize])
        for one in TENSORS
    }


def _train(pipe, store):
    """Open an engine's parameters, write weights into them, and say so."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    sources = {name: one.cuda() for name, one in whole_tensors().items()}
    plan = plan_of_shards(TENSORS, [dict.fromkeys(sources, EVERYTHING)], EngineLayout())
    targets = open_tensors(pipe.recv())
    execute(plan, sources, targets, engine_ranks=[0])
    torch.cuda.synchronize()
    targets.clear()
    pipe.send("written")
    pipe.recv()  # the engine has read
    dist.destroy_process_group()


def test_training_writes_into_an_engine_on_the_same_gpu(tmp_path):
    """This process is the engine: its own memory has the bytes, also of views."""
    want = whole_tensors()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    training = context.Process(target=_train, args=(theirs, str(tmp_path / "store")))
    training.start()
    try:
        parameters = {
            name: torch.zeros((8, *one.shape[1:]), dtype=one.dtype, device="cuda")[1:7]
            for name, one in want.items()
        }
        pipe.send(share_tensors(parameters))
        assert pipe.poll(TIMEOUT_S), "training did not write"
        assert pipe.recv() == "written"
        assert_same_tensors({name: one.cpu() for name, one in parameters.items()}, want)
        for one in parameters.values():  # and nothing around them
            edges = torch.as_strided(one, (8, *one.shape[1:]), one.stride(), 0)[[0, 7]]
            assert not edges.view(torch.uint8).any()
        pipe.send("read")
        training.join(TIMEOUT_S)
        assert training.exitcode == 0
    finally:
        training.kill()
        training.join()


def test_tensors_of_a_host_are_not_shared():
    with pytest.raises(LayoutError, match="expected tensors on one GPU, got cpu, cuda:0"):
        share_tensors({"a": torch.zeros(1), "b": torch.zeros(1, device="cuda")})


def _nccl(rank, store, results):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2, device_id=device
    )
    count = update_random_bytes(device, training_ranks=[0, 1], engine_ranks=[1, 0])
    results.put((rank, count))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.multi_gpu
def test_an_engine_on_other_gpus_has_its_bytes_over_nccl(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_nccl, args=(rank, str(tmp_path / "store"), results))
        for rank in range(2)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(TIMEOUT_S)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
        one.join()
    assert codes == [0, 0]
    assert sorted(results.get(timeout=TIMEOUT_S) for _ in ranks) == [(0, 5), (1, 5)]
