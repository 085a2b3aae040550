"""Layers: what may import what, read from the source, imports inside functions included."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_optim"

BASE = {"errors", "formats", "version"}
MIDDLE = {"reference", "kernels", "layout"}
SERVICES = {"config", "environment", "ops", "recipes"}

MAY_IMPORT = {  # layer -> layers it may import, besides itself
    "errors": set(),
    "version": set(),
    "formats": {"errors"},
    "reference": BASE,
    "kernels": BASE,
    "layout": BASE,
    **{service: BASE | MIDDLE | SERVICES for service in SERVICES},
    "modules": BASE | MIDDLE | SERVICES,
    "checkpoints": BASE | {"layout"},
    "megatron": BASE | MIDDLE | SERVICES | {"modules", "checkpoints"},
    "cli": BASE | MIDDLE | SERVICES | {"modules", "checkpoints", "megatron", "__init__"},
    "__init__": BASE | MIDDLE | SERVICES | {"modules", "checkpoints", "megatron", "cli"},
}

THIRD_PARTY = {  # layer -> packages it may import, besides the standard library
    "errors": set(),
    "formats": {"torch"},
    "reference": {"torch"},
    "kernels": {"torch", "triton"},
    "layout": {"torch"},
}

UPSTREAM = {"megatron", "transformer_engine", "transformer_engine_torch", "apex", "amp_C"}

DEVICE_FREE = {"errors", "formats", "reference", "layout"}


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources():
    return sorted(path for path in PACKAGE.rglob("*.py"))


def imported_modules(tree):
    """Yield the dotted name of every module that any statement of a file imports.

    ``from a import b`` counts as ``a.b``, since b may be a module. ``import_module`` and
    ``__import__`` count where they are called with a literal.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in {"import_module", "__import__"}:
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _called_name(call):
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def own_layers(modules):
    """Return the layers of this package among dotted names; its bare name is ``__init__``."""
    layers = set()
    for module in modules:
        first, _, rest = module.partition(".")
        if first == PACKAGE.name:
            part = rest.partition(".")[0]
            is_layer = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()
            layers.add(part if part and is_layer else "__init__")
    return layers


def foreign_packages(modules):
    first = {module.partition(".")[0] for module in modules}
    return first - set(sys.stdlib_module_names) - {PACKAGE.name}


def modules_of(path):
    return set(imported_modules(ast.parse(path.read_text(encoding="utf-8"))))


def by_name(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", sources(), ids=by_name)
def test_a_module_imports_only_layers_left_of_its_own(path):
    """The oracle never sees a kernel, a kernel never sees Megatron, a plan never sees a device."""
    layer = layer_of(path)
    assert layer in MAY_IMPORT, f"{layer} is in no layer: add it to MAY_IMPORT"
    forbidden = own_layers(modules_of(path)) - MAY_IMPORT[layer] - {layer}
    assert not forbidden, f"{layer} must not import {sorted(forbidden)}"


@pytest.mark.parametrize("path", sources(), ids=by_name)
def test_only_the_megatron_layer_imports_megatron_and_transformer_engine(path):
    upstream = foreign_packages(modules_of(path)) & UPSTREAM
    assert layer_of(path) == "megatron" or not upstream, f"imports {sorted(upstream)}"


@pytest.mark.parametrize("path", sources(), ids=by_name)
def test_lower_layers_import_nothing_but_torch(path):
    allowed = THIRD_PARTY.get(layer_of(path))
    if allowed is not None:
        assert foreign_packages(modules_of(path)) <= allowed


@pytest.mark.parametrize("path", sources(), ids=by_name)
def test_lower_layers_mention_no_device_and_no_process_group(path):
    """No group lives in a format or a plan, and no kernel communicates."""
    layer = layer_of(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {".".join(module.split(".")[:2]) for module in imported_modules(tree)}
    forbidden = {"torch.distributed", "torch.cuda"} if layer in DEVICE_FREE else set()
    if layer == "kernels":
        forbidden = {"torch.distributed"}
    assert not used & forbidden


def test_the_definition_loads_neither_megatron_nor_triton():
    """In a fresh interpreter: other tests may have imported either."""
    program = (
        "import sys, moe_optim.formats, moe_optim.reference, moe_optim.layout\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not loaded & (UPSTREAM | {"triton"})


EXAMPLES = {
    "at the top": "import moe_optim.kernels.encode",
    "from a package": "from moe_optim import kernels",
    "from a module": "from moe_optim.kernels.encode import amax",
    "in a function": "def f():\n    from moe_optim.kernels import encode",
    "in a condition": "try:\n    import moe_optim.kernels\nexcept ImportError:\n    pass",
    "by a call": "import importlib\nimportlib.import_module('moe_optim.kernels.encode')",
}


@pytest.mark.parametrize("source", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_the_reader_sees_every_kind_of_import(source):
    assert "kernels" in own_layers(imported_modules(ast.parse(source)))
