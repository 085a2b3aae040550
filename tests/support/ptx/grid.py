"""A grid of blocks whose threads run together: a register is an array, with an entry a thread."""

from collections.abc import Callable, Sequence
from functools import cached_property, reduce

import numpy as np

from tests.support.ptx import numbers
from tests.support.ptx.memory import Array, process_memory, shared_memory
from tests.support.ptx.numbers import DTYPES
from tests.support.ptx.program import Address, Immediate, Instruction, Operand, Program

WARP = 32


class Grid:
    """Runs a program once.

    Threads that are furthest behind go on first, and meet again where their ways join. A thread at
    a barrier waits until all of its block that have not ended are there.

    Args:
        program: of a kernel.
        blocks: number of blocks along the two axes.
        arguments: bits of each parameter: addresses, integers, or of fp32.
        shared_bytes: of a block.
    """

    def __init__(
        self, program: Program, blocks: tuple[int, int], arguments: Sequence[int], shared_bytes: int
    ) -> None:
        self.program = program
        self.threads, count = program.threads, blocks[0] * blocks[1]
        self.lanes = count * self.threads
        lane = np.arange(self.lanes, dtype=np.int64)
        block = lane // self.threads
        self.block = block
        self.special = {
            "%tid.x": (lane % self.threads).astype(np.uint32),
            "%ctaid.x": (block % blocks[0]).astype(np.uint32),
            "%ctaid.y": (block // blocks[0]).astype(np.uint32),
            "%nctaid.x": np.full(self.lanes, blocks[0], dtype=np.uint32),
            "%nctaid.y": np.full(self.lanes, blocks[1], dtype=np.uint32),
        }
        self.arguments = dict(zip(program.parameters, arguments, strict=False))
        self.registers: dict[str, Array] = {}
        self.constants: dict[tuple[Immediate, np.dtype], Array] = {}
        self.globals = process_memory()
        stride = -(-shared_bytes // 16) * 16
        self.shared = shared_memory(max(stride, 16) * count)
        self.shared_start = block * stride
        self.active = np.ones(self.lanes, dtype=bool)
        self.at = np.zeros(self.lanes, dtype=np.int64)
        self.waits = np.zeros(self.lanes, dtype=bool)

    @cached_property
    def _ends(self) -> list[int]:
        """For each instruction, the first behind it at which threads may part, join or wait."""
        program = self.program
        count = len(program.instructions)
        starts = {*program.labels.values(), count}
        starts |= {
            number + 1
            for number, one in enumerate(program.instructions)
            if one.parts[0] in ("bra", "ret") or one.parts[:2] == ("bar", "sync")
        }
        ends = [count] * count
        for number in range(count - 2, -1, -1):
            ends[number] = number + 1 if number + 1 in starts else ends[number + 1]
        return ends

    def run(self) -> None:
        """Run until all threads have ended.

        Raises:
            RuntimeError: threads of a block wait at different barriers.
            NotImplementedError: an instruction that no kernel has used so far.
        """
        end = len(self.program.instructions)
        with np.errstate(all="ignore"):
            while True:
                ready = ~self.waits & (self.at < end)
                if ready.any():
                    self._run_block(ready)
                elif self.waits.any():
                    self._release()
                else:
                    return

    def _run_block(self, ready: Array) -> None:
        first = int(self.at[ready].min())
        self.active = ready & (self.at == first)
        last = self._ends[first]
        self.at[self.active] = last
        for instruction in self.program.instructions[first:last]:
            try:
                self._execute(instruction)
            except Exception as error:
                error.add_note(f"in {self.program.name}: {instruction.text}")
                raise

    def _release(self) -> None:
        places = self.at[self.waits]
        blocks = self.block[self.waits]
        for block in np.unique(blocks):
            if len(np.unique(places[blocks == block])) > 1:
                raise RuntimeError(f"{self.program.name}: a block waits at several barriers")
        self.waits[:] = False

    def _execute(self, instruction: Instruction) -> None:
        active = self.active
        if instruction.guard is not None:
            guard = self.predicate(instruction.guard)
            active = active & (~guard if instruction.negated else guard)
        INSTRUCTIONS[instruction.parts[0]](self, instruction, active)

    def read(self, operand: Operand, dtype: str | np.dtype) -> Array:
        """Return the value of a register, a constant or an address, one a thread."""
        dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
        unsigned = np.dtype(f"u{dtype.itemsize}")
        if isinstance(operand, Immediate):
            if (operand, dtype) not in self.constants:
                bits = np.array(operand.bits & ((1 << 8 * dtype.itemsize) - 1), dtype=unsigned)
                self.constants[operand, dtype] = np.broadcast_to(bits.view(dtype), self.lanes)
            return self.constants[operand, dtype]
        assert isinstance(operand, str), operand
        if operand in self.special:
            values = self.special[operand]
        elif operand == "global_smem":
            values = np.zeros(self.lanes, dtype=unsigned)
        else:
            values = self._register(operand)
        if values.dtype.itemsize < dtype.itemsize:
            raise TypeError(f"{operand} is narrower than {dtype}")
        return values.astype(unsigned, copy=False).view(dtype)

    def predicate(self, operand: Operand) -> Array:
        """Return the value of a predicate."""
        if isinstance(operand, Immediate):
            return np.broadcast_to(np.bool_(operand.bits), self.lanes)
        return self._register(operand)

    def _register(self, name: Operand) -> Array:
        """Return what a register holds; one that nobody has written holds anything."""
        found = self.registers.get(name)
        if found is None:
            nothing = np.array(0xA5A5A5A5A5A5A5A5, dtype=np.uint64)
            found = np.broadcast_to(nothing.astype(self.program.dtype_of(name)), self.lanes)
        return found

    def write(self, register: Operand, values: Array, active: Array) -> None:
        """Give a register the bits of values, widened by zeros, where threads are active."""
        if register == "_":
            return
        assert isinstance(register, str), register
        dtype = np.dtype(self.program.dtype_of(register))
        if dtype == np.bool_:
            new = values.astype(bool)
        else:
            bits = values.view(f"u{values.itemsize}") if values.dtype.kind != "u" else values
            new = bits.astype(dtype, copy=False)
        if new.shape != (self.lanes,):  # of constants alone
            new = np.broadcast_to(new, self.lanes)
        if not active.all():
            new = np.where(active, new, self._register(register))
        self.registers[register] = new


Semantics = Callable[[Grid, Instruction, Array], None]


def _typed(compute: Callable[..., Array]) -> Semantics:
    """Return what reads all sources in the last type of the opcode, and writes one result."""

    def execute(grid: Grid, one: Instruction, active: Array) -> None:
        packed = one.parts[-1] == "f32x2"
        target, *sources = one.operands
        values = [_read_packed(grid, source, one.parts[-1]) for source in sources]
        if "ftz" in one.parts:
            values = [numbers.flush(value) for value in values]
        result = compute(*values)
        if result.dtype.kind == "f":
            result = numbers.canonical(result)
        if "ftz" in one.parts:
            result = numbers.flush(result)
        grid.write(target, result.reshape(-1).view(np.uint64) if packed else result, active)

    return execute


def _read_packed(grid: Grid, source: Operand, type: str) -> Array:
    if type != "f32x2":
        return grid.read(source, type)
    return np.ascontiguousarray(grid.read(source, "b64")).view(np.float32)


def _bitwise(of_bits: Callable[..., Array], of_predicates: Callable[..., Array]) -> Semantics:
    def execute(grid: Grid, one: Instruction, active: Array) -> None:
        target, *sources = one.operands
        if one.parts[-1] == "pred":
            result = of_predicates(*(grid.predicate(source) for source in sources))
        else:
            result = of_bits(*(grid.read(source, one.parts[-1]) for source in sources))
        grid.write(target, result, active)

    return execute


def _multiply(grid: Grid, one: Instruction, active: Array) -> None:
    """``mul`` and ``mad``; ``.wide`` has a result twice as wide, ``.lo`` the low half."""
    if one.parts[-1].startswith("f"):
        _typed(np.multiply)(grid, one, active)
        return
    target, a, b, *addend = one.operands
    dtype = DTYPES[one.parts[-1]]
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if "wide" in one.parts else dtype
    result = grid.read(a, dtype).astype(wide) * grid.read(b, dtype).astype(wide)
    for source in addend:
        result = result + grid.read(source, wide)
    grid.write(target, result, active)


def _divide(grid: Grid, one: Instruction, active: Array) -> None:
    if one.parts[-1].startswith("f"):
        _typed(np.divide)(grid, one, active)
        return
    target, a, b = one.operands
    x, y = (grid.read(source, one.parts[-1]) for source in (a, b))
    whole = np.abs(x) // np.maximum(np.abs(y), 1)
    towards_zero = np.where((x < 0) != (y < 0), -whole, whole)
    grid.write(target, towards_zero, active)


def _extreme(of_numbers: Callable[..., Array], of_all: Callable[..., Array]) -> Semantics:
    """``max`` and ``min``, of two values or, of fp32 since sm_100, of three."""

    def execute(grid: Grid, one: Instruction, active: Array) -> None:
        type = one.parts[-1]
        if not set(one.parts[1:-1]) <= {"NaN", "ftz"}:
            raise NotImplementedError(one.text)
        target, *sources = one.operands
        if type == "bf16":
            values = [numbers.from_bf16(grid.read(source, "b16")) for source in sources]
            grid.write(target, numbers.to_bf16(reduce(of_numbers, values)), active)
        elif type.startswith("f") and "NaN" not in one.parts:
            values = [grid.read(source, type) for source in sources]
            grid.write(target, reduce(of_numbers, values), active)
        else:
            _typed(lambda *values: reduce(of_all, values))(grid, one, active)

    return execute


def _absolute(grid: Grid, one: Instruction, active: Array) -> None:
    target, source = one.operands
    type = one.parts[-1]
    mask = {"bf16": 0x7FFF, "bf16x2": 0x7FFF7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}
    bits = grid.read(source, {"bf16": "b16", "bf16x2": "b32", "f32": "b32", "f64": "b64"}[type])
    grid.write(target, bits & bits.dtype.type(mask[type]), active)


def _shift(grid: Grid, one: Instruction, active: Array) -> None:
    target, source, amount = one.operands
    values = grid.read(source, one.parts[-1])
    grid.write(target, numbers.shift(one.parts[0], values, grid.read(amount, "u32")), active)


def _bit_field(grid: Grid, one: Instruction, active: Array) -> None:
    target, source, start, length = one.operands
    values = grid.read(source, one.parts[-1])
    field = numbers.bit_field(values, grid.read(start, "u32"), grid.read(length, "u32"))
    grid.write(target, field, active)


def _permute(grid: Grid, one: Instruction, active: Array) -> None:
    target, *sources = one.operands
    grid.write(target, numbers.permute_bytes(*(grid.read(s, "b32") for s in sources)), active)


def _compare(grid: Grid, one: Instruction, active: Array) -> None:
    target, a, b = one.operands
    comparison, type = one.parts[1], one.parts[-1]
    if type == "bf16":
        x, y = (numbers.from_bf16(grid.read(source, "b16")) for source in (a, b))
    else:
        x, y = grid.read(a, type), grid.read(b, type)
    grid.write(target, numbers.COMPARISONS[comparison](x, y), active)


def _select(grid: Grid, one: Instruction, active: Array) -> None:
    target, a, b, predicate = one.operands
    type = one.parts[-1]
    chosen = np.where(grid.predicate(predicate), grid.read(a, type), grid.read(b, type))
    grid.write(target, chosen, active)


def _move(grid: Grid, one: Instruction, active: Array) -> None:
    target, source = one.operands
    type = one.parts[-1]
    if type == "pred":
        grid.write(target, grid.predicate(source), active)
    elif isinstance(target, tuple):  # the low half first
        bits, half = grid.read(source, type), np.dtype(f"u{DTYPES[type].itemsize // 2}")
        halves = np.ascontiguousarray(bits).view(half).reshape(-1, 2)
        for register, values in zip(target, halves.T, strict=True):
            grid.write(register, np.ascontiguousarray(values), active)
    elif isinstance(source, tuple):
        half = np.dtype(f"u{DTYPES[type].itemsize // 2}")
        halves = np.stack([grid.read(register, half) for register in source], axis=1)
        grid.write(target, halves.view(DTYPES[type]).reshape(-1), active)
    else:
        grid.write(target, grid.read(source, type), active)


def _convert(grid: Grid, one: Instruction, active: Array) -> None:
    """``cvt``: the target type comes first, and of a pair the high half."""
    target, *sources = one.operands
    to, source_type = one.parts[-2:]
    if to.endswith("x2"):
        grid.write(target, _convert_pair(grid, sources, to, source_type), active)
        return
    (source,) = sources
    if source_type in ("bf16", "f16"):
        bits = grid.read(source, "b16")
        values = numbers.from_bf16(bits) if source_type == "bf16" else bits.view(np.float16)
    else:
        values = grid.read(source, source_type)
    if to == "bf16":
        result = numbers.to_bf16(values)
    elif values.dtype.kind == "f" and DTYPES[to].kind != "f":
        raise NotImplementedError(one.text)
    else:
        result = values.astype(DTYPES[to])
    if to in ("f32", "f64"):
        result = numbers.canonical(result)
    grid.write(target, result, active)


def _convert_pair(grid: Grid, sources: Sequence[Operand], to: str, source_type: str) -> Array:
    if source_type == "e4m3x2":
        bits = np.ascontiguousarray(grid.read(sources[0], "b16")).view(np.uint8)
        return numbers.from_e4m3(bits).view(np.uint32)
    high, low = (grid.read(source, source_type) for source in sources)
    both = np.stack([low, high], axis=1)
    if to == "e4m3x2":
        return numbers.to_e4m3(both).view(np.uint16).reshape(-1)
    if to == "bf16x2":
        return numbers.to_bf16(both).view(np.uint32).reshape(-1)
    return both.astype(np.float16).view(np.uint32).reshape(-1)


def _load(grid: Grid, one: Instruction, active: Array) -> None:
    target, address = one.operands
    assert isinstance(address, Address)
    type = one.parts[-1]
    if one.parts[1] == "param":
        bits = np.array(grid.arguments[address.base], dtype=np.uint64)
        unsigned = np.dtype(f"u{DTYPES[type].itemsize}")
        grid.write(target, np.broadcast_to(bits.astype(unsigned), grid.lanes), active)
        return
    targets = target if isinstance(target, tuple) else (target,)
    memory, addresses = _addresses(grid, one.parts[1], address)
    loaded = memory.load(addresses[active], DTYPES[type].itemsize, len(targets))
    for register, found in zip(targets, loaded, strict=True):
        values = np.zeros(grid.lanes, dtype=found.dtype)
        values[active] = found
        grid.write(register, values, active)


def _store(grid: Grid, one: Instruction, active: Array) -> None:
    address, source = one.operands
    assert isinstance(address, Address)
    dtype = np.dtype(f"u{DTYPES[one.parts[-1]].itemsize}")
    sources = source if isinstance(source, tuple) else (source,)
    memory, addresses = _addresses(grid, one.parts[1], address)
    values = [grid.read(register, dtype)[active] for register in sources]
    memory.store(addresses[active], dtype.itemsize, values)


def _addresses(grid: Grid, space: str, address: Address) -> tuple[object, Array]:
    if space == "global":
        return grid.globals, grid.read(address.base, "s64") + address.offset
    start = np.int64(0) if address.base == "global_smem" else grid.read(address.base, "s32")
    return grid.shared, grid.shared_start + start + address.offset


def _matrix(grid: Grid, one: Instruction, active: Array) -> None:
    """``ldmatrix`` and ``stmatrix``: 8 rows of 16 bytes, whose addresses 8 threads hold.

    Of matrix i, thread t of a warp has, in the two halves of its register i, columns 2 * (t % 4)
    and the next of row t / 4; with ``.trans`` rows 2 * (t % 4) and the next of column t / 4.
    """
    is_load = one.parts[0] == "ldmatrix"
    registers, address = one.operands if is_load else one.operands[::-1]
    _require_whole_warps(active, one)
    memory, addresses = _addresses(grid, "shared", address)
    starts = addresses.reshape(-1, WARP)
    thread = np.arange(WARP)
    for number, register in enumerate(registers):
        words = np.ascontiguousarray(grid.read(register, "b32"))
        halves = words.view(np.uint16).reshape(-1, 2).copy()
        for half in (0, 1):
            near, far = thread // 4, 2 * (thread % 4) + half
            row, column = (far, near) if "trans" in one.parts else (near, far)
            places = (starts[:, 8 * number + row] + 2 * column).reshape(-1)
            if is_load:
                (halves[active, half],) = memory.load(places[active], 2, 1)
            else:
                memory.store(places[active], 2, [np.ascontiguousarray(halves[active, half])])
        if is_load:
            grid.write(register, halves.view(np.uint32).reshape(-1), active)


def _shuffle(grid: Grid, one: Instruction, active: Array) -> None:
    target, source, lane, *_ = one.operands
    _require_whole_warps(active, one)
    values = grid.read(source, "b32").reshape(-1, WARP)
    given = grid.read(lane, "u32").reshape(-1, WARP).astype(np.int64)
    chosen = (given if one.parts[2] == "idx" else np.arange(WARP) ^ given) % WARP
    grid.write(target, np.take_along_axis(values, chosen, axis=1).reshape(-1), active)


def _reduce(grid: Grid, one: Instruction, active: Array) -> None:
    """``redux``: every thread of a warp gets what all of its threads have together."""
    target, source, _ = one.operands
    _require_whole_warps(active, one)
    _, sync, operation, *modifiers, type = one.parts
    if sync != "sync" or not set(modifiers) <= {"abs"}:
        raise NotImplementedError(one.text)
    warps = grid.read(source, type).reshape(-1, WARP)
    warps = np.abs(warps) if modifiers else warps
    result = warps[:, :1]
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}[operation]
    if type == "f32":
        combine = {"max": numbers.largest, "min": numbers.smallest}[operation]
    for lane in range(1, WARP):
        result = combine(result, warps[:, lane : lane + 1])
    grid.write(target, np.repeat(result, WARP, axis=1).reshape(-1), active)


def _require_whole_warps(active: Array, one: Instruction) -> None:
    of_warps = active.reshape(-1, WARP)
    if (of_warps.any(1) != of_warps.all(1)).any():
        raise RuntimeError(f"{one.text}: a part of a warp")


def _atomic(grid: Grid, one: Instruction, active: Array) -> None:
    """Threads take turns in their order. What each is given is what was there before all."""
    target, address, source = one.operands
    dtype, combine = DTYPES[one.parts[-1]], {"add": np.add, "max": np.maximum}[one.parts[-2]]
    memory, addresses = _addresses(grid, one.parts[1], address)
    before = np.zeros(grid.lanes, dtype=dtype)
    values = grid.read(source, dtype)[active]
    before[active] = memory.update(addresses[active], combine, values)
    grid.write(target, before, active)


def _barrier(grid: Grid, one: Instruction, active: Array) -> None:
    if one.parts[1] == "sync":
        grid.waits |= active


def _branch(grid: Grid, one: Instruction, active: Array) -> None:
    (label,) = one.operands
    grid.at[active] = grid.program.labels[label]


def _return(grid: Grid, one: Instruction, active: Array) -> None:
    grid.at[active] = len(grid.program.instructions)


INSTRUCTIONS: dict[str, Semantics] = {
    "abs": _absolute,
    "add": _typed(np.add),
    "and": _bitwise(np.bitwise_and, np.logical_and),
    "atom": _atomic,
    "bar": _barrier,
    "bfe": _bit_field,
    "bra": _branch,
    "cvt": _convert,
    "div": _divide,
    "fma": _typed(numbers.fma),
    "ld": _load,
    "ldmatrix": _matrix,
    "mad": _multiply,
    "max": _extreme(numbers.largest, np.maximum),
    "min": _extreme(numbers.smallest, np.minimum),
    "mov": _move,
    "mul": _multiply,
    "neg": _typed(np.negative),
    "not": _bitwise(np.invert, np.logical_not),
    "or": _bitwise(np.bitwise_or, np.logical_or),
    "prmt": _permute,
    "redux": _reduce,
    "ret": _return,
    "selp": _select,
    "setp": _compare,
    "shfl": _shuffle,
    "shl": _shift,
    "shr": _shift,
    "sqrt": _typed(np.sqrt),
    "st": _store,
    "stmatrix": _matrix,
    "sub": _typed(np.subtract),
    "xor": _bitwise(np.bitwise_xor, np.logical_xor),
}
"""What the kernels use, and no more."""
