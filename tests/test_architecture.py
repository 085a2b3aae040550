"""Layers: what may import what, read from the source, imports inside functions included."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

from moe_optim.integration.patches import INSTALLED
from tools.rooms import (
    FLOORS,
    PACKAGE,
    ROOT,
    file_of,
    imported_modules,
    modules_of,
    own_imports,
    room_of,
    sources,
    tree_of,
)

NEVER = {  # room -> rooms below it that it must not know all the same
    "formats/reference": {"kernels", "experts"},
    "kernels": {"experts"},
    "experts/keys": {"formats", "kernels"},
    "checkpoint/files": {"kernels", "config", "formats/reference"},
}
"""The oracle never sees a kernel; files are read without Megatron and without weights."""

THIRD_PARTY = {  # room -> packages it may import, besides the standard library
    "errors": set(),
    "library": {"torch"},
    "formats": {"torch"},
    "formats/reference": {"torch"},
    "kernels": {"torch", "triton"},
    "experts/keys": {"torch"},
}

UPSTREAM = {"megatron", "transformer_engine", "transformer_engine_torch", "apex", "amp_C"}
PURE = {"errors", "version", "library", "places", "screen", "spelling", "import_hook", "config"}
PURE |= {"environment", "rules", "formats", "formats/reference", "experts/keys", "checkpoint/files"}
PURE |= {"kernels", "ops", "parts"}
"""Rooms that know neither Megatron nor Transformer Engine."""

DEVICE_FREE = {"errors", "library", "formats", "formats/reference", "experts/keys"}


def read_packages(path):
    """Return the ``__init__.py`` of every package that a file imports by ``from package import``.

    Such a statement waits for the package, also where it asks for a module of it. Not of this
    package as a whole, which loads its public names when they are first used.
    """
    froms = (node.module for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom))
    found = set(map(file_of, froms)) - {None, path, PACKAGE / "__init__.py"}
    return {file for file in found if file.name == "__init__.py"}


def foreign_packages(modules):
    first = {module.partition(".")[0] for module in modules}
    return first - set(sys.stdlib_module_names) - {PACKAGE.name}


def by_name(path):
    return str(path.relative_to(PACKAGE))


def assert_no_faults(find):
    """Fail with all files in which ``find`` finds faults, and what they are."""
    found = {by_name(path): sorted(find(path)) for path in sources()}
    assert {name: faults for name, faults in found.items() if faults} == {}


def first_of(room):
    return room.partition("/")[0]


def test_every_room_is_on_a_floor():
    assert set(map(room_of, sources())) - set(FLOORS) == set()
    assert sum(len(own_imports(path)) for path in sources()) > len(sources())


def test_a_file_imports_only_rooms_of_lower_floors():
    def above_or_unknown(path):
        room = room_of(path)
        never = NEVER.get(room, set())
        for other in map(room_of, own_imports(path)):
            if FLOORS[other] > FLOORS[room] or (other != room and {other, first_of(other)} & never):
                yield other

    assert_no_faults(above_or_unknown)


def test_there_is_no_import_circle():
    """Neither of files nor of rooms."""
    files = {path: own_imports(path) | read_packages(path) for path in sources()}
    rooms: dict[str, set[str]] = {}
    for path in sources():
        rooms.setdefault(room_of(path), set()).update(map(room_of, own_imports(path)))
    for graph in (files, {room: others - {room} for room, others in rooms.items()}):
        TopologicalSorter(graph).prepare()


def test_few_rooms_know_megatron_and_transformer_engine():
    def upstream(path):
        pure = room_of(path) in PURE
        return foreign_packages(modules_of(path)) & UPSTREAM if pure else set()

    assert_no_faults(upstream)


def test_lower_floors_import_nothing_but_torch():
    def not_allowed(path):
        foreign = foreign_packages(modules_of(path))
        return foreign - THIRD_PARTY.get(room_of(path), foreign)

    assert_no_faults(not_allowed)


def test_lower_floors_mention_no_device_and_no_process_group():
    """No group lives in a format or a plan, and no kernel communicates."""

    def forbidden(path):
        room = room_of(path)
        names = {"torch.distributed", "torch.cuda"} if room in DEVICE_FREE else set()
        if first_of(room) == "kernels":
            names = {"torch.distributed"}
        return names & mentioned(path) if names else set()

    assert_no_faults(forbidden)


def mentioned(path):
    """Return the first two parts of all that a file imports, and every attribute as it is read."""
    nodes = ast.walk(tree_of(path))
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return used | {".".join(module.split(".")[:2]) for module in modules_of(path)}


def test_the_definition_loads_neither_megatron_nor_triton():
    """In a fresh interpreter: other tests may have imported either."""
    program = (
        "import sys, moe_optim.formats, moe_optim.formats.reference\n"
        "import moe_optim.experts.grouped_linear, moe_optim.ops\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not loaded & (UPSTREAM | {"triton"})


class _Eager(ast.NodeTransformer):
    """Leaves of a file what runs when it is imported."""

    def visit_FunctionDef(self, _):
        return None

    def visit_If(self, node):
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else node


def eager_imports(path):
    tree = _Eager().visit(ast.parse(path.read_text(encoding="utf-8")))
    return set(map(file_of, imported_modules(tree))) - {None}


def test_a_run_imports_no_checkpoint_code_before_it_saves_or_loads():
    """Nor what few runs need: fake quantization, health, and Muon's arithmetic.

    The package of checkpoints is there, without modules: it imports each on first use.
    """
    modules = {one.replacement.partition(":")[0] for one in INSTALLED if not one.is_deferred}
    waiting = {file_of("moe_optim.optimizer.factory"), *map(file_of, modules)}
    loaded = set()
    while waiting:
        path = waiting.pop()
        loaded.add(path)
        waiting |= eager_imports(path) - loaded
    rooms = set(map(room_of, loaded - {PACKAGE / "checkpoint/__init__.py"}))
    assert {"optimizer", "buckets", "weights", "experts", "kernels", "formats"} <= rooms
    assert not rooms & {"checkpoint", "checkpoint/files", "health", "rollout", "commands"}
    names = {str(path.relative_to(PACKAGE)) for path in loaded}
    late = {"calibration/fake_quantization.py", "formats/reference/newton_schulz.py"}
    assert not names & {*late, "optimizer/muon_step.py", "weights/te/storage.py"}


FACTORIES = {"empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand"}
FACTORIES |= {"randn", "scalar_tensor", "tensor", "zeros"}
WHOLE_NUMBERS = {"arange", "randint", "randperm"}
"""Functions of torch that take no default dtype where they are given whole numbers."""


def defaults_taken(tree):
    """Return the calls that leave a dtype or a device to torch's defaults, as they are written."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = set()
    for call in calls:
        module, _, name = ast.unparse(call.func).rpartition(".")
        needed = {"dtype", "device"} if name in FACTORIES else {"device"}
        given = {keyword.arg for keyword in call.keywords}
        if module == "torch" and name in FACTORIES | WHOLE_NUMBERS and not needed <= given:
            found.add(ast.unparse(call))
    return found


def test_no_tensor_takes_a_default_dtype_or_a_default_device():
    """Loaders of large models change both for a while, or for good."""
    assert_no_faults(lambda path: defaults_taken(tree_of(path)))
