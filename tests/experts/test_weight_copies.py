"""GEMMs of Transformer Engine's bf16 experts read a quantized copy: one per step, gradients pass.

Its linears stand in, see ``te_experts``; the oracle quantizes by hand at every call.
"""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from moe_optim.calibration import calibrate as calibration
from moe_optim.calibration.calibrate import set_calibrated_amax
from moe_optim.calibration.calibrated_amax import calibrated_amax
from moe_optim.calibration.fake_quantization import PER_EXPERT_GRIDS
from moe_optim.config import MoEOptimConfig
from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.operands import copies_in, copies_of
from moe_optim.experts.weight_copies import StepEnd, WeightCopies, copy_weights
from moe_optim.formats import FORMATS
from moe_optim.formats.reference.fake import fake_quantize
from tests.support.bytes import assert_bytes_equal
from tests.support.inputs import normal_weights
from tests.support.modules.experts import hook_as_ddp
from tests.support.ranks import run_ranks
from tests.support.te.te_experts import GroupedLinear

EXPERTS, ROWS, COLS, SPLITS = 3, 64, 128, [5, 0, 4]
COPIED = {name: format for name, format in FORMATS.items() if format.directions_agree}
COPIED |= PER_EXPERT_GRIDS
every_format = pytest.mark.parametrize("format", COPIED)
every_grid = pytest.mark.parametrize("grid", PER_EXPERT_GRIDS)
fused = pytest.mark.parametrize("fuses", [False, True], ids=["apart", "fused"])


class OneRank:
    """A process group of one."""

    def size(self):
        return 1

    def rank(self):
        return 0


class Experts(torch.nn.Module):
    """A layer of experts with one linear, and the same values every time."""

    def __init__(self, compute=None, cols=COLS, group=None, **options):
        super().__init__()
        self.linear = GroupedLinear(
            *(EXPERTS, cols, ROWS),
            config=SimpleNamespace(expert_model_parallel_size=1),
            init_method=torch.Tensor.zero_,
            pg_collection=SimpleNamespace(ep=OneRank(), expt_tp=group or OneRank()),
            cut_along=0,
            **options,
        )
        with torch.no_grad():
            for number, weight in enumerate(self.linear.parameters()):
                weight.copy_(normal_weights(*weight.shape, seed=number))
                if options.get("fuses"):  # as Megatron's DDP does
                    weight.main_grad = torch.zeros(weight.shape)
                    weight.grad_added_to_main_grad = False
        if compute is not None:
            copy_weights(self, MoEOptimConfig(format="bf16", compute=compute), "experts")

    def forward(self, tokens):
        return self.linear(tokens, SPLITS)[0]

    @property
    def copies(self):
        return copies_of(self.linear)


def tokens_of(seed, cols=COLS):
    return normal_weights(sum(SPLITS), cols, seed=100 + seed).bfloat16().requires_grad_()


def train(experts, seed):
    """Run a microbatch forward and backward; return its output and the gradient of its tokens."""
    tokens = tokens_of(seed)
    output = experts(tokens)
    output.backward(normal_weights(*output.shape, seed=seed).bfloat16())
    if experts.linear.delayed is not None:
        experts.linear.backward_dw()
    return output.detach(), tokens.grad


def main_grads_of(experts, microbatches=1):
    """Train; return outputs and gradients of tokens, and the fp32 sums of gradients of weights.

    Sums are added up as Megatron's DDP does: after each backward pass, except for those marked.
    """
    weights = list(experts.linear.parameters())
    sums = [getattr(weight, "main_grad", torch.zeros(weight.shape)) for weight in weights]
    seen = []
    for seed in range(microbatches):
        seen += train(experts, seed)
        for total, weight in zip(sums, weights, strict=True):
            if not getattr(weight, "grad_added_to_main_grad", False):
                total += weight.grad
            weight.grad = None
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = False
    return seen, sums


@pytest.fixture
def made(monkeypatch):
    """The copies that were made, by their format."""
    seen, make = [], WeightCopies._quantize

    def counting(self, *given):
        seen.append(self.format.name)
        return make(self, *given)

    monkeypatch.setattr(WeightCopies, "_quantize", counting)
    return seen


@fused
@pytest.mark.parametrize("delays", [False, True], ids=["at once", "delayed"])
@every_format
def test_outputs_and_gradients_are_those_of_weights_quantized_by_hand(format, fuses, delays):
    """Gradients of weights too: none passes through a clip, whichever way they are accumulated."""
    experts = Experts(format, fuses=fuses, delays=delays)
    experts.copies.begin_step()
    assert_same(main_grads_of(experts, 2), main_grads_of(Experts(by_hand=COPIED[format]), 2))


