"""A small model under the real DDP and optimizer, and a model in plain torch of what it must hold.

``LifeCycle`` has a method for everything that a training loop may do. Each does it for real and in
the model, checks that errors come exactly where the model says, and compares weights, gradients and
outputs to the bit. It runs on any number of gloo ranks, all of which call the same methods.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_optim.buckets.states import Gradients
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import NonFiniteError, StateError
from moe_optim.experts.grouped_linear import GroupedLinear
from moe_optim.formats import get_format, reference
from moe_optim.formats.reference.adam import Hyper, step_into
from moe_optim.formats.reference.muon import MuonHyper, apply_into, momentum_into
from moe_optim.formats.reference.newton_schulz import Orthogonalization, orthogonalize
from moe_optim.integration import installation
from moe_optim.kernels import staging
from moe_optim.kernels.step_table import StepTable
from moe_optim.optimizer.muon_step import MuonTable
from moe_optim.weights.grouped_weight import GradientNote, GroupedWeight
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.modules import serving
from tests.support.ranks import sharing_a_rank
from tests.support.states import making_room
from tests.support.wrapping import build_optimizer, layer_config, wrap

EXPERTS, WIDTH, TOKENS = 3, 32, 8  # two ranks cut the second expert, inside of a block
QUANTIZED = (0, 2)  # layers, of which the last has an optimizer of its own
LR, WEIGHT_DECAY = 1e-2, 0.1
MUON_MOMENTUM, MUON_FACTOR = 0.9, 0.1  # a factor that keeps weights small over thousands of steps
DROP_GRADIENTS = {"zero", "paged_stash_fallback"}
NEED_GRADIENTS = DROP_GRADIENTS | {
    *("micro", "step", "skip", "save", "load"),
    *("failing_backward", "failing_step", "write_by_hand", "nonfinite"),
}
GATHER_PARTS = ("open", "encode", "finish")
MOMENTS = ("exp_avg", "exp_avg_sq")
WITHOUT_WEIGHTS = {"export", "rollout", "disable_hooks", "enable_hooks", "free", "bring_back"}
EXCHANGED = ("masters", *MOMENTS, "states", "adam")


class Tripped(Exception):  # noqa: N818  # not an error of the product's
    """What a hook, an allocation or a collective raises in the middle of something."""


def make_layers(format: str, compute: str | None = None) -> torch.nn.ModuleList:
    """Two layers of experts, and a dense one between them; the same values on every rank."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / WIDTH**0.5).bfloat16()

    layers = torch.nn.ModuleList()
    for name in ("first", "last"):
        linear = GroupedLinear(
            *(EXPERTS, WIDTH, WIDTH),
            format=None if format == "bf16" else get_format(format),
            compute=compute and get_format(compute),
            name=name,
        )
        linear.load_values(values(EXPERTS, WIDTH, WIDTH), keep_for_masters=True)
        layers.append(linear)
    dense = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        dense.weight.copy_(values(WIDTH, WIDTH))
    layers.insert(1, dense)
    return layers


