"""Bugs that training loops have met in parameter and gradient buffers, put back one by one.

Each function changes the classes of this package so that they do again what Megatron did, or what
they did themselves; pull requests and sequences are those of Megatron-LM.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from moe_optim.buckets.bucket_group import GroupedBucketGroup
from moe_optim.buckets.gather import Bf16Gather, OwnedMaster, QuantizedGather
from moe_optim.buckets.managed_bucket import ManagedBucket
from moe_optim.buckets.states import (
    OWN_MEMORY,
    SHARED_MEMORY,
    BucketState,
    Event,
    Gradients,
    Weights,
)
from moe_optim.integration import installation
from moe_optim.kernels.member_table import MemberTable
from moe_optim.kernels.step_table import StepTable
from moe_optim.optimizer import address_book
from moe_optim.optimizer.chained import GroupedChainedOptimizer
from moe_optim.optimizer.distributed import GroupedDistributedOptimizer
from moe_optim.optimizer.muon_distributed import MuonDistributedOptimizer
from moe_optim.weights.grouped_weight import GroupedWeight
from moe_optim.weights.storage import WeightStorage


def _pretend_fresh(group: GroupedBucketGroup) -> None:
    for bucket in group.managed:
        if bucket.state.gradients is Gradients.IN_FLIGHT:
            bucket.state.gradients = Gradients.ZERO
        bucket.state.weights = Weights.FRESH


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
    stock, finish = GroupedBucketGroup.start_param_sync, Bf16Gather.finish

    def landed(self: Bf16Gather) -> None:
        if not vars(self).get("is_forced", False):
            finish(self)

    def start_param_sync(self: GroupedBucketGroup, force_sync: bool = False) -> None:
        for bucket in self.managed:
            bucket.gather.is_forced = force_sync
        stock(self, force_sync=force_sync)
        for bucket in self.managed:
            bucket.gather.is_forced = False

    GroupedBucketGroup.start_param_sync, Bf16Gather.finish = start_param_sync, landed


def siblings_staging_is_lost() -> None:
    """#4800: of two optimizers in a chunk, one gathers for both before the other has staged."""
    stock = BucketState.record

    def record(self: BucketState, event: Event) -> None:
        if event is Event.SETTLE and "last" in self.name and self.weights is Weights.MOVING:
            self.weights = Weights.FRESH
            return
        stock(self, event)

    BucketState.record = record


def forced_gather_without_staging() -> None:
    """#5236: a save gathers what lies in the shared memory, although nobody staged it."""
    stock = Bf16Gather.open

    def opened(self: Bf16Gather, masters: Any, *, encoded: bool = False) -> None:
        stock(self, [])

    Bf16Gather.open = opened


def dispatch_state_survives_an_evaluation() -> None:
    """#5487: after a forced gather the next one counts as dispatched, and never runs."""
    stock = GroupedBucketGroup.start_param_sync

    def start_param_sync(self: GroupedBucketGroup, force_sync: bool = False) -> None:
        if self.managed and not force_sync and vars(self).pop("was_forced", False):
            _pretend_fresh(self)
            return
        stock(self, force_sync=force_sync)
        self.was_forced = force_sync

    GroupedBucketGroup.start_param_sync = start_param_sync


def forward_gathers_gradients() -> None:
    """H2: a forward pass with hooks on gathers although nothing is staged: gradients."""
    stock = GroupedBucketGroup.finish_param_sync

    def finish_param_sync(
        self: GroupedBucketGroup, skip_next_bucket_dispatch: bool = False
    ) -> None:
        was_fresh = [b for b in self.managed if b.state.weights is Weights.FRESH]
        stock(self, skip_next_bucket_dispatch)
        for bucket in was_fresh:
            bucket.gather.finish()

    GroupedBucketGroup.finish_param_sync = finish_param_sync