def assert_same(got, want):
    for kind, mine, theirs in zip(("activations", "sums of weights"), got, want, strict=True):
        for number, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_bytes_equal(*pair, what=f"{kind} {number}")


def calibrate(*layers, shared=False, factor=0.25):
    """Clip what is larger than a part of the largest magnitude, of an expert or of all."""
    for experts in layers:
        weights = torch.stack(list(experts.linear.parameters())).detach()
        amax = weights.abs().amax(None if shared else (1, 2)).float() * factor
        set_calibrated_amax(experts.linear, amax)


@fused
@pytest.mark.parametrize("delays", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("shared", [False, True], ids=["an amax each", "one amax"])
@every_grid
def test_calibrated_amaxes_clip_values_and_gradients(grid, shared, delays, fuses):
    """Clipped weights get none from any microbatch; nothing clips without calibration."""
    experts, oracle = Experts(grid, fuses=fuses, delays=delays), Experts(by_hand=COPIED[grid])
    calibrate(experts, oracle, shared=shared)
    experts.copies.begin_step()
    got = main_grads_of(experts, 3)
    assert_same(got, main_grads_of(oracle, 3))
    amaxes = calibrated_amax(experts.linear).view(-1).expand(EXPERTS)
    for weight, total, amax in zip(experts.linear.parameters(), got[1], amaxes, strict=True):
        is_clipped = weight.abs() > amax
        assert is_clipped.any() and not total[is_clipped].any()


@fused
@pytest.mark.parametrize("delays", [False, True], ids=["at once", "delayed"])
def test_hooks_that_start_reductions_find_clipped_gradients(delays, fuses):
    """Those of parameters, and those of Transformer Engine for delayed gradients."""
    experts, seen = Experts("int8_per_expert", fuses=fuses, delays=delays), []
    calibrate(experts)
    weights = list(experts.linear.parameters())
    for weight, amax in zip(weights, calibrated_amax(experts.linear).view(-1), strict=True):

        def look(*_, weight=weight, amax=amax):
            gradient = weight.main_grad if fuses else weight.grad
            clipped = weight.abs() > amax
            seen.append((bool(gradient[clipped].any()), bool(gradient[~clipped].any())))

        if delays:
            experts.linear.register_wgrad_accumulation_and_reduce_hooks(look)
        else:
            weight.register_post_accumulate_grad_hook(look)
    train(experts, 0)
    assert seen == [(False, tokens > 0) for tokens in SPLITS]


@fused
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
def test_a_step_makes_one_copy_for_all_of_its_microbatches(reentrant, fuses, made):
    """Recomputed or not, forward passes of the step read it; the next step makes another."""
    experts = Experts("mxfp4", fuses=fuses)
    end = StepEnd([*copies_in(experts)])
    for step in range(2):
        experts.copies.begin_step()
        for seed in range(3):
            tokens = tokens_of(seed)
            if reentrant is None:
                experts(tokens).sum().backward()
            else:
                checkpoint(experts, tokens, use_reentrant=reentrant).sum().backward()
        assert len(made) == step + 1
        end.before_step()
        with torch.no_grad():
            for weight in experts.linear.parameters():
                weight.data.mul_(1.5)  # where torch counts no write
    experts.copies.begin_step()
    got, oracle = experts(tokens_of(0)), Experts(by_hand=FORMATS["mxfp4"])
    oracle.load_state_dict(experts.state_dict())
    assert_bytes_equal(got.detach(), oracle(tokens_of(0)).detach())


def test_outside_of_a_step_every_forward_pass_makes_its_copy(made):
    """Before the first step, after the last, and in evaluation, even between two microbatches."""
    experts = Experts("int4")
    experts(tokens_of(0))
    experts(tokens_of(0))
    assert len(made) == 2
    experts.copies.begin_step()
    train(experts, 0)
    with torch.inference_mode():
        experts.eval()
        experts(tokens_of(0))
        experts(tokens_of(0))
    assert len(made) == 5
    experts.train()
    train(experts, 1)
    assert len(made) == 5
    StepEnd([*copies_in(experts)]).before_step()
    experts(tokens_of(0))
    experts(tokens_of(0))
    assert len(made) == 7


@pytest.mark.parametrize("way", ["load", "write", "move"])
def test_what_torch_sees_of_a_write_renews_the_copy(way, made):
    experts, other = Experts("int4"), Experts(by_hand=FORMATS["int4"])
    experts.copies.begin_step()
    experts(tokens_of(0))
    with torch.no_grad():
        for weight in other.linear.parameters():
            weight.neg_()
        if way == "load":
            experts.load_state_dict(other.state_dict())
        for mine, theirs in zip(experts.parameters(), other.parameters(), strict=True):
            if way == "write":
                mine.copy_(theirs)
            elif way == "move":
                mine.data = theirs.data.clone()
    assert_bytes_equal(experts(tokens_of(0)).detach(), other(tokens_of(0)).detach())
    assert len(made) == 2


@pytest.mark.parametrize("way", ["calibrate", "write", "load", "forget", "in inference"])
def test_other_amaxes_renew_the_copy(way, made):
    """Between two microbatches of a step; the same amaxes do not."""
    experts, oracle = Experts("int8_per_expert"), Experts(by_hand=COPIED["int8_per_expert"])
    calibrate(experts, oracle)
    state = copy.deepcopy(oracle.state_dict())
    experts.copies.begin_step()
    for _ in range(2):
        assert_bytes_equal(experts(tokens_of(0)).detach(), oracle(tokens_of(0)).detach())
    for layer in (experts, oracle):
        if way == "calibrate":
            calibrate(layer, factor=0.5)
        elif way == "write":
            layer.linear.calibrated_amax.mul_(2)
        elif way == "load":
            layer.load_state_dict(state | {"linear.calibrated_amax": torch.full((EXPERTS,), 0.1)})
        elif way == "forget":
            set_calibrated_amax(layer.linear, None)
        else:
            with torch.inference_mode():
                calibrate(layer, factor=0.5)
    assert_same(main_grads_of(experts), main_grads_of(oracle))
    assert len(made) == 2


def test_a_backward_pass_clips_as_its_forward_pass_did():
    """Amaxes found in between are those of the next one."""
    experts, oracle = Experts("int8_per_expert"), Experts(by_hand=COPIED["int8_per_expert"])
    calibrate(experts, oracle)
    outputs = [layer(tokens_of(0)) for layer in (experts, oracle)]
    calibrate(experts, factor=0.5)
    for output in outputs:
        output.sum().backward()
    for mine, theirs in zip(experts.parameters(), oracle.parameters(), strict=True):
        assert_bytes_equal(mine.grad, theirs.grad)


def _copy_parts(grid):
    """Return the copies of this rank's rows in an evaluation, around a recomputation, in a step."""
    dist.init_process_group("gloo")
    experts, seen = Experts(grid, group=dist.group.WORLD), []
    with torch.no_grad():
        for weight, whole in zip(experts.parameters(), whole_experts(), strict=True):
            weight.copy_(whole.chunk(2)[dist.get_rank()])
        experts.eval()
        seen.append(torch.stack(experts.copies()))
    experts.train()
    checkpoint(experts, tokens_of(0), use_reentrant=False).sum().backward()
    experts.copies.begin_step()
    return [*seen, *(torch.stack(experts.copies()).detach() for _ in range(2))]


def whole_experts():
    return normal_weights(EXPERTS, ROWS, COLS).bfloat16() * torch.arange(1, 4).view(-1, 1, 1)


def test_ranks_that_share_an_expert_take_its_whole_amax():
    whole = whole_experts()
    want = fake_quantize(whole, whole.abs().amax((1, 2), keepdim=True), 8)
    for parts in zip(*run_ranks(2, _copy_parts, "int8_per_expert"), strict=True):
        assert_bytes_equal(torch.cat(parts, dim=1), want)


def pickled(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("way", [lambda one: one, copy.deepcopy, pickled])
@pytest.mark.parametrize("cast", [torch.nn.Module.bfloat16, torch.nn.Module.double])
def test_casts_leave_amaxes_in_fp32(cast, way):
    """Of weights and of inputs, also in a copy of the linear."""
    experts, amaxes = Experts(), {"amax": torch.tensor([1.001, 2.002, 3.003])}
    amaxes["input_amax"] = torch.tensor([4.004])
    for name, amax in amaxes.items():
        getattr(calibration, f"set_calibrated_{name}")(experts.linear, amax)
    cast_one = cast(way(experts))
    for name, amax in amaxes.items():
        got = getattr(cast_one.linear, f"calibrated_{name}")
        assert_bytes_equal(got, amax.view(-1, 1, 1), what=name)


def test_calibrated_experts_are_freed_with_their_last_reference():
    """Without waiting for the garbage collector, which does not see memory of a GPU."""
    experts = Experts()
    set_calibrated_amax(experts.linear, torch.ones(EXPERTS))
    weight = weakref.ref(experts.linear.weight0)
    gc.disable()
    try:
        del experts
        assert weight() is None
    finally:
        gc.enable()


def test_copies_are_neither_parameters_nor_state():
    """They stay on the device with activations that leave it; other formats have none."""
    experts, plain = Experts("mxfp4"), Experts()
    assert plain.copies is Experts("bf16").copies is Experts("mxfp8").copies is None
    assert all(one._do_not_offload for one in experts.copies())
    experts.copies.begin_step()
    train(experts, 0)
    assert experts.state_dict().keys() == plain.state_dict().keys()
    assert [*dict(experts.named_parameters())] == [*dict(plain.named_parameters())]
    assert not list(experts.buffers())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_another_model_reads_its_own_weights(way):
    """A deep copy, or one that was pickled: without tensors, and with its own linear."""
    experts = Experts("mxfp4")
    experts.copies.begin_step()
    train(experts, 0)
    copies = (found := way(experts)).copies
    assert copies.linear is found.linear is not experts.linear
    assert copies._kept is None and not copies.is_in_step
    with torch.no_grad():
        for weight in copies.linear.parameters():
            weight.zero_()
    assert not copies.linear(tokens_of(0), SPLITS)[0].any()
    assert experts(tokens_of(0)).any()


@fused
@pytest.mark.parametrize("delays", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize(("format", "frozen"), [("mxfp4", 0), ("int8_per_expert", 2)])
def test_experts_beside_frozen_ones_get_their_gradients(format, frozen, delays, fuses):
    """Transformer Engine looks at the first expert alone; frozen ones get none, added or not."""
    experts, oracle = Experts(format, fuses=fuses, delays=delays), Experts(by_hand=COPIED[format])
    calibrate(experts, oracle)
    if fuses:
        del experts.linear.get_parameter(f"weight{frozen}").main_grad
    experts.linear.get_parameter(f"weight{frozen}").requires_grad_(requires_grad=False)
    train(experts, 0)
    train(oracle, 0)
    wgrads = [weight.grad for weight in oracle.linear.parameters()]
    for place, weight in enumerate(experts.linear.parameters()):
        got = getattr(weight, "main_grad", None) if fuses else weight.grad
        assert (got is None) == (place == frozen)
        if got is not None:
            assert_bytes_equal(got.bfloat16(), wgrads[place], what=f"expert {place}")


@pytest.mark.parametrize("passes", [1, 2], ids=["in one pass", "in a pass of its own"])
@pytest.mark.parametrize("format", ["mxfp4", "int8_per_expert"])
def test_gradients_of_other_uses_of_a_weight_count(format, passes):
    """As of a penalty in the loss, beside or behind fused accumulation, in each microbatch.

    Transformer Engine returns memory that nobody may add, and autograd adds to it.
    """
    experts, oracle = Experts(format, fuses=True), Experts(by_hand=COPIED[format])
    weights = list(experts.linear.parameters())
    nodes = [hook_as_ddp(weight) for weight in weights]
    experts.copies.begin_step()
    for count in (1, 2):
        output = experts(tokens_of(0)).sum()
        penalty = sum((weight * 8).sum() for weight in weights)
        for loss in [output + penalty] if passes == 1 else [output, penalty]:
            loss.backward()
        oracle.zero_grad()
        oracle(tokens_of(0)).sum().backward()
        for got, want in zip(weights, oracle.linear.parameters(), strict=True):
            torch.testing.assert_close(got.main_grad, count * (want.grad.float() + 8))
    assert len(nodes) == len(weights)


def test_weights_may_be_frozen_between_forward_and_backward():
    experts, tokens = Experts("mxfp4", fuses=True), tokens_of(0)
    output = experts(tokens)
    experts.requires_grad_(False)
    output.sum().backward()
    assert tokens.grad.any()
    assert all(weight.grad is None for weight in experts.linear.parameters())


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_gradients_go_where_main_grad_is_bound_by_then(recomputes):
    """As of the last forward pass, which recomputes or reads the copy of a step."""
    experts = Experts("mxfp4", fuses=True)
    experts.copies.begin_step()
    tokens = tokens_of(0)
    output = checkpoint(experts, tokens, use_reentrant=False) if recomputes else experts(tokens)
    before = [weight.main_grad for weight in experts.linear.parameters()]
    for weight in experts.linear.parameters():
        weight.main_grad = torch.zeros_like(weight.main_grad)
    if not recomputes:
        output = experts(tokens)
    output.sum().backward()
    assert not any(gradient.any() for gradient in before)
    assert all(weight.main_grad.any() for weight in list(experts.linear.parameters())[::2])


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(ConfigError, match="linear: expected one parameter per expert for compute"):
        Experts("mxfp4", single=True)
    with pytest.raises(LayoutError, match="linear.weight0: int4_g128 needs columns divisible"):
        Experts("int4_g128", cols=96)
    experts = Experts("int8_per_expert")
    set_calibrated_amax(experts.linear, torch.ones(EXPERTS))
    state = experts.state_dict() | {"linear.calibrated_amax": torch.ones(2)}
    with pytest.raises(LayoutError, match=r"^linear\.calibrated_amax: expected .* got \[2\]"):
        experts.load_state_dict(state)
