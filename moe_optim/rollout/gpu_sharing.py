"""Tensors that processes share on one GPU, by CUDA IPC."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from moe_optim.errors import ConfigError, LayoutError

_DEVICE = 6
"""Index of the device number among the arguments that ``reduce_tensor`` returns."""


@dataclass(frozen=True, kw_only=True)
class SharedTensors:
    """Handles of tensors on one GPU. Picklable; no data."""

    gpu: str
    """UUID of the GPU, since processes number GPUs differently."""
    handles: Mapping[str, tuple[Any, tuple[Any, ...]]]
    """Function that opens a tensor and its arguments, by name."""


def share_tensors(tensors: Mapping[str, Tensor]) -> SharedTensors:
    """Return handles with which another process opens the same memory.

    Usually an engine shares its parameters once, and the training process on the same GPU passes
    them to :func:`execute` as targets. Keep the tensors until the other process has dropped them.

    Args:
        tensors: tensors on one GPU, of any shapes and dtypes.

    Raises:
        LayoutError: there is no tensor, or one is not on the GPU of the others.
    """
    devices = {one.device for one in tensors.values()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        raise LayoutError(
            "share_tensors: expected tensors on one GPU, got "
            f"{', '.join(sorted(map(str, devices))) or 'none'}. Share those of each GPU apart."
        )
    handles = {name: reduce_tensor(one.detach()) for name, one in tensors.items()}
    return SharedTensors(gpu=_uuid(devices.pop()), handles=handles)


def open_tensors(shared: SharedTensors) -> dict[str, Tensor]:
    """Return another process's tensors, in their shapes and dtypes, as the same memory.

    Streams of the two processes do not wait for each other: synchronize before telling the other
    side. Drop the tensors before the process that shared them frees its own.

    Args:
        shared: handles from :func:`share_tensors` in another process.

    Raises:
        ConfigError: this process does not see the GPU.
    """
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    device = next((one for one in devices if _uuid(one) == shared.gpu), None)
    if device is None:
        raise ConfigError(
            f"open_tensors: expected GPU {shared.gpu} among those of this process, got "
            f"{', '.join(map(_uuid, devices)) or 'none'}. Set CUDA_VISIBLE_DEVICES to include it."
        )
    return {
        name: rebuild(*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :])
        for name, (rebuild, arguments) in shared.handles.items()
    }


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
