"""CUDA's names work on a machine without it while the runtime is installed, and only then."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from moe_optim.errors import ConfigError, PatchError
from moe_optim.formats import MXFP8
from moe_optim.integration import cpu_runtime, patches
from moe_optim.integration.engine import patch_state
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.storage import PortableStorage
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow

CUDA = torch.device("cuda", 0)


def redirected() -> dict[str, Any]:
    """Return what stands at every name that the runtime redirects."""
    found = {}
    for name in cpu_runtime.REDIRECTS:
        value: Any = torch
        for step in name.split("."):
            value = getattr(value, step)
        found[name] = value
    return found


# Installing and uninstalling


def _install_and_uninstall() -> list[str]:
    before = redirected()
    of_cpu = [
        p
        for p in (*patches.ADAM, *patches.CPU, *patches.DATASETS)
        if patch_state(p) != "not needed"
    ]
    assert len(of_cpu) >= 6
    assert not cpu_runtime.is_installed()
    cpu_runtime.install()
    installed = redirected()
    assert cpu_runtime.is_installed()
    assert all(installed[name] is cpu_runtime.REDIRECTS[name] for name in installed)
    assert {patch_state(patch) for patch in of_cpu} == {"applied"}
    cpu_runtime.install()
    assert all(redirected()[name] is installed[name] for name in installed)
    cpu_runtime.uninstall()
    cpu_runtime.uninstall()
    assert not cpu_runtime.is_installed()
    assert {patch_state(patch) for patch in of_cpu} == {"off"}
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    return [name for name, value in redirected().items() if value is not before[name]]


def test_a_machine_with_a_gpu_is_refused(monkeypatch):
    """The runtime would hide it: the error says how to do that on purpose."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    before = redirected()
    with pytest.raises(ConfigError, match=r"got 8\. Set CUDA_VISIBLE_DEVICES=''"):
        cpu_runtime.install()
    assert not cpu_runtime.is_installed()
    assert all(value is before[name] for name, value in redirected().items())


def _fail_to_install() -> list[str]:
    def refuse(*_: Any) -> None:
        raise PatchError("Megatron is not what it was.")

    cpu_runtime.apply_patches = refuse
    before = redirected()
    with pytest.raises(PatchError):
        cpu_runtime.install()
    assert not cpu_runtime.is_installed()
    assert torch.ones(1).type() == "torch.FloatTensor"
    return [name for name, value in redirected().items() if value is not before[name]]


@on_ranks(1)
def test_uninstall_or_a_failure_restores_every_name_that_install_redirected():
    """By identity, after two installs and two uninstalls; CUDA is out of reach again. Where
    Megatron does not fit, torch is left as it was too."""
    assert (_install_and_uninstall(), _fail_to_install()) == ([], [])


# From a script of one's own

TOO_LATE = """
import torch, moe_optim
{before}
stock = torch.cuda.is_available
try:
    moe_optim.use_cpu()
except moe_optim.StateError as error:
    assert torch.cuda.is_available is stock  # nothing was redirected
    print(error)
else:
    moe_optim.use_cpu()  # again: nothing happens
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    gates = torch.ones(2, 4, device="cuda", requires_grad=True)
    swiglu(gates).sum().backward()  # what torch compiles for a GPU runs as it is written
    print("trains")
"""


def use_cpu_after(statement):
    """Return what a fresh process says of ``moe_optim.use_cpu()`` after a statement."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TOO_LATE.format(before=statement)],
        env=kept,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_script_chooses_the_cpu_before_it_imports_megatron():
    """A namespace alone is no import: nothing of Megatron is loaded yet."""
    assert use_cpu_after("import megatron") == "trains"


def test_a_script_that_chooses_the_cpu_too_late_hears_of_it():
    """It had ended in an internal error of torch's compiler, at the first product of experts."""
    said = use_cpu_after("import megatron.core")
    assert said.startswith(
        "moe_optim.use_cpu: expected to be called before the first import of megatron, got megatron"
    )
    assert "Move the call above everything that imports megatron" in said


# Devices, pinning and type names

ON_THE_CPU = {  # all of these are CUDA tensors on a GPU machine
    "a device name": lambda x: torch.zeros(3, device="cuda"),
    "a device": lambda x: torch.zeros(3, device=CUDA),
    "the current device": lambda x: torch.zeros(3, device=torch.cuda.current_device()),
    "a new tensor like another": lambda x: x.new_zeros(3, device="cuda"),
    "a tensor of values": lambda x: torch.tensor([0.0] * 3, device="cuda"),
    "cuda()": lambda x: x.cuda(),
    "to a name": lambda x: x.to("cuda"),
    "to a keyword": lambda x: x.to(device="cuda"),
    "to an ordinal": lambda x: x.to(0),
    "pin_memory()": lambda x: x.pin_memory(),
    "a pinned allocation": lambda x: torch.empty(3, pin_memory=True),
    "a module": lambda x: torch.nn.Linear(1, 3).cuda().bias,
    "an allocated meta module": lambda x: (
        torch.nn.Linear(1, 3, device="meta").to_empty(device="cuda").bias
    ),
}
ELSEWHERE = {  # and these are not
    "the CPU by name": lambda x: (torch.zeros(3, device="cpu"), "cpu"),
    "the meta device": lambda x: (torch.zeros(3, device="meta"), "meta"),
    "to meta": lambda x: (x.to("meta"), "meta"),
    "to a dtype": lambda x: (x.to(torch.float32), "cpu"),
    "no device": lambda x: (torch.zeros(3, device=None), "cpu"),
}


