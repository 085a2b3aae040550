"""Linears of experts behind adapters: as saved, loaded and calibrated without them, or refused.

The oracle is the same experts without adapters. Wrappers are those of
``tests/support/modules/adapters``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optim.errors import ConfigError, LayoutError
from moe_optim.experts.keys.conversion import convert_state_dict
from tests.support.bytes import assert_bytes_equal, assert_same_tensors
from tests.support.modules import experts
from tests.support.modules.adapters import AdapterWrapper, Hiding, PlainWrapper, wrap
from tests.support.modules.amax import load_module, save_module, saved_amaxes
from tests.support.modules.calibrating import (
    EXPERTS,
    HIDDEN,
    LINEARS,
    Kind,
    amaxes_of,
    make,
    values_of,
)
from tests.support.ranks import on_ranks, run_ranks

PREFIX = "layer."
PORTABLE = [
    Kind(owner="portable", format=format, single=single)
    for format, single in (("bf16", True), ("mxfp8", False))
]
TE = [Kind(owner="Transformer Engine", format="bf16", single=single) for single in (False, True)]
ADAPTERS = ["linear_in.weight", "linear_out.weight"]
HIDDEN_LINEAR = "linear_fc1: expected a linear of experts, or an adapter around one"


def of_experts(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if ".adapter." not in key}


def assert_holds(got: Any, want: Any, what: str) -> None:
    """Compare weights and calibrated amaxes of two modules of experts."""
    assert_same_tensors(values_of(got), values_of(want), what=what)
    assert set(values_of(got)) == set(LINEARS), what
    for name, amax in amaxes_of(want).items():
        assert_bytes_equal(amaxes_of(got)[name], amax, what=f"{what} {name}")


def _save_and_load(folder: Path, ep: int) -> int:
    """Experts with and without adapters save the same, and load from each other."""
    import moe_optim

    parallel = {"expert_model_parallel_size": ep} if ep > 1 else {}
    experts.start_ranks(**parallel)
    if ep > 1:
        shared = wrap(make(PORTABLE[0], ep), plain=True)
        with pytest.raises(LayoutError, match="linear_fc1: expected an adapter that has a sharded"):
            shared.sharded_state_dict(prefix=PREFIX)
    count = 0
    for kind in [*PORTABLE, *TE]:
        for wrapper in (AdapterWrapper, PlainWrapper):
            if wrapper is PlainWrapper and kind.owner != "portable":
                continue  # Megatron asks such a wrapper for states of the linear alone
            what = f"{kind}, {wrapper.__name__}"
            bare, adapted = make(kind, ep), wrap(make(kind, ep), wrapper)
            for module in (bare, adapted):
                moe_optim.calibrate([module])
            assert_holds(adapted, bare, what)
            states = [module.sharded_state_dict(prefix=PREFIX) for module in (bare, adapted)]
            keys = [{name: entry.key for name, entry in state.items()} for state in states]
            assert of_experts(keys[1]) == keys[0], what
            assert keys[1].keys() - keys[0].keys() == {
                f"{PREFIX}{name}.adapter.{one}" for name in LINEARS for one in ADAPTERS
            }, what
            added = [key for name, key in keys[1].items() if ".adapter." in name]
            assert all(key.startswith(f"{PREFIX}experts.linear_fc") for key in added), what
            saved = {}
            for name, module in (("bare", bare), ("adapted", adapted)):
                saved[name] = folder / f"{kind} {wrapper.__name__} {name}"
                save_module(module, saved[name], PREFIX)
            assert saved_amaxes(saved["adapted"], ".calibrated_amax").keys() == {
                f"{PREFIX}experts.{name}.calibrated_amax" for name in LINEARS
            }, what
            for name, source in (("bare", bare), ("adapted", adapted)):
                for is_wrapped in (False, True):
                    other = make(kind, ep, seed=1)
                    other = wrap(other, wrapper) if is_wrapped else other
                    if is_wrapped and (name == "bare" or kind.owner != "portable"):
                        continue
                    load_module(other, saved[name], PREFIX, strict=False)
                    assert_holds(other, source, f"{what}, {name}, {is_wrapped}")
                    if is_wrapped:
                        for linear in LINEARS:
                            got, want = (
                                one.get_submodule(linear).adapter.state_dict()
                                for one in (other, source)
                            )
                            assert_same_tensors(got, want, what=f"{what} {linear}")
                    count += 1
    return count


@pytest.mark.parametrize("ep", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_experts_behind_adapters_are_saved_loaded_and_calibrated_as_those_without(tmp_path, ep):
    """By their own keys, with the adapters' beside them; a checkpoint of either loads. Adapters of
    several ranks have to say how they are shared, or one of them would be saved for all."""
    counts = run_ranks(ep, _save_and_load, tmp_path, ep)
    assert counts == ep * [len(PORTABLE) * 2 * 3 + len(TE) * 2]


def _load_amaxes_behind_adapters(folder: Path) -> None:
    """What Megatron-Bridge asks for where linears of Transformer Engine are wrapped already."""
    from megatron.core import dist_checkpointing

    import moe_optim

    for kind in TE:
        bare, adapted = make(kind), wrap(make(kind, seed=1))
        moe_optim.calibrate([bare])
        save_module(bare, folder / str(kind), PREFIX)
        requested = of_experts(adapted.sharded_state_dict(prefix=PREFIX))
        state = dist_checkpointing.load(requested, str(folder / str(kind)))
        came = {key.removeprefix(PREFIX): v for key, v in state.items() if "calibrated" in key}
        assert len(came) == len(LINEARS), str(kind)
        adapted.load_state_dict(came, strict=False)
        for name, amax in amaxes_of(bare).items():
            assert_bytes_equal(amaxes_of(adapted)[name], amax, what=f"{kind} {name}")


def _load_plain_states() -> None:
    """State dicts in memory, named with ``to_wrap`` or without, in any layout of experts."""
    import moe_optim

    for kind in PORTABLE:
        for wrapper in (AdapterWrapper, PlainWrapper):
            source = wrap(make(kind), wrapper)
            moe_optim.calibrate([source])
            plain = dict(source.state_dict())
            has_names_of_wrappers = any(".to_wrap." in key for key in plain)
            assert has_names_of_wrappers is (wrapper is PlainWrapper)
            bare = make(kind)
            values = {k: v.dequantize() if kind.format != "bf16" else v
                      for k, v in bare.state_dict().items()}  # fmt: skip
            amaxes = {f"{n}.calibrated_amax": a for n, a in amaxes_of(source).items()}
            adapters = {key: value for key, value in plain.items() if ".adapter." in key}
            sequential = convert_state_dict(values, "sequential") | amaxes | adapters
            for state in (plain, sequential):
                for target in (AdapterWrapper, PlainWrapper):
                    other = wrap(make(kind, seed=1), target)
                    before = list(state)
                    other.load_state_dict(state, strict=True)
                    assert_holds(other, source, f"{kind}, {wrapper.__name__} {target.__name__}")
                    assert list(state) == before


def _train() -> None:
    """Outputs are the base's and the adapter's, and gradients reach the adapter alone."""
    for kind in PORTABLE:
        bare, adapted = make(kind), wrap(make(kind))
        for name in LINEARS:
            torch.nn.init.zeros_(adapted.get_submodule(name).adapter.linear_out.weight)
        tokens = torch.randn(8, HIDDEN).bfloat16()
        counts, probs = torch.tensor([3, 0, 4, 1]), torch.rand(8)
        want, _ = bare(tokens, counts, probs)
        got, _ = adapted(tokens, counts, probs)
        assert_bytes_equal(got.detach(), want.detach(), what=str(kind))
        got.float().sum().backward()
        for name in LINEARS:
            weight = adapted.get_submodule(name).adapter.linear_out.weight
            assert bool(weight.grad.count_nonzero()), str(kind)
        adapted.backward_dw()


def _refuse() -> None:
    """A weight that a save would leave out, amaxes under keys that nobody asks for again, and an
    engine's weights without the part that adapters have."""
    import moe_optim
    from moe_optim.rollout.experts import local_experts

    portable, native = PORTABLE[0], TE[0]
    hidden = wrap(make(portable), Hiding)
    state = make(portable).state_dict()
    calibrated = make(native)
    moe_optim.calibrate([calibrated])
    calibrated = wrap(calibrated, Hiding)
    wrapped, native = wrap(make(portable)), wrap(make(native))
    for call in (
        lambda: hidden.sharded_state_dict(prefix=PREFIX),
        lambda: moe_optim.calibrate([hidden]),
        lambda: hidden.load_state_dict(state),
        lambda: moe_optim.synchronize_amax([hidden]),
        lambda: list(local_experts(hidden)),
        lambda: calibrated.sharded_state_dict(prefix=PREFIX),
    ):
        with pytest.raises(LayoutError, match=f"{HIDDEN_LINEAR}.*got Hiding"):
            call()
    for module in (wrapped, native):
        with pytest.raises(ConfigError, match="linear_fc1: expected experts without adapters"):
            list(local_experts(module))
    uncalibrated = wrap(make(TE[0]), Hiding)
    assert not [key for key in uncalibrated.sharded_state_dict(prefix=PREFIX) if "None" in key]