def fallback_stages_into_gradients() -> None:
    """H3: a stash that overflows zeroes gradients and then stages masters over them."""

    def stage(self: GroupedDistributedOptimizer) -> None:
        for group in self._managed_groups:
            for bucket in group.managed:
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
    stock = GroupedDistributedOptimizer._record

    def record(self: GroupedDistributedOptimizer, event: Event) -> None:
        stock(self, event)
        for bucket in self.managed_buckets if event is Event.SETTLE else ():
            _stage(bucket.gather, self.masters_of(bucket))

    GroupedDistributedOptimizer._record = record
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
    row = SHARED_MEMORY[Event.GATHER]
    anything = {state: Gradients.IN_FLIGHT for state in Gradients}
    SHARED_MEMORY[Event.GATHER] = replace(row, gradients=anything)
    stock = GroupedBucketGroup.start_param_sync

    def start_param_sync(self: GroupedBucketGroup, force_sync: bool = False) -> None:
        if self.managed and force_sync:
            self.finish_gather()
            for bucket in self.managed:
                bucket.state.record(Event.SETTLE)
        stock(self, force_sync=force_sync)

    GroupedBucketGroup.start_param_sync = start_param_sync


def zeroing_trusts_its_notes() -> None:
    """Memory counts as zero until a gradient is announced, and is not zeroed then."""
    stock = ManagedBucket.zero

    def zero(self: ManagedBucket) -> None:
        if self.state.gradients is not Gradients.ZERO:
            stock(self)

    ManagedBucket.zero = zero


def gradients_are_announced_by_a_hook() -> None:
    """Fused gradients are announced once they are written, by a hook that may not be reached."""
    zeroing_trusts_its_notes()
    WeightStorage.before_gradient = lambda self: None


def reductions_stay_in_flight() -> None:
    """A reduction that a backward pass began before it failed is never waited for."""
    GroupedBucketGroup.finish_communication = GroupedBucketGroup.finish_gather


def weights_are_fresh_until_a_step_has_ended() -> None:
    """Only the end of a step says that masters have moved."""
    for table in (OWN_MEMORY, SHARED_MEMORY):
        row = table[Event.STEP]
        table[Event.STEP] = replace(row, weights={state: state for state in row.weights})


def a_failed_gather_stays_in_flight() -> None:
    """What an exception in a gather leaves behind is never cleared away."""
    ManagedBucket.give_up_gather = lambda self: None


def copies_share_the_buckets_gradients() -> None:
    """A copy of a weight takes everything along that somebody has hung on it."""
    stock = GroupedWeight.__deepcopy__

    def deepcopy(self: GroupedWeight, memo: dict[int, Any]) -> Any:
        result = stock(self, memo)
        if hasattr(self, "main_grad"):
            result.main_grad = self.main_grad.clone()
        return result

    GroupedWeight.__deepcopy__ = deepcopy


def one_norm_is_looked_at() -> None:
    """Norms of parameter groups that Megatron keeps apart are not asked whether they are finite."""
    GroupedChainedOptimizer.has_grad_norm_group = lambda self, grad_norm_group: False


def weights_wait_for_a_loop_to_stage_them() -> None:
    """``reuse_grad_buf_for_mxfp8_param_ag`` reaches the step, which then writes no weights."""
    stock = GroupedDistributedOptimizer.__init__

    def init(self: GroupedDistributedOptimizer, optimizer: Any, config: Any, *args: Any, **kw: Any):
        stock(self, optimizer, config, *args, **kw)
        self.config = copy.copy(config)
        self.config.reuse_grad_buf_for_mxfp8_param_ag = True

    GroupedDistributedOptimizer.__init__ = init


def loads_forget_nothing() -> None:
    """Whether slices are encoded is a note of the gather's own, which no load takes away."""
    prepare_step, opened, finish = (
        QuantizedGather.prepare_step,
        QuantizedGather.open,
        QuantizedGather.finish,
    )

    def prepare(self: QuantizedGather) -> None:
        prepare_step(self)
        self.was_prepared = True

    def trusting(self: QuantizedGather, masters: Any, *, encoded: bool = False) -> None:
        self.plan_step(masters)
        opened(self, masters, encoded=vars(self).pop("was_prepared", False))

    def landed(self: QuantizedGather) -> None:
        finish(self)
        vars(self).pop("was_prepared", None)

    QuantizedGather.prepare_step, QuantizedGather.finish = prepare, landed
    QuantizedGather.open = trusting


