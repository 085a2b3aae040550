"""Imported once by the fork server of ``ranks.py``: forked ranks then start in milliseconds."""

import importlib
import os
import warnings

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

for name in (
    "megatron.training.arguments",
    "megatron.training.training",
    "moe_optim.megatron.entry",
    "moe_optim.megatron.experts",
    "moe_optim.megatron.optimizer",
):
    importlib.import_module(name)

importlib.import_module("torch").set_num_threads(1)
