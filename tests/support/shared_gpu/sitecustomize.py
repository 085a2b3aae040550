"""Lets several ranks train on one GPU, where there are not as many.

With this folder on PYTHONPATH and RANKS_ON_A_GPU=N, a process that is no rank finds N GPUs, and
each of the ranks that it starts takes the one there is. NCCL refuses two ranks on a GPU of one
host, so every rank has a host name of its own, and all that they send goes through sockets: the
values are those of as many GPUs, times are not.
"""

import os

if "RANK" in os.environ:
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
    os.environ["LOCAL_RANK"] = "0"
elif "RANKS_ON_A_GPU" in os.environ:
    _visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _visible not in (None, "", "0"):  # some of the N: there is but the first
        os.environ["RANKS_ON_A_GPU"] = str(len(_visible.split(",")))
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"

    import torch

    _ranks = int(os.environ["RANKS_ON_A_GPU"])
    _real_count, _real_properties = torch.cuda.device_count, torch.cuda.get_device_properties
    torch.cuda.device_count = lambda: _ranks * min(1, _real_count())
    torch.cuda.get_device_properties = lambda device=None: _real_properties(0)
