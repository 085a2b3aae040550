"""Amax per expert of parameters in any format."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moe_optim.errors import LayoutError
from moe_optim.formats.reference.blocks import expert_amax_into
from moe_optim.kernels import fields
from moe_optim.kernels.exchange import AMAX_SLOTS
from moe_optim.kernels.launch_table import bind_expert_amax, cut_amax_parts, describe_members
from moe_optim.kernels.plan import ALIGNMENT, Backend, Call, Plan, takes_kernels
from moe_optim.kernels.table_entry import TableEntry
from moe_optim.places import Places


def plan_amaxes(
    entries: Sequence[TableEntry], amaxes: Tensor, *, backend: Backend = "auto"
) -> Plan:
    """Plan the amax of the owned part of each expert, in the order of the entries, into ``amaxes``.

    ``amaxes`` is [num_experts] fp32, stored by reference; zero where no part is owned. Sources have
    one dtype and device.
    """
    dtypes = {entry.source.dtype for entry in entries}
    if len(dtypes) != 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise LayoutError(f"amax table: expected sources of one dtype, got {names}.")
    calls: list[Call] = [partial(_find, entries, amaxes)]
    if takes_kernels(backend, amaxes.device, e4m3=False):
        calls = _bind(entries, amaxes)
    places = Places(entry.source for entry in entries)
    return Plan(device=amaxes.device, calls=tuple(calls), places=places)


def _find(entries: Sequence[TableEntry], amaxes: Tensor) -> None:
    amaxes.zero_()
    sizes = [entry.target.shape[0] for entry in entries]
    for entry, part in zip(entries, amaxes.split(sizes), strict=True):
        _, rows, cols = entry.target.shape
        expert_amax_into(part, entry.source, entry.start, rows * cols)


def _bind(entries: Sequence[TableEntry], amaxes: Tensor) -> list[Call]:
    members, slot = [], 0
    for entry in entries:
        experts = entry.owned_experts
        slots = slot + AMAX_SLOTS * torch.arange(experts.start, experts.stop, device="cpu")
        members.append(describe_members(entry, experts, slots))
        slot += AMAX_SLOTS * entry.target.shape[0]
    descriptors = torch.cat(members)
    dtype = entries[0].source.dtype
    begins = descriptors[:, fields.BEGIN] * dtype.itemsize
    aligned = not ((descriptors[:, fields.SOURCE] | begins) % ALIGNMENT).any()
    found = torch.zeros(slot, dtype=torch.float32, device=amaxes.device)  # unused slots: 0
    parts = cut_amax_parts(descriptors).to(amaxes.device, torch.int32)
    calls: list[Call] = []
    if len(parts):
        calls.append(bind_expert_amax(descriptors.to(amaxes.device), parts, found, dtype, aligned))
    return [*calls, partial(torch.amax, found.view(-1, AMAX_SLOTS), 1, out=amaxes)]