def maxima_outlive_their_step() -> None:
    """The maxima that ranks have exchanged are still there when the next step looks for its own."""
    stock = StepTable.launch

    def step(table: StepTable) -> None:
        exchange = None if table.members is None else table.members.exchange
        before = None if exchange is None else exchange.clone()
        stock(table)
        if exchange is not None:
            torch.maximum(exchange, before, out=exchange)

    StepTable.launch = step


def replaced_moments_are_written() -> None:
    """What a step writes is planned once, whatever Adam is given for moments later."""
    address_book.find_moments = lambda inner: []


def moved_masters_are_written() -> None:
    """Plans know views of masters, which stay behind when a master is given other memory."""
    masters_of = GroupedDistributedOptimizer.masters_of

    def views_of(self: GroupedDistributedOptimizer, bucket: ManagedBucket) -> list[OwnedMaster]:
        return [replace(one, master=one.master.detach()) for one in masters_of(self, bucket)]

    GroupedDistributedOptimizer.masters_of = views_of


def encoded_weights_are_read() -> None:
    """What is encoded counts as fresh, and is not gathered: slices of other ranks are old."""
    current = (Weights.FRESH, Weights.ENCODED)
    WeightStorage.is_fresh = property(lambda self: self.state.weights in current)
    require_fresh = WeightStorage.require_fresh

    def not_behind(self: WeightStorage) -> None:
        if self.state.weights not in current:
            require_fresh(self)

    WeightStorage.require_fresh = not_behind
    stock = GroupedBucketGroup.start_param_sync

    def start_param_sync(self: GroupedBucketGroup, force_sync: bool = False) -> None:
        if not self.managed or any(bucket.state.weights not in current for bucket in self.managed):
            stock(self, force_sync=force_sync)

    GroupedBucketGroup.start_param_sync = start_param_sync


def masters_count_no_writes() -> None:
    """A master that was written by hand after its step travels as the step has encoded it."""
    stock = ManagedBucket.settle

    def settle(self: ManagedBucket, *, encoded: bool) -> None:
        stock(self, encoded=encoded)
        self._master_writes = mock.ANY

    ManagedBucket.settle = settle


def looks_outlive_their_step() -> None:
    """Gathers trust that masters and weights are where the last step has seen them."""
    stock = ManagedBucket.open_gather
    ManagedBucket.open_gather = lambda self, generation: stock(self, self.generation)


def failed_steps_have_encoded() -> None:
    """Whatever ends a step, its weights count as encoded."""
    stock = GroupedDistributedOptimizer.update_masters

    def update_masters(self: GroupedDistributedOptimizer, clips: torch.Tensor) -> None:
        try:
            stock(self, clips)
        except BaseException:
            for bucket in self.managed_buckets:
                bucket.state.weights = Weights.ENCODED
                bucket._master_writes = bucket._planned_writes
            raise

    GroupedDistributedOptimizer.update_masters = update_masters


def forgotten_masters_have_not_moved() -> None:
    """A step trusts plans of a bucket that does not know any more where its masters are."""
    ManagedBucket.plan_number = property(lambda self: (0, 0))


def momentum_is_not_kept() -> None:
    """A step of Muon starts from momentum zero."""
    stock = MuonDistributedOptimizer.launch

    def launch(self: MuonDistributedOptimizer, clips: torch.Tensor) -> None:
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()
        stock(self, clips)

    MuonDistributedOptimizer.launch = launch


_CHANGED = (
    *(GroupedBucketGroup, ManagedBucket, BucketState, Bf16Gather, QuantizedGather, StepTable),
    *(GroupedChainedOptimizer, GroupedDistributedOptimizer, MuonDistributedOptimizer),
    *(GroupedWeight, WeightStorage),
)
"""Classes that bugs are put back into."""