def _make_all() -> dict[str, str]:
    failures = {}
    for what, make in (ON_THE_CPU | ELSEWHERE).items():
        made = make(torch.zeros(3))
        tensor, device = made if isinstance(made, tuple) else (made, "cpu")
        if tensor.device.type != device or tensor.shape != (3,):
            failures[what] = str(tensor.device)
        elif device == "cpu" and tensor.is_pinned():
            failures[what] = "pinned"
    return failures


TO_THE_HOST = {  # copies of what is on a GPU, and with `cuda` in the name nothing of the sort
    "cpu()": lambda x: x.cpu(),
    "cpu() of a part": lambda x: x[1:].cpu(),
    "to a name": lambda x: x.to("cpu"),
    "to a name and dtype": lambda x: x.to("cpu", torch.float32),
}


def _bring_to_the_host() -> tuple[list[str], list[str]]:
    source = torch.arange(3.0)
    shared = [
        what
        for what, bring in TO_THE_HOST.items()
        if bring(source).untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    ]
    changed = [
        what
        for what, bring in TO_THE_HOST.items()
        if not torch.equal(bring(source).detach(), source[-len(bring(source)) :])
    ]
    weight = GroupedWeight(PortableStorage(MXFP8, (1, 32, 32)))
    weight.copy_(torch.ones(1, 32, 32))
    copy: Any = weight.cpu()
    mine, theirs = (one.quantized_storage.quantized.buffers() for one in (copy, weight))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert not {p.data_ptr() for p in mine.values()} & {p.data_ptr() for p in theirs.values()}
    assert source.cuda() is source
    assert source.to("cuda") is source
    assert source.to(torch.cuda.current_device()) is source
    assert source.to(torch.float32) is source
    return shared, changed


TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.int32: "torch.cuda.IntTensor",
    torch.int64: "torch.cuda.LongTensor",
    torch.uint8: "torch.cuda.ByteTensor",
    torch.bool: "torch.cuda.BoolTensor",
}


def _type_names() -> None:
    names = {dtype: torch.zeros(1, dtype=dtype).type() for dtype in TYPE_NAMES}
    assert names == TYPE_NAMES
    weight = torch.nn.Parameter(GroupedWeight(PortableStorage(MXFP8, (1, 32, 32))))
    assert weight.type() == torch.nn.Parameter(torch.zeros(1).bfloat16()).type()
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type("torch.DoubleTensor").dtype == torch.float64
    for dtype, name in TYPE_NAMES.items():  # ``a.type(b.type())`` converts ``a`` on any machine
        assert torch.zeros(1).type(name).dtype == dtype


# Random numbers


def _draw() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())
    first = torch.rand(4, device="cuda")
    for restore, read in (
        (torch.cuda.set_rng_state, torch.cuda.get_rng_state),
        (torch.cuda.random.set_rng_state, torch.cuda.random.get_rng_state),
    ):
        restore(state, device=torch.cuda.current_device())
        assert torch.equal(read(device=0), state)
        assert torch.equal(torch.rand(4), first)
    torch.cuda.manual_seed_all(7)
    assert torch.equal(torch.rand(4), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    for key in (0, torch.cuda.current_device()):
        assert torch.equal(torch.cuda.default_generators[key].get_state(), torch.get_rng_state())


@on_ranks(1)
def test_names_of_cuda_work_on_the_cpu():
    """Devices, type names, streams, events, and one random stream that whatever seeds or restores
    it does for host and device. What is brought to the host has memory of its own: offloading frees
    what it was brought from; what goes to the device is there already."""
    cpu_runtime.install()
    for use in (_type_names, _draw):
        use()
    assert (_make_all(), _bring_to_the_host()) == ({}, ([], []))


# Collectives

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def _gather(asynchronous: bool) -> list[list[float]]:
    from megatron.core.distributed import param_and_grad_buffer

    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    buckets = [torch.zeros(2 * 3, dtype=dtype) for dtype in DTYPES]
    with param_and_grad_buffer._coalescing_manager(group, async_ops=asynchronous) as handle:
        for number, bucket in enumerate(buckets):
            own = bucket[3 * rank : 3 * rank + 3]
            own += 10 * number + rank + 1
            param_and_grad_buffer.dist_all_gather_func(
                bucket, own, group=group, async_op=asynchronous
            )
    if asynchronous:
        handle.wait()
    return [bucket.tolist() for bucket in buckets]


@on_ranks(2)
def test_one_call_gathers_buckets_of_several_dtypes():
    """Megatron's bucket groups of later virtual stages hold fp32 and bf16 parameters."""
    want = [[first] * 3 + [first + 1] * 3 for first in (1, 11, 21)]
    cpu_runtime.install()
    torch.distributed.init_process_group("gloo")
    assert [_gather(asynchronous) for asynchronous in (False, True)] == [want, want]