@on_ranks(1)
def test_experts_behind_adapters_load_and_train_and_what_hides_them_is_refused(tmp_path):
    """Amaxes reach linears of Transformer Engine, and states in memory load whatever names they
    have; what hides experts is refused by its name."""
    folder = tmp_path
    experts.start_ranks()
    _load_amaxes_behind_adapters(folder)
    _load_plain_states()
    _train()
    _refuse()


def test_conversions_keep_the_keys_of_adapters():
    """They are of no expert layout, stay where they are, and no expert is another for them."""
    state = make_state()
    adapters = {
        f"decoder.layers.0.mlp.experts.{name}.adapter.{one}": torch.ones(2, 2)
        for name in LINEARS
        for one in ADAPTERS
    }
    for layout in ("sequential", "indexed", "hf_per_expert"):
        converted = convert_state_dict(state | adapters, layout)
        assert all(converted[key] is value for key, value in adapters.items())
        assert of_experts(converted).keys() == convert_state_dict(state, layout).keys()
        back = convert_state_dict(converted, "grouped")
        assert_same_tensors(back, state | adapters, what=layout)


def make_state() -> dict[str, torch.Tensor]:
    return {
        f"decoder.layers.0.mlp.experts.{name}.weight": torch.randn(EXPERTS, *shape)
        for name, shape in LINEARS.items()
    }
