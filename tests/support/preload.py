"""Imported once by the fork server of ``ranks.py``: forked ranks then start in milliseconds."""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import warnings

warnings.filterwarnings("ignore")

import megatron.training.arguments
import megatron.training.training
import torch

import moe_optim.megatron.entry
import moe_optim.megatron.experts
import moe_optim.megatron.optimizer  # noqa: F401

torch.set_num_threads(1)
