"""Host-resident masters and moments.

They are still device tensors: Megatron's optimizer, checkpoints and kernels access them over the
link like any other tensor.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_optim.kernels.host_memory import HostMemory, HostTensor, spread
from moe_optim.optimizer.adam import MOMENTS

_MASTER = "master"


class HostStates:
    """Host-resident masters and moments of one optimizer, and their host memory.

    At most ``fraction`` of the elements of ``masters``, fp32, move to the host at once.
    """

    def __init__(self, masters: Sequence[Tensor], fraction: float) -> None:
        chosen = spread([master.numel() for master in masters], fraction)
        self._homes: dict[Tensor, dict[str, HostTensor]] = {
            master: {} for master, is_chosen in zip(masters, chosen, strict=True) if is_chosen
        }
        self.numel = sum(master.numel() for master in self._homes)
        device = next((master.device for master in self._homes), torch.device("cpu"))
        states = 1 + len(MOMENTS)
        self._memory = HostMemory(device, states * sum(master.nbytes for master in self._homes))
        for master in self._homes:
            self._bring_master_home(master)

    def keep(self, inner: Any, master: Tensor) -> None:
        """Move a host-resident master and its moments back to their host memory if they left it."""
        if master not in self._homes:
            return
        self._bring_master_home(master)
        state = inner.state.get(master, {})
        for name in MOMENTS:
            if name in state:
                state[name] = self._at_home(master, name, state[name])

    def on_host(self, master: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return a master and its moments as CPU tensors; None if they are on the device.

        Call :meth:`keep` first.
        """
        homes = self._homes.get(master)
        if homes is None:
            return None
        own, exp_avg, exp_avg_sq = (homes[name].on_host for name in (_MASTER, *MOMENTS))
        return own, exp_avg, exp_avg_sq

    def call_them_the_hosts(self, inner: Any) -> None:
        """Turn them into CPU tensors over the same memory, after synchronizing the stream."""
        device = self._memory.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        for tensor, home in self._all_at_home(inner):
            tensor.data = home.on_host

    def call_them_the_devices(self, inner: Any) -> None:
        """Turn them into device tensors over the same memory."""
        for tensor, home in self._all_at_home(inner):
            tensor.data = home.on_device

    def _all_at_home(self, inner: Any) -> Iterator[tuple[Tensor, HostTensor]]:
        for master, homes in self._homes.items():
            tensors = {_MASTER: master, **inner.state.get(master, {})}
            for name, home in homes.items():
                if tensors[name].data_ptr() == home.on_host.data_ptr():
                    yield tensors[name], home

    def _bring_master_home(self, master: Tensor) -> None:
        values = master.data
        at_home = self._at_home(master, _MASTER, values)
        if at_home is not values:
            master.data = at_home

    @torch.no_grad()
    def _at_home(self, master: Tensor, name: str, values: Tensor) -> Tensor:
        home = self._homes[master].get(name)
        if home is None or home.on_host.dtype != values.dtype:
            home = self._homes[master][name] = self._memory.take(values.shape, values.dtype)
        elif values.data_ptr() == home.on_host.data_ptr():
            return values
        home.on_device.copy_(values.detach())
        return home.on_device.detach()  # a new tensor, whose data may be replaced
