"""Imported once by the fork server of ``ranks.py``: forked ranks then start in milliseconds."""

import argparse
import functools
import gc
import importlib
import os
import queue
import sys
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

gc.disable()  # until all is imported, which leaves no garbage
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no GPU is looked at before a fork, nor after it
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

importlib.import_module("moe_optim.integration.cpu_runtime").hide_gpu_packages()
for name in (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.libraries.null_tokenizer",
    "megatron.training.arguments",
    "megatron.core.tokenizers.text.models.gpt_tokenizer",
    "megatron.training.training",
    "moe_optim.buckets.buffer",
    "moe_optim.buckets.offload",
    "moe_optim.calibration.state_entries",
    "moe_optim.checkpoint.files.torch_dist",
    "moe_optim.checkpoint.files.untrusted_files",
    "moe_optim.checkpoint.load_session",
    "moe_optim.checkpoint.loading",
    "moe_optim.checkpoint.saving",
    "moe_optim.checkpoint.sealing",
    "moe_optim.commands.train.describe_run",
    "moe_optim.commands.train.layer_spec",
    "moe_optim.experts.module",
    "moe_optim.integration.dataset_helpers",
    "moe_optim.integration.script_arguments",
    "moe_optim.optimizer.distributed",
    "moe_optim.buckets.matrix_layout",
    "moe_optim.optimizer.factory",
    "moe_optim.optimizer.muon_distributed",
    "moe_optim.commands.train.pretrain",
    "pytest",
    "hypothesis.stateful",
    "tests.support.states.life_cycle",
    "tests.support.training",
):
    importlib.import_module(name)

importlib.import_module("torch").set_num_threads(1)
importlib.import_module("tests.support.hypothesis_profile").load()


def remember_help_texts() -> None:
    """Read what flags say of themselves from Megatron's sources once, not twice in every rank."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    reader = ArgumentGroupFactory.__new__(ArgumentGroupFactory)
    read = functools.cache(reader._get_field_docstrings)
    ArgumentGroupFactory._get_field_docstrings = lambda _self, config: read(config)
    add_megatron_arguments(argparse.ArgumentParser())


def save_without_servers() -> None:
    """Hand results of writers on in a queue: for them Megatron starts a Python in every rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # enough where nothing is saved asynchronously


def look_through_modules_once() -> None:
    """Spare ranks walks over all that is imported here, each of which copies its pages.

    Some find who has a function of Megatron's under its name; a rank asks those found, and looks
    through what it imported itself. One finds nothing: TORCHDYNAMO_DISABLE is set above.
    """
    from moe_optim.integration import cpu_runtime, engine, patches

    find, known = engine._find_importers, {id(one): one for one in sys.modules.values()}
    by_name = [
        engine.resolve(patch.target)[2]
        for patch in (*patches.OPTIMIZER, *patches.CHECKPOINTS_OF_RANKS)
        if patch.is_imported_by_name
    ]
    importers = {target: find(target) for target in by_name}

    def find_others(target: Any) -> list[tuple[Any, str]]:
        if target not in importers:
            return find(target)
        others = {name: one for name, one in sys.modules.items() if id(one) not in known}
        kept = [(one, name) for one, name in importers[target] if vars(one).get(name) is target]
        with mock.patch.object(engine, "sys", SimpleNamespace(modules=others)):
            return kept + find(target)

    engine._find_importers = find_others
    cpu_runtime._require_nothing_compiled()
    cpu_runtime._require_nothing_compiled = lambda: None


remember_help_texts()
save_without_servers()
look_through_modules_once()
gc.freeze()  # a collection in a rank would copy every page it inherits
gc.enable()