@contextmanager
def put_back(bug: "Bug") -> Iterator[None]:
    """Have a bug in a block."""
    held: list[tuple[Any, dict[str, Any]]] = [
        (changed, dict(vars(changed))) for changed in (*_CHANGED, address_book)
    ]
    tables = [(table, dict(table)) for table in (OWN_MEMORY, SHARED_MEMORY)]
    installation.uninstall()  # Megatron's names are bound to what a bug changes
    try:
        bug.put_back()
        yield
    finally:
        installation.uninstall()
        for changed, names in held:
            for name in vars(changed).keys() - names.keys():
                delattr(changed, name)
            for name, value in names.items():
                if vars(changed)[name] is not value:
                    setattr(changed, name, value)
        for table, rows in tables:
            table.update(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """What puts a bug back, and where it can show."""

    put_back: Callable[[], None]
    wire: str = "quantized"
    step: str = "stock"
    ranks: int = 1
    optimizer: str = "adam"

    @property
    def options(self) -> dict[str, str]:
        """Of the life cycle."""
        return {"wire": self.wire, "step": self.step, "optimizer": self.optimizer}


def _fused(put_back: Callable[[], None], ranks: int = 1) -> Bug:
    return Bug(put_back=put_back, step="fused", ranks=ranks)


def _muon(put_back: Callable[[], None], wire: str = "quantized") -> Bug:
    return Bug(put_back=put_back, wire=wire, step="fused", optimizer="muon and adam")


BUGS = {
    "#2802": Bug(put_back=staged_masters_stay_in_gradients, wire="bf16"),
    "#4562": Bug(put_back=forced_gather_skips_post_processing, wire="bf16"),
    "#4800": Bug(put_back=siblings_staging_is_lost),
    "#5236": Bug(put_back=forced_gather_without_staging, wire="bf16"),
    "#5487": Bug(put_back=dispatch_state_survives_an_evaluation),
    "H2": Bug(put_back=forward_gathers_gradients, wire="bf16"),
    "H3": Bug(put_back=fallback_stages_into_gradients, wire="bf16"),
    "H4": Bug(put_back=forced_gather_drops_the_one_in_flight, wire="bf16"),
    "H5": Bug(put_back=staged_masters_are_wiped, wire="bf16"),
    "H6": Bug(put_back=freeing_drops_the_post_processing, wire="bf16"),
    "H7": Bug(put_back=save_zeroes_accumulating_gradients, wire="bf16"),
    "gradients written by hand": Bug(put_back=zeroing_trusts_its_notes),
    "a backward pass that fails": Bug(put_back=gradients_are_announced_by_a_hook),
    "a reduction in flight": Bug(put_back=reductions_stay_in_flight),
    "a step that fails": Bug(put_back=weights_are_fresh_until_a_step_has_ended),
    "a gather that fails": Bug(put_back=a_failed_gather_stays_in_flight, wire="bf16"),
    "a copy in training": Bug(put_back=copies_share_the_buckets_gradients),
    "a norm of its own": Bug(put_back=one_norm_is_looked_at),
    "a flag that asks to share": Bug(put_back=weights_wait_for_a_loop_to_stage_them),
    "a load after an encoded step": _fused(loads_forget_nothing),
    "maxima of the last step": _fused(maxima_outlive_their_step, ranks=2),
    "moments that were replaced": _fused(replaced_moments_are_written),
    "masters that were moved": _fused(moved_masters_are_written),
    "an evaluation of one rank's slices": _fused(encoded_weights_are_read, ranks=2),
    "masters by hand after a step": _fused(masters_count_no_writes),
    "a look of an earlier step": _fused(looks_outlive_their_step),
    "masters that moved while weights were away": _muon(
        forgotten_masters_have_not_moved, wire="bf16"
    ),
    "a momentum that was replaced": _muon(replaced_moments_are_written),
    "a step that loses momentum": _muon(momentum_is_not_kept),
    "a fused step that fails": _fused(failed_steps_have_encoded),
}
"""By name."""