def run_layers(layers: torch.nn.ModuleList, tokens: Tensor) -> Tensor:
    """Return [T, width]; tanh keeps everything finite over thousands of steps."""
    first, dense, last = layers
    ends = torch.tensor([TOKENS * n // EXPERTS for n in range(1, EXPERTS + 1)], dtype=torch.int32)
    return last(torch.tanh(dense(torch.tanh(first(tokens, ends)))), ends)


def tokens_of(seed: int, rank: int) -> Tensor:
    """Return the batch of a rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn((TOKENS, WIDTH), generator=generator).bfloat16()


class ReferenceAdam:
    """The Adam of a fused step, as ``torch.optim.AdamW`` is that of any other.

    A step counts for all that have a gradient, and for those in ``counted``, which one that fails
    does not reach.
    """

    def __init__(self, masters: list[torch.nn.Parameter]) -> None:
        self.masters = masters
        self.state: dict[int, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, counted: tuple[int, ...] = ()) -> None:
        """Step masters whose ``grad`` is there."""
        for number, master in enumerate(self.masters):
            if master.grad is None and number not in counted:
                continue
            zeros = {name: torch.zeros_like(master) for name in MOMENTS}
            state = self.state.setdefault(number, {"step": 0, **zeros})
            state["step"] += 1
            if master.grad is not None:
                hyper = Hyper(
                    lr=LR,
                    betas=(0.9, 0.999),
                    eps=1e-8,
                    weight_decay=WEIGHT_DECAY,
                    step=state["step"],
                )
                step_into(
                    *(master, master.grad, *(state[name] for name in MOMENTS)),
                    hyper=torch.tensor(hyper.row()),
                    clip=torch.ones(()),
                    decoupled=True,
                )

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return the states, not copies."""
        return self.state

    def load_state_dict(self, state: dict[int, dict[str, Any]]) -> None:
        """Take states."""
        self.state = state


class ReferenceMuon:
    """Muon of square matrices, one after another: the one of a fused step, or Megatron's.

    A fused step sums the squares of a norm in fp64.
    """

    def __init__(self, masters: list[torch.nn.Parameter], is_fused: bool) -> None:
        self.masters, self.is_fused = masters, is_fused
        self.how = Orthogonalization(extra_scale_factor=MUON_FACTOR)
        self.state: dict[int, Tensor] = {}
        """Momentum by number of the master."""
        hyper = MuonHyper(
            lr=LR,
            momentum=MUON_MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            scale=self.how.scale(WIDTH, WIDTH),
            extra_scale_factor=MUON_FACTOR,
        )
        self.hyper = dict.fromkeys(range(len(masters)), hyper)
        """Hyperparameters by number of the master."""

    @torch.no_grad()
    def step(self) -> None:
        """Step masters whose ``grad`` is there."""
        one = torch.ones(())
        for number, master in enumerate(self.masters):
            if master.grad is None:
                continue
            hyper = torch.tensor(self.hyper[number].row())
            direction = self._accumulate(number, master.grad)
            for matrix, along in zip(
                master.view(-1, WIDTH, WIDTH), direction.view(-1, WIDTH, WIDTH), strict=True
            ):
                result = self._iterate(along) if self.is_fused else orthogonalize(along, self.how)
                apply_into(matrix, result, hyper=hyper, clip=one)

    @torch.no_grad()
    def accumulate(self, master: torch.nn.Parameter, gradient: Tensor) -> None:
        """Update the momentum alone."""
        self._accumulate([one is master for one in self.masters].index(True), gradient)

    def _accumulate(self, number: int, gradient: Tensor) -> Tensor:
        momentum = self.state.setdefault(number, torch.zeros_like(self.masters[number]))
        hyper = torch.tensor(self.hyper[number].row())
        return momentum_into(gradient, momentum, hyper=hyper, clip=torch.ones(()), nesterov=True)

    def _iterate(self, direction: Tensor) -> Tensor:
        norm = direction.double().square().sum().sqrt().float().clamp_min(1e-7)
        x = (direction / norm).bfloat16()[None]
        for a, b, c in self.how.coefficients():
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x[0].float()

    def state_dict(self) -> dict[int, Tensor]:
        """Return the momenta, not copies."""
        return self.state

    def load_state_dict(self, state: dict[int, Tensor]) -> None:
        """Take momenta."""
        self.state = state


class Both:
    """Muon of the experts, and Adam of the dense layer."""

    def __init__(self, muon: ReferenceMuon, adam: Any) -> None:
        self.muon, self.adam = muon, adam

    @property
    def state(self) -> list[Any]:
        """One entry per master that has been stepped."""
        return [*self.muon.state, *self.adam.state]

    def step(self) -> None:
        """Step masters whose ``grad`` is there."""
        self.muon.step()
        self.adam.step()

    def accumulate(self, master: torch.nn.Parameter, gradient: Tensor) -> None:
        """Update the momentum of a matrix alone."""
        self.muon.accumulate(master, gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return the states, not copies."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take states."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


@dataclass
class Expected:
    """What the real thing must hold, in plain torch."""

    layers: torch.nn.ModuleList
    masters: list[torch.nn.Parameter]
    adam: Any
    gradients: list[list[Tensor]]
    """Of every parameter, what each rank has accumulated."""
    content: Gradients = Gradients.ZERO
    stale: set[int] = field(default_factory=set)
    """Quantized layers behind their masters."""
    is_in_flight: bool = False
    is_offloaded: bool = False
    is_away: bool = False
    """Whether quantized weights are on the host."""
    is_with_verl: bool = False
    """Whether all weights and gradients are where verl puts them meanwhile."""
    hooks: bool = True
    dense_is_spent: bool = False
    """Whether dense gradients have been used. A gather through shared memory zeroes those of
    experts only, so that a loop which goes on without zeroing is wrong, here as in Megatron."""
    must_zero: bool = False
    """Whether gradients must be zeroed before there are new ones: after an error, or a reload."""
    by_hand: bool = False
    """Whether gradients were written that nobody has been told of."""
    is_mixed: bool = False
    """Whether a gather that failed has left memory of some groups zero, of others spent."""

    @property
    def is_fresh(self) -> bool:
        """Whether every layer holds the weights of its master."""
        return not self.stale

    @is_fresh.setter
    def is_fresh(self, is_fresh: bool) -> None:
        self.stale = set() if is_fresh else set(QUANTIZED)


class Tripwire(GradientNote):
    """Hook of a weight that stops the backward pass of a life cycle there.

    It is a note, since any other hook keeps backward passes from accumulating into a bucket.

    Args:
        life: the life cycle, which says where to stop.
        index: of the layer.
    """

    def __init__(self, life: "LifeCycle", index: int) -> None:
        self._life, self._index = life, index

    def __call__(self, _: Tensor) -> None:
        """Raise where the life cycle asks for it."""
        if self._life.tripping == self._index:
            raise Tripped


class LifeCycle:
    """See the module.

    Args:
        wire: of the managed buckets.
        overlap: whether DDP overlaps the gather with the forward pass.
        format: of the experts; the model in plain torch is one of quantized experts.
        compute: format of the products of bf16 experts.
        step: who updates masters.
        offload_states: part of masters and moments that lies on the host.
        optimizer: ``adam``, or ``muon`` for all matrices, or ``muon and adam``, which leaves the
            dense one to Adam.
    """

    def __init__(
        self,
        wire: str = "quantized",
        overlap: bool = True,
        format: str = "mxfp8",
        compute: str | None = None,
        step: str = "stock",
        offload_states: float = 0.0,
        optimizer: str = "adam",
    ) -> None:

        self.shares_memory, self.overlap = wire == "bf16", overlap
        self.is_fused = step == "fused"
        layout = "stock" if self.shares_memory else "aligned"
        knobs: dict[str, Any] = {"wire": wire, "layout": layout, "step": step}
        knobs["offload_states"] = offload_states
        staging.SMALLEST, staging.CHUNK_BYTES = 2, 20_000  # some of each weight in a chunk
        self.has_muon = optimizer != "adam"
        _install(
            MoEOptimConfig(format=format, compute=compute, **knobs),
            "muon" if self.has_muon else "adam",
        )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        config = layer_config(WIDTH)
        layers = make_layers(format, compute)
        layers[2].weight.allreduce = False  # a second optimizer, as experts have at EP above 1
        layers[2].weight.grad_norm_group = "mtp"  # and a norm of its own
        if optimizer == "muon and adam":
            layers[1].weight.is_embedding_or_output_parameter = True
        self.tripping: int | None = None
        for index, layer in enumerate(layers):  # before DDP and buffers register theirs
            layer.weight.register_hook(Tripwire(self, index))
        self.layers = layers
        self.ddp = wrap(
            config,
            make_model(config, layers),
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            bucket_size=1,
            reuse_grad_buf_for_mxfp8_param_ag=True,  # a loop then does more, and means the same
        )
        self.optimizer = self.build_optimizer()
        self.params = [layer.weight for layer in layers]
        assert len(self.parts) == (3 if optimizer == "muon and adam" else 2)
        self.expected = self._expect(format, compute)
        self.saved: Any = None

    def build_optimizer(self) -> Any:
        """Return a new optimizer of the wrapped model."""
        return build_optimizer(
            self.ddp,
            optimizer="muon" if self.has_muon else "adam",
            muon_momentum=MUON_MOMENTUM,
            muon_nesterov=True,
            muon_extra_scale_factor=MUON_FACTOR,
            lr=LR,
            min_lr=LR,
            weight_decay=WEIGHT_DECAY,
            clip_grad=0.0,
            overlap_param_gather=self.overlap,
            reuse_grad_buf_for_mxfp8_param_ag=True,
        )

    @property
    def parts(self) -> list[Any]:
        """Optimizers, the one of the last layer after the others."""
        parts: list[Any] = self.optimizer.chained_optimizers
        return parts

    def _expect(self, format: str, compute: str | None) -> Expected:
        layers = make_layers(format, compute)
        masters = []
        for layer in layers:
            weight = layer.weight
            initial = (
                weight.get_high_precision_init_val()
                if isinstance(weight, GroupedWeight)
                else weight.detach()
            )
            masters.append(torch.nn.Parameter(initial.float()))
        expected = Expected(
            layers=layers, masters=masters, adam=self._expected_optimizer(masters), gradients=[]
        )
        self._zero_expected(expected)
        return expected

    def _expected_optimizer(self, masters: list[torch.nn.Parameter]) -> Any:
        adam: Callable[[list[torch.nn.Parameter]], Any] = ReferenceAdam
        if not self.is_fused:
            adam = partial(torch.optim.AdamW, lr=LR, weight_decay=WEIGHT_DECAY, eps=1e-8)
        if not self.has_muon:
            return adam(masters)
        if len(self.parts) == 2:
            return ReferenceMuon(masters, self.is_fused)
        experts = [masters[number] for number in QUANTIZED]
        return Both(ReferenceMuon(experts, self.is_fused), adam([masters[1]]))

    # --- what a loop does -----------------------------------------------------------------------

    def zero(self) -> None:
        """Begin a step."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.overlap and self.expected.hooks:
            for part in self.optimizer.chained_optimizers:
                part._copy_main_params_to_param_buffer()
        if self.shares_memory:
            self._landed()
        self._zero_expected(self.expected)

    def may(self, name: str) -> bool:
        """Return whether a loop can do this now at all: gradients need memory, and to be whole."""
        if self.expected.is_away:
            return name in WITHOUT_WEIGHTS
        if self.expected.is_offloaded:
            return name not in NEED_GRADIENTS
        return not (self.expected.must_zero and name in NEED_GRADIENTS - DROP_GRADIENTS)

    def micro(self, seed: int, last: bool) -> None:
        """Run one micro-batch forward and backward; the last one lets gradients be reduced."""
        expected = self.expected
        if not self._may_accumulate():
            return
        with self._may_raise(self._must_refuse_gradients(), spoils_gradients=True):
            if last:
                self._forward_backward(seed)
            else:
                with self.ddp.no_sync():
                    self._forward_backward(seed)
        if expected.must_zero:
            return
        for rank in range(self.size):
            inputs = tokens_of(seed, rank)
            run_layers(expected.layers, inputs).float().sum().backward()
            for total, layer in zip(expected.gradients, expected.layers, strict=True):
                total[rank] += layer.weight.grad
                layer.weight.grad = None
        expected.content = Gradients.PARTIAL
        if last:
            self._finish()

    def _may_accumulate(self) -> bool:
        """Return whether dense gradients are where a loop may add to them."""
        expected = self.expected
        gathers = self.shares_memory and not expected.is_fresh and self._can_read()
        return not (expected.dense_is_spent and (gathers or expected.content is Gradients.ZERO))

    def _must_refuse_gradients(self) -> bool:
        """Return whether a forward pass reads stale weights, or gradients come too late."""
        expected = self.expected
        gathers = self.shares_memory and not expected.is_fresh and self._can_read()
        too_late = not gathers and (
            expected.content not in (Gradients.ZERO, Gradients.PARTIAL) or expected.is_mixed
        )
        return too_late or not self._can_read()

    def failing_backward(self, seed: int, at: int) -> None:
        """Run a micro-batch whose backward pass ends in an exception, and go on."""
        if not self._may_accumulate():
            return
        refused = self._must_refuse_gradients()
        self.tripping = at
        try:
            self._forward_backward(seed)
        except StateError:
            assert refused, "an order of calls that is allowed was refused"
        except Tripped:
            assert not refused, "an order of calls that mixes things up was accepted"
        else:
            raise AssertionError("no hook has run")
        self.tripping = None
        self.expected.must_zero = True

    def write_by_hand(self, seed: int) -> None:
        """Add to gradients without a backward pass, as loops with gradients of their own do."""
        expected = self.expected
        in_use = self.shares_memory and expected.is_in_flight
        held = expected.content in (Gradients.ZERO, Gradients.PARTIAL)
        if in_use or not held or expected.dense_is_spent or expected.is_mixed:
            return
        for rank in range(self.size):
            values = tokens_of(seed, rank).float().mean()
            for param, total in zip(self.params, expected.gradients, strict=True):
                if rank == self.rank:
                    param.main_grad.add_(values)
                total[rank] += values
        expected.by_hand |= expected.content is Gradients.ZERO
        expected.content = Gradients.PARTIAL

    def copy(self, seed: int) -> None:
        """Copy the model in the middle of everything: the copy is a plain module."""
        layers, expected = copy.deepcopy(self.layers), copy.deepcopy(self.expected.layers)
        assert not any(hasattr(param, "main_grad") for param in layers.parameters())
        inputs = tokens_of(seed, self.rank)
        with self._may_raise(not self.expected.is_fresh) as outcome:
            output = run_layers(layers, inputs)
        if outcome.raised:
            return
        wanted = run_layers(expected, inputs)
        assert torch.equal(output, wanted), "a copy multiplies other weights"
        output.float().sum().backward()
        wanted.float().sum().backward()
        for ours, theirs in zip(layers, expected, strict=True):
            assert torch.equal(ours.weight.grad, theirs.weight.grad), "a gradient of a copy"

    def _forward_backward(self, seed: int) -> None:
        output = self._forward(seed)
        output.float().sum().backward()

    def _finish(self) -> None:
        self.ddp.finish_grad_sync()
        expected = self.expected
        for total in expected.gradients:
            shared = sum(gradient / self.size for gradient in total)
            total[:] = [shared.clone() for _ in total]
        expected.content, expected.by_hand = Gradients.REDUCED, False

    def step(self) -> None:
        """Step; gradients that were never reduced must raise."""
        if self._steps_on_spent_gradients():
            return
        with self._may_raise(not self._can_step()) as outcome:
            self.optimizer.step()
        if not outcome.raised:
            self._step_expected(self.params)
            self._write_expected_weights()
            self._spent()

    def _steps_on_spent_gradients(self) -> bool:
        """Return whether a step would take dense gradients twice, in Megatron as here."""
        expected = self.expected
        return expected.dense_is_spent and expected.content is Gradients.ZERO

    def _can_step(self) -> bool:
        """Return whether gradients were reduced; those of one rank need not be."""
        alone = self.size == 1 and not self.overlap
        unreduced = self.expected.content is Gradients.PARTIAL and not alone
        usable = self.expected.content in (Gradients.ZERO, Gradients.REDUCED, Gradients.PARTIAL)
        return usable and not unreduced and not self.expected.is_mixed

    def _step_expected(self, params: list[Any], counted: tuple[int, ...] = ()) -> None:
        expected = self.expected
        for param, master, total in zip(
            self.params, expected.masters, expected.gradients, strict=True
        ):
            steps = any(param is one for one in params)
            master.grad = total[0].view_as(master) if steps else None
        expected.adam.step(*([counted] if counted else []))

    def failing_step(self, part: int, moved: bool) -> None:
        """Step with something that raises before or after the masters of a part move.

        What raises is a hook of torch's, or the kernels of a bucket of a fused step, whose dense
        masters come later; those of Muon are stepped together.
        """
        part = len(self.parts) - 1 if part else 0
        if self._steps_on_spent_gradients() or not self._can_step():
            return
        parts = self.parts
        fails = self._failing_kernels if self.is_fused else self._failing_hook
        with fails(part, moved):
            try:
                self.optimizer.step()
            except Tripped:
                pass
            else:
                raise AssertionError("nothing has tripped")
        done = [param for one in parts[:part] for param in self._params_of(one)]
        of_part = self._params_of(parts[part])
        if self.is_fused and not self.has_muon:
            mine = (n for n, p in enumerate(self.params) if any(p is q for q in of_part))
            counted = tuple(mine) if moved else ()
            of_part = [param for param in of_part if isinstance(param, GroupedWeight)]
        else:
            counted = ()
        self._step_expected([*done, *(of_part if moved else [])], counted)
        if self.is_fused and self.has_muon and not moved:
            self._accumulate_expected(of_part)
        # A step lets a gather finish before anything can fail
        was_stale = set() if self.expected.is_in_flight else self.expected.stale
        self._spent()
        self.expected.content, self.expected.must_zero = Gradients.SPENT, True
        failed = 2 if part else 0  # the quantized layer of the part
        stepped = {failed} | ({0} if self.overlap else set())
        # Dense weights follow with the next whole step, as Megatron's do
        written = [*done, *(of_part if moved and self.has_muon and self.is_fused else [])]
        self._write_expected_weights(
            lambda param: any(param is one for one in written), quantized={0, failed}
        )
        self.expected.stale = stepped | (was_stale if self.overlap else was_stale - {0})

    def _accumulate_expected(self, params: list[Any]) -> None:
        expected = self.expected
        for param, master, total in zip(
            self.params, expected.masters, expected.gradients, strict=True
        ):
            if any(param is one for one in params):
                expected.adam.accumulate(master, total[0].view_as(master))

    @contextmanager
    def _failing_hook(self, part: int, moved: bool) -> Iterator[None]:
        inner = self.optimizer.chained_optimizers[part].optimizer
        register = inner.register_step_post_hook if moved else inner.register_step_pre_hook
        hook = register(_raise_tripped)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def _failing_kernels(self, part: int, moved: bool) -> Iterator[None]:
        if self.has_muon:
            with self._failing_table(self.parts[part], moved):
                yield
            return
        launch, tables = StepTable.launch, []

        def failing(table: Any) -> None:
            tables.append(table)
            if len(tables) != 1 + 2 * part:  # of a part, the table of its bucket comes first
                launch(table)
                return
            if moved:
                _step_masters(table)
            raise Tripped

        StepTable.launch = failing
        try:
            yield
        finally:
            StepTable.launch = launch

    @contextmanager
    def _failing_table(self, part: Any, moved: bool) -> Iterator[None]:
        """Let the step of Muon's matrices of a part raise after all, or after their momentum."""
        launch = MuonTable.launch

        def failing(table: Any) -> None:
            if table not in part._tables.values():
                launch(table)
                return
            if moved:
                launch(table)
            else:
                table.momentum.launch()
            raise Tripped

        MuonTable.launch = failing
        try:
            yield
        finally:
            MuonTable.launch = launch

    def _params_of(self, part: Any) -> list[Any]:
        return [param for buffer in part.buffers for param in buffer.params]

    def nonfinite(self, of: int) -> None:
        """Step on a gradient that is NaN: no norm may miss it, and nothing moves."""
        if self.expected.content is not Gradients.REDUCED:
            return
        self.params[of].main_grad.fill_(torch.nan)
        try:
            self.optimizer.step()
        except NonFiniteError:
            self.expected.must_zero = True
        else:
            raise AssertionError("a step on NaN")

    def failing_gather(self, at: str) -> None:
        """Gather the weights of one layer with a part of it failing; the next gather is whole."""
        expected = self.expected
        group = self._managed_groups()[-1]
        gather = group.managed[0].gather
        refused = not self._can_gather()
        trips = 2 in expected.stale and (not expected.is_in_flight or at == "finish")
        setattr(gather, at, _raise_tripped)
        try:
            self.ddp.start_param_sync(force_sync=True)
        except StateError:
            assert refused, "an order of calls that is allowed was refused"
            return
        except Tripped:
            assert trips and not refused
            expected.stale, expected.is_in_flight = {2}, False
            if self.shares_memory:
                expected.is_mixed, expected.content = True, Gradients.SPENT
        else:
            assert not trips and not refused
            self._gathered()
        finally:
            delattr(gather, at)

    def _spent(self) -> None:
        expected = self.expected
        expected.content, expected.dense_is_spent = Gradients.SPENT, True
        expected.is_fresh, expected.is_in_flight = not self.overlap, False
        if expected.is_fresh and self.shares_memory:
            expected.content = Gradients.ZERO

    def skip(self) -> None:
        """Skip a step for its gradient norm: nothing moves."""
        usable = (Gradients.ZERO, Gradients.REDUCED)
        if self.expected.content not in usable or self._steps_on_spent_gradients():
            return
        if self.expected.is_mixed:
            return
        for part in self.optimizer.chained_optimizers:
            part.config.grad_norm_skip_threshold = 1e-30
        stepped, *_ = self.optimizer.step()
        for part in self.optimizer.chained_optimizers:
            part.config.grad_norm_skip_threshold = float("inf")
        norm_is_zero = all(not total[0].any() for total in self.expected.gradients[:2])
        assert stepped == norm_is_zero
        if stepped:  # a norm of zero is not above any threshold
            self._step_expected(self.params)
            self._write_expected_weights()
            self._spent()

    def rollout(self, seed: int) -> None:
        """Run forward without gradients, hooks as they are."""
        with self._may_raise(not self._can_read()), torch.no_grad():
            output = self._forward(seed)
            expected = run_layers(self.expected.layers, tokens_of(seed, self.rank))
            assert torch.equal(output, expected), "a forward pass saw other weights"

    def evaluate(self, seed: int) -> None:
        """Evaluate as Megatron does: hooks off with a forced gather, forward, hooks on."""
        if not (self.overlap and self.expected.hooks):
            return
        with self._may_raise(not self._can_gather()) as outcome:
            self.ddp.disable_forward_pre_hook(param_sync=True)
        if outcome.raised:
            self.ddp.enable_forward_pre_hook()
            return
        self._gathered()
        self.expected.hooks = False
        self.rollout(seed)
        self.enable_hooks()

    def disable_hooks(self) -> None:
        """Take the forward pre-hooks off without a gather, as before the first iteration."""
        if self.overlap and self.expected.hooks:
            self.ddp.disable_forward_pre_hook(param_sync=False)
            self.expected.hooks = False

    def enable_hooks(self) -> None:
        """Put them on again."""
        if self.overlap and not self.expected.hooks:
            self.ddp.enable_forward_pre_hook()
            self.expected.hooks = True

    def force_sync(self) -> None:
        """Gather as before a save, a hash check and at the exit."""
        self.optimizer.prepare_model_params_for_param_sync()
        with self._may_raise(not self._can_gather()) as outcome:
            self.ddp.start_param_sync(force_sync=True)
        if not outcome.raised:
            self._gathered()

    def dispatch(self) -> None:
        """Start a gather that nobody may wait for."""
        with self._may_raise(not self._can_gather()) as outcome:
            self.ddp.start_param_sync()
        if outcome.raised or self.expected.is_fresh or self.expected.is_in_flight:
            return
        stale = self.expected.stale
        self._gathered()
        if self.overlap:
            self.expected.stale, self.expected.is_in_flight = stale, True

    def free(self) -> None:
        """Free overlap buffers, as custom savers do."""
        self.ddp.free_overlap_buffers()
        self._landed()

    def paged_stash_fallback(self) -> None:
        """What Megatron does when a stash overflows: drop gradients, stage weights, start over."""
        self.zero()
        for part in self.optimizer.chained_optimizers:
            part._copy_main_params_to_param_buffer()

    def offload(self) -> None:
        """Give gradient memory away; what was in it is lost."""
        if self.expected.is_offloaded:
            return
        self._wait_for_threads()
        self.ddp.offload_grad_buffers()
        if self.shares_memory:
            self._landed()
        self.expected.is_offloaded = True

    def reload(self) -> None:
        """Take it again, full of zeros."""
        if self.expected.is_offloaded:
            self.ddp.restore_grad_buffers()
            self.expected.is_offloaded = False
            self._zero_expected(self.expected)
            self.expected.must_zero = True  # Megatron counts gradients from one zeroing to the next

    def make_room(self) -> None:
        """Have weights on the host for a while, and masters elsewhere; gradients stay."""
        making_room.offload_and_reload([self.ddp], self.optimizer, move_grads=False)
        self._landed()

    def send_away(self) -> None:
        """Have quantized weights on the host until they are brought back."""
        for buffer in making_room.managed_buffers([self.ddp]):
            buffer.offload_to_cpu(move_grads=False)
        self._landed()
        self.expected.is_away = True

    def bring_back(self) -> None:
        """Have quantized weights on the device again."""
        if self.expected.is_with_verl:
            making_room.bring_back_as_verl([self.ddp])
            self._zero_expected(self.expected)
            self.expected.is_away = self.expected.is_offloaded = self.expected.is_with_verl = False
            self.expected.must_zero = True
        elif self.expected.is_away:
            for buffer in making_room.managed_buffers([self.ddp]):
                buffer.reload_from_cpu(move_grads=False)
            self.expected.is_away = False

    def send_all_away(self) -> None:
        """Have all weights on the host, and no gradients, by what verl calls for it."""
        self._wait_for_threads()
        making_room.send_away_as_verl([self.ddp])
        self._landed()
        self.expected.is_away = self.expected.is_offloaded = self.expected.is_with_verl = True

    def _wait_for_threads(self) -> None:
        """Wait for what is in flight of unmanaged groups, before their memory is freed.

        Threads of gloo would write into it; on a GPU its stream keeps the order.
        """
        for group in (*self.ddp.bucket_groups, *self.ddp.expert_parallel_bucket_groups):
            for handle in (group.param_gather_handle, group.grad_reduce_handle):
                if not group.managed and handle is not None:
                    handle.wait()

    def rest(self) -> None:
        """Have masters and moments on the host and back, by Megatron's calls."""
        self.optimizer.offload_to_cpu()
        self.optimizer.restore_from_cpu()
        self._landed()

    def export(self) -> None:
        """Hand all weights to an engine: it gets those of the masters, or nothing."""
        from moe_optim import export_weights

        away = self.expected.is_away
        with self._may_raise(away or not self._can_gather()) as outcome:
            given = dict(export_weights([self.ddp], layout="sequential"))
        if outcome.raised:
            return
        self._gathered()
        wanted = {"dense.weight": self.expected.layers[1].weight.detach()}
        for name, number in zip(("first", "last"), QUANTIZED, strict=True):
            weight: Any = self.expected.layers[number].weight
            for expert, tensors in enumerate(
                serving.experts_of(weight.quantized_storage.quantized)
            ):
                stem = f"{name}.local_experts.{expert}.linear_fc2."
                wanted |= {stem + suffix: tensor for suffix, tensor in tensors.items()}
        assert_same_tensors(given, wanted, what="exported")

    @torch.no_grad()
    def rewrite_masters(self, seed: int) -> None:
        """Give masters other values by hand; weights follow that have still to be gathered."""
        expected = self.expected
        generator = torch.Generator().manual_seed(seed)
        factors = [0.25 + torch.rand(one.shape, generator=generator) for one in expected.masters]
        for part in self.optimizer.chained_optimizers:
            for number, owned, master in self._masters_of(part):
                master.mul_(factors[number].flatten()[owned])
        for master, factor in zip(expected.masters, factors, strict=True):
            master.mul_(factor)
        if not expected.is_in_flight:  # what travels has been read already
            self._write_expected_weights(lambda _: False, quantized=expected.stale)

    def exchange(self, what: str) -> None:
        """Give masters or moments other memory with the same values, and ruin what they leave."""
        for part in self.optimizer.chained_optimizers:
            inner = part.optimizer
            if what == "masters":
                for _, _, master in self._masters_of(part):
                    left, master.data = master.data, master.data.clone()
                    left.fill_(torch.nan)
                continue
            before = [dict(state) for state in inner.state.values()]
            names = {*getattr(inner, "state_names", MOMENTS)}
            if what == "adam":
                inner.load_state_dict(_copy(inner.state_dict()))
            elif what == "states":
                for master, state in inner.state.items():
                    inner.state[master] = _copy(state)
            else:
                for state in inner.state.values():
                    for name in {what} & names or names:
                        state[name] = state[name].clone()
            kept = {id(value) for state in inner.state.values() for value in state.values()}
            for left in (state[name] for state in before for name in names):
                if id(left) not in kept:
                    left.fill_(torch.nan)

    def _masters_of(self, part: Any) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield which parameter, which of its elements, and the masters of these."""
        for params, masters in zip(
            part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True
        ):
            for param, master in zip(params, masters, strict=True):
                owned = part._get_model_param_range_map(param)["param"]
                number = next(n for n, one in enumerate(self.params) if one is param)
                yield number, slice(owned.start, owned.end), master

    def save(self) -> None:
        """Keep masters, moments and the step; before the first whole step some have none."""
        if len(self.expected.adam.state) < len(self.expected.masters):
            return
        states = []
        for part in self.optimizer.chained_optimizers:
            state = part.state_dict()
            state["param_state_sharding_type"] = "dp_zero_gather_scatter"
            state["param_state"] = part.get_parameter_state_dp_zero(use_gloo_comm=True)
            states.append(state)
        masters = [master.detach().clone() for master in self.expected.masters]
        self.saved = (states, masters, _copy(self.expected.adam.state_dict()))

    def load(self) -> None:
        """Go back to what was saved; weights must follow the masters."""
        if self.saved is None or not self._can_gather(also_fresh=True):
            return
        states, masters, adam = self.saved
        for part, state in zip(self.optimizer.chained_optimizers, states, strict=True):
            part.load_state_dict(_copy(state))
        with torch.no_grad():
            for param, master, value in zip(
                self.params, self.expected.masters, masters, strict=True
            ):
                master.copy_(value)
                if not isinstance(param, GroupedWeight):
                    param.data.copy_(value)  # a model checkpoint brings these
        self.expected.adam.load_state_dict(_copy(adam))
        self._write_expected_weights()
        self._gathered(again=True)

    def agree(self, is_right: bool) -> bool:
        """Return whether all is right on every rank. Every rank must call it."""
        if self.size == 1:
            return is_right
        found = torch.tensor(is_right, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)

    # --- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare everything that the model knows with the real thing."""
        expected = self.expected
        for param, total, layer in zip(
            self.params, expected.gradients, expected.layers, strict=True
        ):
            managed = isinstance(param, GroupedWeight)
            known = expected.content in (Gradients.PARTIAL, Gradients.REDUCED, Gradients.ZERO)
            if known and not expected.is_offloaded and not expected.must_zero:
                self._check_gradient(param, total, managed)
            readable = expected.is_fresh and not expected.is_in_flight and not expected.is_away
            if managed and readable:
                real = param.quantized_storage.quantized.buffers()
                for name, buffer in layer.weight.quantized_storage.quantized.buffers().items():
                    assert torch.equal(real[name], buffer), f"{name} of a weight"
        for part in self.optimizer.chained_optimizers:
            for number, owned, master in self._masters_of(part):
                wanted = expected.masters[number].flatten()[owned]
                assert_bytes_equal(master, wanted, what=f"master of layer {number}")
        for group in self._managed_groups():
            if not expected.is_offloaded and not expected.must_zero:
                contents = {bucket.state.gradients for bucket in group.managed}
                travels = any(self.params[n] in group.params for n in expected.stale)
                in_flight = expected.is_in_flight and self.shares_memory and travels
                wanted = {Gradients.IN_FLIGHT if in_flight else expected.content}
                if expected.by_hand or expected.is_mixed:
                    wanted |= {Gradients.ZERO}
                assert contents <= wanted, f"{contents} instead of {wanted}"

    def _check_gradient(self, param: Any, total: list[Tensor], managed: bool) -> None:
        expected = self.expected
        if managed and expected.is_in_flight and self.shares_memory:
            return
        if expected.content is Gradients.REDUCED and self.size > 1:
            return  # only this rank's shard is reduced; the step shows whether it is right
        if not managed and expected.dense_is_spent:
            return
        if expected.content is Gradients.ZERO:
            assert not param.main_grad.any(), "a gradient that was not zeroed"
        else:
            wanted = total[self.rank].view_as(param.main_grad)
            assert torch.equal(param.main_grad, wanted), "a gradient"

    # --- the model ------------------------------------------------------------------------------

    def _can_gather(self, *, also_fresh: bool = False) -> bool:
        """Return whether weights can be made fresh now, where they are not."""
        expected = self.expected
        if not self.shares_memory or expected.is_in_flight:
            return True
        if expected.is_fresh and not also_fresh:
            return True
        return not expected.is_offloaded and expected.content in (Gradients.ZERO, Gradients.SPENT)

    def _can_read(self) -> bool:
        """Return whether a forward pass gets fresh weights."""
        expected = self.expected
        if expected.is_away:
            return False
        if expected.is_fresh:
            return True
        return self.overlap and expected.hooks and self._can_gather()

    def _forward(self, seed: int) -> Tensor:
        output = self.ddp(tokens_of(seed, self.rank))
        if self.overlap and self.expected.hooks:
            self._gathered()
        return output

    def _gathered(self, *, again: bool = False) -> None:
        """Note that weights are fresh; a gather through shared memory leaves zeros there."""
        expected = self.expected
        if self.shares_memory and (again or not expected.is_fresh):
            expected.content, expected.is_mixed = Gradients.ZERO, False
        expected.is_fresh, expected.is_in_flight = True, False

    def _landed(self) -> None:
        if self.expected.is_in_flight:
            self._gathered()

    def _zero_expected(self, expected: Expected) -> None:
        expected.gradients = [
            [torch.zeros(master.shape) for _ in range(self.size)] for master in expected.masters
        ]
        expected.content, expected.must_zero, expected.dense_is_spent = Gradients.ZERO, False, False
        expected.by_hand = expected.is_mixed = False

    @torch.no_grad()
    def _write_expected_weights(
        self,
        writes_dense: Callable[[Any], bool] = lambda _: True,
        quantized: Iterable[int] = QUANTIZED,
    ) -> None:
        for number, (param, layer, master) in enumerate(
            zip(self.params, self.expected.layers, self.expected.masters, strict=True)
        ):
            if isinstance(layer.weight, GroupedWeight):
                if number not in quantized:
                    continue
                storage = layer.weight.quantized_storage
                reference.quantize_into(master.detach(), storage.format, storage.quantized)
                storage.note_write()
            elif writes_dense(param):
                layer.weight.copy_(master)

    def _managed_groups(self) -> list[Any]:
        groups = (*self.ddp.bucket_groups, *self.ddp.expert_parallel_bucket_groups)
        return [group for group in groups if group.managed]

    @contextmanager
    def _may_raise(self, must: bool, *, spoils_gradients: bool = False) -> "Iterator[_Outcome]":
        """Expect a StateError if ``must``, and none otherwise."""
        outcome = _Outcome()
        try:
            yield outcome
        except StateError:
            assert must, "an order of calls that is allowed was refused"
            outcome.raised = True
            self.expected.must_zero |= spoils_gradients
        else:
            assert not must, "an order of calls that mixes things up was accepted"


def _step_masters(table: StepTable) -> None:
    """Make the part of a launch that writes masters, and leave the encoding behind it."""
    with nullcontext() if table.stage is None else table.stage.opened():
        table.update.launch()
        for chunk in table.chunks:
            assert table.stage is not None
            table.stage.run(chunk.copies, chunk.slot, chunk.update.launch)


def _raise_tripped(*_: Any, **__: Any) -> None:
    raise Tripped


@dataclass
class _Outcome:
    raised: bool = False


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def make_model(config: Any, layers: torch.nn.ModuleList) -> Any:
    """Return ``layers`` as a Megatron module."""
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config=config)
            first, self.dense, last = layers
            self.first, self.last = Experts(first), Experts(last)

        def forward(self, tokens: Tensor) -> Tensor:
            return run_layers(layers, tokens)

    return Model()


class Experts(torch.nn.Module):
    """What an export sees of Megatron's experts: a linear under its name, and process groups."""

    def __init__(self, linear: GroupedLinear) -> None:
        super().__init__()
        alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        self.linear_fc2 = linear
        self.pg_collection = SimpleNamespace(ep=alone, expt_tp=alone)


def _install(config: MoEOptimConfig, optimizer: installation.Optimizer) -> None:
    """Install; what is installed stays, since finding Megatron's names takes as long as a step."""
    held = installation.installed_config(), installation.installed_optimizer()
    if held != (config, optimizer):
        installation.uninstall()
        installation.install(config, optimizer=optimizer)


def initialize(**sizes: int) -> None:
    """Set up gloo and Megatron's groups on the CPU, once a process; ``sizes`` are Megatron's."""
    import os

    from megatron.core import parallel_state

    from moe_optim.integration import cpu_runtime

    cpu_runtime.install()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    dist.init_process_group(
        "gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    parallel_state.initialize_model_parallel(**sizes)


on_a_rank = sharing_a_rank(initialize)
"""Marks tests without arguments: those of a file run on one rank, which is initialized."""


def replay(cycle: LifeCycle, trace: list[tuple[str, dict[str, Any]]]) -> int:
    """Call the methods of a trace in order, and compare everything after each."""
    for name, arguments in trace:
        method: Callable[..., None] = getattr(cycle, name)
        method(**arguments)
        cycle.check()
    return len(trace)
