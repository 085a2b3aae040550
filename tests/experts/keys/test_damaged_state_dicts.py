"""No expert is lost in silence: a state dict with any one entry damaged is refused by its key."""

import random

import pytest
import torch

from moe_optim.errors import LayoutError
from moe_optim.experts.keys.conversion import convert_state_dict
from moe_optim.experts.keys.layouts import get_layout
from tests.support.modules.expert_states import ALL_LAYOUTS, make_experts, make_state

STATES = 400
CONTAINERS = ("decoder.layers.0.mlp.experts.", "teacher.layers.10.mlp.experts.")
OTHERS = ("decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.shared_experts.weight1")


def rename(state, old, new):
    """Rename a key in its place."""
    entries = [(new if key == old else key, value) for key, value in state.items()]
    state.clear()
    state.update(entries)


# Each damages ``state`` at ``key`` and returns the keys of which one must be named, or None where
# this entry cannot be damaged so.


def drop(rng, state, key):
    del state[key]
    return [key]


def misspell(rng, state, key):
    """Names that a careless pattern would take for the right one."""
    container, _, rest = key.partition(".experts.")
    near = [rest + "0", rest + ".0", rest + "_", "_" + rest, rest.upper(), rest + "\n", " " + rest]
    near += [rest.replace("weight", "weights"), rest.replace("fc1", "fc01"), rest.replace(".", "")]
    near += [rest.replace("weight", "weight0"), rest.replace("proj", "proj_blocks"), rest[:-1]]
    near += [rest.replace("experts.", "experts.+"), rest.replace("_", "-")]
    near += ["٣" + rest, "00." + rest]
    spelled = f"{container}.experts.{rng.choice(near)}"
    if spelled in state:
        return None
    rename(state, key, spelled)
    return [key, spelled]


def lead_with_zero_or_sign(rng, state, key):
    """Numbers that ``int`` would read as an index."""
    digits = [place for place, letter in enumerate(key) if letter.isdigit()]
    place = rng.choice([p for p in digits if p > key.index(".experts.")] or [len(key)])
    spelled = key[:place] + rng.choice(["0", "-", "+", "_", " ", "1_"]) + key[place:]
    rename(state, key, spelled)
    return [key, spelled]


def move(rng, state, key):
    """Into another layer, out of the experts, or beside them."""
    container, _, rest = key.partition(".experts.")
    prefix = rng.choice(["a.experts.", "", "experts.", "a.", f"{container}.shared_experts."])
    rename(state, key, prefix + rest)
    return [key, prefix + rest]


def add_in_another_layout(rng, state, key, *, experts):
    container = key.partition(".experts.")[0] + ".experts."
    own = {k for k in state if k.startswith(container)}
    other = make_state(experts, rng.choice(ALL_LAYOUTS), prefix=container)
    added = [k for k in other if k not in own]
    if not added or set(other) >= own:
        return None
    new = rng.choice(added)
    state[new] = other[new]
    return [new]


def add_an_index(rng, state, key):
    """One expert more, with this tensor only, next to the last one or far behind it."""
    container, _, rest = key.partition(".experts.")
    parts = rest.replace("weight", ".").replace("bias", ".").split(".")
    numbers = [part for part in parts if part.isdigit()]
    if not numbers or rest.startswith(("weight1", "weight2")):
        return None
    new = rng.choice([3, 4, 70, 123456789])
    added = f"{container}.experts.{str(new).join(rest.rsplit(numbers[-1], 1))}"
    if added in state:
        return None
    state[added] = state[key].clone()
    return [added]


def transpose(rng, state, key):
    tensor, down = state[key], state.get(key.replace("gate_up_proj", "down_proj"))
    if tensor.dim() < 2 or tensor.shape[-1] == tensor.shape[-2]:
        return None
    if key.endswith("gate_up_proj") and down.shape[-1] == down.shape[-2]:
        return None  # a whole set of the other fused layout: see the last test
    state[key] = tensor.transpose(-1, -2)
    return [key]


