"""Measures fused steps with a fraction of their states on the host, and the speed of its link."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case
from benchmarks.requantize import lay_out
from benchmarks.timing import median_ms, release, wait
from moe_optim.errors import StateError

if TYPE_CHECKING:
    from moe_optim.kernels.host_memory import HostMemory
    from moe_optim.kernels.step_table import StepTable

STATE_BYTES = 12
"""Bytes per element of a master and two moments in fp32, copied each way in a step."""
LINK_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
CHECKED_STEPS = 2

Row = dict[str, Any]


def link_bytes_per_ms(device: str) -> float:
    """Return the copy speed in bytes per ms and direction, both directions at once.

    Args:
        device: ``cuda``; on ``cpu`` two copies run one after the other.
    """
    import torch

    count = LINK_BYTES[device]
    on_gpu = device == "cuda"
    there = [torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [
        torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=on_gpu) for _ in range(2)
    ]
    if not on_gpu:
        (ms,) = median_ms([lambda: (there[0].copy_(here[0]), here[1].copy_(there[1]))], device)
        return count / ms
    back = torch.cuda.Stream()

    def both_ways() -> None:
        back.wait_stream(torch.cuda.current_stream())
        there[0].copy_(here[0], non_blocking=True)
        with torch.cuda.stream(back):
            here[1].copy_(there[1], non_blocking=True)
        torch.cuda.current_stream().wait_stream(back)

    (ms,) = median_ms([both_ways], device)
    return count / ms


def measure(case: Case, fractions: list[float], speed: float) -> Iterator[Row]:
    """Yield a row for each fraction, freeing its memory before the next.

    Args:
        case: shapes of the experts.
        fractions: fractions of states on the host.
        speed: result of :func:`link_bytes_per_ms`.

    Raises:
        StateError: masters, moments or weights differ from those of the first row.
    """
    wanted: list[int] | None = None
    for fraction in fractions:
        before = _allocated(case.device)
        table, memory, on_host = _states(case, fraction)
        for _ in range(CHECKED_STEPS):
            _step(table)
        found = _fingerprints(table)
        if wanted is not None and found != wanted:
            raise StateError(
                f"bench offload: expected the bytes of {fractions[0]} with {fraction} of the "
                "states on the host, got others. Report this."
            )
        wanted = found
        _reset_peak(case.device)
        (ms,) = median_ms([partial(_step, table)], case.device)
        traffic = STATE_BYTES * on_host
        yield {
            "format": case.format.name,
            "shape_set": case.label,
            "offload_states": fraction,
            "parameters": sum(case.owned),
            "parameters_on_host": on_host,
            "host_bytes": memory.nbytes,
            "device_bytes": _peak(case.device, before),
            "ms": round(ms, 3),
            "link_gb_per_s": round(traffic / ms / 1e6, 2),
            "fraction_of_link": round(traffic / ms / speed, 3),
        }
        del table, memory
        release(case.device)


def _states(case: Case, fraction: float) -> "tuple[StepTable, HostMemory, int]":
    """Return the step table, its host memory, and the elements there."""
    import torch

    from moe_optim.formats.reference.adam import Hyper
    from moe_optim.kernels.adam_state import AdamState
    from moe_optim.kernels.host_memory import HostMemory, HostTensor, spread
    from moe_optim.kernels.member_table import MemberTable
    from moe_optim.kernels.step_table import StepTable

    chosen = spread(case.owned, fraction)
    on_host = sum(n for n, is_chosen in zip(case.owned, chosen, strict=True) if is_chosen)
    memory = HostMemory(torch.device(case.device), STATE_BYTES * on_host)
    generator = torch.Generator(case.device).manual_seed(0)

    def empty(numel: int, is_on_host: bool) -> HostTensor:
        if is_on_host:
            return memory.take((numel,), torch.float32)
        here = torch.empty(numel, dtype=torch.float32, device=case.device)
        return HostTensor(here, here)

    held = [
        [empty(numel, is_on_host) for _ in range(3)]
        for numel, is_on_host in zip(case.owned, chosen, strict=True)
    ]
    for master, *moments in held:
        master.on_device.normal_(std=0.02, generator=generator)
        for moment in moments:
            moment.on_device.zero_()
    entries = lay_out(case, [master.on_device for master, *_ in held])
    gradients = torch.empty(sum(case.owned), dtype=torch.float32, device=case.device)
    gradients.normal_(std=2e-4, generator=generator)
    states = [
        AdamState(
            parameter=entry.parameter,
            master=master.on_device,
            gradient=gradient,
            exp_avg=exp_avg.on_device,
            exp_avg_sq=exp_avg_sq.on_device,
            on_host=(master.on_host, exp_avg.on_host, exp_avg_sq.on_host) if is_on_host else None,
        )
        for entry, (master, exp_avg, exp_avg_sq), gradient, is_on_host in zip(
            entries, held, gradients.split(case.owned), chosen, strict=True
        )
    ]
    hyper = Hyper(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1)
    table = StepTable.build(
        states,
        torch.tensor([hyper.row()], dtype=torch.float32, device=case.device),
        torch.full((1,), 0.5, dtype=torch.float32, device=case.device),
        members=MemberTable.build(entries),
    )
    return table, memory, on_host


def _step(table: "StepTable") -> None:

    table.launch()
    assert table.members is not None
    table.members.encode_shared.launch()


def _fingerprints(table: "StepTable") -> list[int]:
    """Return a sum of the bits of each master, moment and buffer."""
    import torch

    assert table.members is not None
    buffers = [p for e in table.members.entries for p in e.target.gathered_buffers().values()]
    states = [t for s in table.states for t in (s.master, s.exp_avg, s.exp_avg_sq)]
    sums = [one.reshape(-1).view(torch.int32).sum() for one in states]
    sums += [one.reshape(-1).view(torch.uint8).sum() for one in buffers]
    return torch.stack(sums).tolist()


def _allocated(device: str) -> int:
    import torch

    release(device)
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _reset_peak(device: str) -> None:
    import torch

    wait(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str, before: int) -> int | None:
    """Return the peak allocation above ``before`` in bytes; None on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated() - before if device == "cuda" else None
