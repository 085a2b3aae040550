"""Bugs that training loops have met in shared parameter and gradient buffers, put back one by one.

Each function changes the classes of this package so that they do again what Megatron did; pull
requests and sequences are those of Megatron-LM. ``WIRE`` says on which wire a bug can exist.
"""

from typing import Any

import torch

from moe_optim.kernels.member_table import MemberTable
from moe_optim.megatron.bucket_group import GroupedBucketGroup, Weights
from moe_optim.megatron.bucket_storage import TRANSITIONS, Content, Event
from moe_optim.megatron.gather import Bf16Gather, OwnedMaster
from moe_optim.megatron.optimizer import GroupedDistributedOptimizer


def _pretend_fresh(group: GroupedBucketGroup) -> None:
    for bucket in group.buckets:
        if bucket.storage.content in (Content.STAGED, Content.IN_FLIGHT):
            bucket.storage.content = Content.ZERO
    group._in_flight, group._stepped = False, []
    group._set_weights(Weights.FRESH)


def _stage(gather: Bf16Gather, masters: list[OwnedMaster]) -> None:
    places, values = gather._plan(masters)
    torch._foreach_copy_(places, values)


def staged_masters_stay_in_gradients() -> None:
    """#2802: masters staged for a gather are still there when gradients accumulate."""
    stock = Bf16Gather._build_table

    def build_table(self: Bf16Gather) -> MemberTable:
        return MemberTable.build(stock(self).entries)  # which consumes nothing

    Bf16Gather._build_table = build_table


def forced_gather_skips_post_processing() -> None:
    """#4562: a forced gather returns before what arrived has been quantized."""
    stock = GroupedBucketGroup.start_param_sync

    def start_param_sync(self: GroupedBucketGroup, force_sync: bool = False) -> None:
        if not (self.managed and force_sync and self.weights is Weights.STALE):
            stock(self, force_sync=force_sync)
            return
        land = [bucket.gather.land for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.gather.land = lambda: None
        stock(self, force_sync=True)
        for bucket, method in zip(self.buckets, land, strict=True):
            bucket.gather.land = method
        _pretend_fresh(self)

    GroupedBucketGroup.start_param_sync = start_param_sync


def siblings_staging_is_lost() -> None:
    """#4800: of two optimizers in a chunk, one gathers for both before the other has staged."""
    stock = GroupedBucketGroup.mark_stale

    def mark_stale(self: GroupedBucketGroup, owner: Any) -> None:
        if owner.distributed_optimizer_instance_id == 0 and self.params_are_expert_parallel:
            return
        stock(self, owner)

    GroupedBucketGroup.params_are_expert_parallel = property(
        lambda self: any(not getattr(param, "allreduce", True) for param in self.params)
    )
    GroupedBucketGroup.mark_stale = mark_stale


def forced_gather_without_staging() -> None:
    """#5236: a save gathers what lies in the shared memory, although nobody staged it."""
    stock = Bf16Gather.open

    def opened(self: Bf16Gather, masters: Any) -> None:
        stock(self, list)  # no masters

    Bf16Gather.open = opened


def dispatch_state_survives_an_evaluation() -> None:
    """#5487: after a forced gather the next one counts as dispatched, and never runs."""
    stock = GroupedBucketGroup.start_param_sync

    def start_param_sync(self: GroupedBucketGroup, force_sync: bool = False) -> None:
        if self.managed and not force_sync and vars(self).pop("was_forced", False):
            self.param_gather_dispatched = True
            _pretend_fresh(self)
            return
        stock(self, force_sync=force_sync)
        self.was_forced = force_sync

    GroupedBucketGroup.start_param_sync = start_param_sync


def forward_gathers_gradients() -> None:
    """H2: a forward pass with hooks on gathers although nothing is staged: gradients."""
    stock = GroupedBucketGroup.start_param_sync

    def start_param_sync(self: GroupedBucketGroup, force_sync: bool = False) -> None:
        stock(self, force_sync=force_sync)
        if self.managed and self.weights is Weights.FRESH and not self._in_flight:
            for bucket in self.buckets:
                content = bucket.storage.content
                bucket.storage.content = Content.STAGED
                bucket.gather.land()
                bucket.storage.content = content

    GroupedBucketGroup.start_param_sync = start_param_sync


def fallback_stages_into_gradients() -> None:
    """H3: a stash that overflows zeroes gradients and then stages masters over them."""

    def stage(self: GroupedDistributedOptimizer) -> None:
        for group in self._managed_groups:
            for bucket in group.buckets:
                _stage(bucket.gather, self.masters_of(bucket))

    GroupedDistributedOptimizer._copy_main_params_to_param_buffer = stage


def forced_gather_drops_the_one_in_flight() -> None:
    """H4: a forced gather while another is in flight drops that one's result."""
    stock = GroupedBucketGroup.start_param_sync

    def start_param_sync(self: GroupedBucketGroup, force_sync: bool = False) -> None:
        if self.managed and force_sync and self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            _pretend_fresh(self)
        stock(self, force_sync=force_sync)

    GroupedBucketGroup.start_param_sync = start_param_sync


def staged_masters_are_wiped() -> None:
    """H5: configurations disagree, so a step stages at once and zeroing wipes it."""
    stock = GroupedBucketGroup.mark_stale

    def mark_stale(self: GroupedBucketGroup, owner: Any) -> None:
        stock(self, owner)
        for bucket in self.buckets:
            _stage(bucket.gather, owner.masters_of(bucket))

    GroupedBucketGroup.mark_stale = mark_stale
    forced_gather_without_staging()


def freeing_drops_the_post_processing() -> None:
    """H6: freeing overlap buffers waits for a gather and forgets to quantize what came."""

    def free(self: GroupedBucketGroup) -> None:
        if self.managed and self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            _pretend_fresh(self)

    GroupedBucketGroup.free_overlap_buffers = free


def save_zeroes_accumulating_gradients() -> None:
    """H7: a save in the middle of accumulation stages masters over gradients, then zeroes."""
    TRANSITIONS[Event.STAGE] = (frozenset(Content), Content.STAGED)
    stock = GroupedBucketGroup.start_param_sync

    def start_param_sync(self: GroupedBucketGroup, force_sync: bool = False) -> None:
        if self.managed and force_sync:
            self.finish_gather()
            for owner in self._owners:
                self.mark_stale(owner)
        stock(self, force_sync=force_sync)

    GroupedBucketGroup.start_param_sync = start_param_sync


BUGS = {
    "#2802": (staged_masters_stay_in_gradients, "bf16"),
    "#4562": (forced_gather_skips_post_processing, "bf16"),
    "#4800": (siblings_staging_is_lost, "quantized"),
    "#5236": (forced_gather_without_staging, "bf16"),
    "#5487": (dispatch_state_survives_an_evaluation, "quantized"),
    "H2": (forward_gathers_gradients, "bf16"),
    "H3": (fallback_stages_into_gradients, "bf16"),
    "H4": (forced_gather_drops_the_one_in_flight, "bf16"),
    "H5": (staged_masters_are_wiped, "bf16"),
    "H6": (freeing_drops_the_post_processing, "bf16"),
    "H7": (save_zeroes_accumulating_gradients, "bf16"),
}
"""Name -> what puts it back, and the wire on which it can exist."""