def misshape(rng, state, key):
    """A row or column fewer or more, one dimension more, or one alone."""
    tensor = state[key]
    dim = rng.randrange(tensor.dim())
    others = [
        tensor.narrow(dim, 0, tensor.shape[dim] - 1),
        torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim),
        tensor.unsqueeze(dim),
        *([tensor.flatten()] if tensor.dim() > 1 else []),
    ]
    state[key] = rng.choice(others)
    return [key]


def replace_by_no_tensor(rng, state, key):
    state[key] = rng.choice([None, 3, "text", b"", [state[key]], {"weight": state[key]}])
    return [key]


def change_dtype(rng, state, key):
    state[key] = state[key].to(rng.choice([torch.bfloat16, torch.float64, torch.uint8]))
    return [key]


DAMAGES = [
    drop,
    misspell,
    lead_with_zero_or_sign,
    move,
    add_in_another_layout,
    add_an_index,
    transpose,
    misshape,
    misshape,
    replace_by_no_tensor,
    change_dtype,
]


def make_whole(rng):
    """Two layers, each in some layout, between entries of other kinds."""
    count, ffn, hidden = rng.randint(1, 3), rng.choice([2, 3, 4]), rng.choice([3, 5])
    layouts = [rng.choice(ALL_LAYOUTS) for _ in CONTAINERS]
    target = rng.choice(ALL_LAYOUTS)
    bias = rng.random() < 0.5 and "legacy" not in (*layouts, target)
    experts = make_experts(count, ffn, hidden, bias=bias)
    state = {OTHERS[0]: torch.ones(2)}
    for container, layout in zip(CONTAINERS, layouts, strict=True):
        state |= make_state(experts, layout, prefix=container)
    state[OTHERS[1]] = torch.ones(3)
    arguments = {"to": get_layout(target)}
    if "legacy" in layouts:
        arguments["num_experts"] = count
    return state, experts, arguments


def damage_somewhere(rng, state, experts):
    """Apply one damage; return the keys of which one must be named."""
    while True:
        key = rng.choice([key for key in state if key not in OTHERS])
        damage = rng.choice(DAMAGES)
        extra = {"experts": experts} if damage is add_in_another_layout else {}
        named = damage(rng, state, key, **extra)
        if named is not None:
            return named


def test_damaged_state_dicts_are_refused_by_the_damaged_key():
    """Whatever is dropped, misspelt, moved, doubled, misshapen, no tensor or of another dtype:
    each of the damaged state dicts is refused, and is afterwards what it was before."""
    for seed in range(STATES):
        rng = random.Random(seed)
        state, experts, arguments = make_whole(rng)
        named = damage_somewhere(rng, state, experts)
        before = dict(state)
        with pytest.raises(LayoutError) as refusal:
            convert_state_dict(state, **arguments)
            pytest.fail(f"seed {seed}: accepted a state dict damaged at {named}")
        assert any(key in str(refusal.value) for key in named), f"seed {seed}: {named}"
        assert list(state) == list(before)
        assert all(state[key] is value for key, value in before.items())


def test_fused_experts_with_one_tensor_transposed_are_refused_by_the_layouts_name():
    """Where F is H they are a whole set of the other layout, down_proj being square; whoever
    names the layout hears of it."""
    state = make_state(make_experts(2, 3, 3), "hf", prefix="experts.")
    state["experts.gate_up_proj"] = state["experts.gate_up_proj"].transpose(1, 2)
    converted = convert_state_dict(state, get_layout("grouped"))
    assert set(converted) == {"experts.linear_fc1.weight", "experts.linear_fc2.weight"}
    with pytest.raises(LayoutError, match=r"experts.gate_up_proj: .*, got \[2, 3, 6\]"):
        convert_state_dict(state, get_layout("grouped"), layouts=[get_layout("hf")])
