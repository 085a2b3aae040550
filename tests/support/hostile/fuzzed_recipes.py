"""Recipes that nobody would write, one for each number, and what must hold of every one.

``python -m tests.support.hostile.fuzzed_recipes FIRST LAST`` writes a JSON line for each
number at which it does not hold; ``... NUMBER`` shows what one number is.
"""

import contextlib
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from moe_optim.config import MoEOptimConfig, available_values, field_names, spell
from moe_optim.config.recipes import COUNTS, Recipe, load_recipe
from moe_optim.errors import MoEOptimError

SECONDS, BYTES = 5, 2**30
SECRET = "hunter2"
RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
PRIVATE = {  # files that are no recipes, for `base` to name
    "words": f"{SECRET} is it\n",
    "keys": f"{SECRET}: {SECRET}\nb: {SECRET}\n",
    "list": f"- {SECRET}\n",
    "accounts": f"root:{SECRET}:0:0:root:/root:/bin/{SECRET}\n" * 3,
    "nested": f"user: {{name: {SECRET}, {SECRET}: [1, 2]}}\n",
    "alias": f"a: *{SECRET}\n",
    "tag": f"a: !{SECRET} {SECRET}\n",
    "handle": f"a: !{SECRET}!x b\n",
    "directive": f"%{SECRET} x\n---\n{SECRET}\n",
    "twice": f"a: 1\na: {SECRET}\n",
    "open": f"a: [{SECRET}\n{SECRET}: ]\n",
    "escape": f'a: "\\{SECRET}"\n',
    "NULs": f"A={SECRET}\0B={SECRET}\0",
    "bytes": f"\udcff{SECRET}\n",
}
PLACES = (
    *(f"private/{name}" for name in PRIVATE),
    *("pipe", "folder", "socket", "loop", "gone", "other.yaml", "run.yaml", "link.yaml", ".", "~"),
    *("/dev/zero", "/dev/random", "/dev/tty", "/dev/stdin", "/dev/fd/0", "/proc/self/environ"),
    *("/proc/self/mem", "/proc/self/maps", "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/"),
    *(
        '"a\\0b"',
        '"\\ud800"',
        "a" * 300,
        "a/" * 3000,
        "../" * 9 + "etc/passwd",
        "''",
        "null",
        "[a]",
    ),
)
TOKENS = (
    *("!!int abc", "!!int ''", "!!float x", "!!timestamp 2001-99-99", "!!bool x", "!!null x"),
    *("!!binary x", "!!set {a}", "!!omap [a: 1]", "!!pairs [a]", "!!map a", "!!seq a", "!!str a"),
    *("!!python/object/apply:os.system [touch written]", "!!python/name:os.system", "!x a", "! 1"),
    *("9" * 19, "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "1e999999", ".inf", ".nan", "-0"),
    *("[" * 30, "[" * 3000, "{a: " * 400, "[" * 15 + "]" * 15, "- " * 40, "? " * 40, "]", "}", ":"),
    *("&a [*a]", "&a {a: *a}", "*a", "&a 1", "<<: *a", "<<", "&a [x, x, x, x, x, x, x, x, x]"),
    *('"\\0"', '"\\ud800"', '"\\x7f"', '"\\q"', "'", '"', "|", ">", "|+", ">9", "%YAML 9.9", "---"),
    *("...", "# x", "\t", "\r", "\r\n", "\ufeff", "\u2028", "\x85", "\U0001f600", "\x07", "???"),
    *("${a", "${", "}", "${a}", "${.a}", "${..a}", "${oc.env}", "${oc.env:HOME}", "${oc.env:${a}}"),
    *("${oc.env:NONE}", "${oc.env:NONE,x}", "${oc.decode:1}", "${oc.decode:'[1, {a: 2}]'}", "$"),
    *("${oc.create:{a: 1}}", "${oc.select:moe_optim}", "${oc.dict.keys:requires}", "${nope:1}"),
    *("${megatron_args}", "${megatron_args.--a}", "${megatron_args.--b}", "${moe_optim.format}"),
    *("${oc.decode:${oc.env:TEXT}}", "${" * 40 + "}" * 40, "${oc.env:" * 200 + "x" + "}" * 200),
    *(
        "\\${a}",
        "${megatron_args.--a}" * 40,
        "${megatron_args.--b}" * 40,
        "x" * 70_000,
        "1," * 9000,
    ),
)
VALUES = (
    *(
        "true",
        "false",
        "null",
        "",
        "0",
        "-1",
        "400",
        "2e-3",
        "1.10",
        "12:30",
        "yes",
        "a b",
        "[1, 2]",
    ),
    *("[0.3, a, 0.7, b]", "'true'", "/data/x y", "${oc.env:HOME}", "${oc.env:HOME}/${oc.env:TEXT}"),
    *(
        "${megatron_args.--a}",
        "x/${megatron_args.--b}",
        "${megatron_args.--lr}",
        "[${oc.env:HOME}]",
    ),
    *(
        "${requires.ranks}",
        "${.--a}",
        "${..requires.sm}",
        "${oc.decode:${oc.env:TEXT}}",
        "${oc.env:NO,1}",
    ),
)
FLAGS = ("--a", "--b", "--c", "--num-layers", "--lr")
REQUIREMENTS = ("python", "torch", "megatron-core", "apex", "sm", "gpus", "ranks")
ODD_KEYS = (
    "num_layers",
    "--x=1",
    "-x",
    "---",
    "1",
    "true",
    "null",
    "torc",
    "fromat",
    "a.b",
    "${a}",
)
FORBIDDEN = (
    *("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("socket.connect", "socket.bind", "ctypes.dlopen", "marshal.loads", "pickle.find_class"),
)
"""Audited events (PEP 578) by which Python runs code, starts something, or changes a disk."""


@dataclass(frozen=True)
class Case:
    """What is given to the package."""

    recipe: str
    base: str
    overrides: tuple[str, ...]
    assignments: tuple[str, ...]
    """For ``--moe-optim-set``."""


def make_case(number: int) -> Case:
    """Return the case of a number, on any machine the same."""
    rng = random.Random(number)
    odd = rng.choice((0, 0.03, 0.3))  # how often something stands where it does not belong
    recipe = _document(rng, odd)
    base = _document(rng, odd) if rng.random() < 0.3 else "moe_optim: {format: bf16}\n"
    overrides = tuple(_override(rng, odd) for _ in range(rng.choice((0, 0, 0, 1, 2))))
    names = [_key(rng, field_names(), odd) for _ in range(rng.choice((0, 0, 1)))]
    return Case(
        recipe, base, overrides, tuple(f"{name}={_value(rng, name, odd)}" for name in names)
    )


def _document(rng: random.Random, odd: float) -> str:
    if rng.random() < 0.15:
        text = rng.choice(RECIPES).read_text()
    else:
        sections = [section for section in _sections(rng, odd) if rng.random() < 0.8]
        rng.shuffle(sections)
        text = "".join(sections) or "moe_optim:\n"
    for _ in range(rng.choice((1, 1, 2, 5)) if rng.random() < odd else 0):
        text = _mutate(rng, text)
    return text


def _sections(rng: random.Random, odd: float) -> list[str]:
    """Return the four sections of a recipe, or more of them."""
    known = {"requires": REQUIREMENTS, "megatron_args": FLAGS, "moe_optim": field_names()}
    texts = []
    if rng.random() < 0.4:
        nearby = ("other.yaml", *(path.name for path in RECIPES))
        texts.append(f"base: {rng.choice(PLACES if rng.random() < 0.4 else nearby)}\n")
    for section, names in known.items():
        keys = [_key(rng, names, odd) for _ in range(rng.randrange(5))]
        if rng.random() >= odd:
            keys = list(dict.fromkeys(keys))
        lines = [f"  {key}: {_value(rng, key, odd)}\n" for key in keys]
        if section == "megatron_args" and rng.random() < 0.1:
            lines = _growing(rng)
        texts.append(f"{section}:\n{''.join(lines)}")
    return texts


def _key(rng: random.Random, names: Sequence[str], odd: float) -> str:
    return rng.choice((*ODD_KEYS, *FLAGS, *REQUIREMENTS) if rng.random() < odd / 3 else names)


def _value(rng: random.Random, name: str, odd: float) -> str:
    if rng.random() < odd:
        value = rng.choice(TOKENS)
    elif name in field_names():
        value = spell(rng.choice(available_values(name)))
    elif name in REQUIREMENTS:
        counts = ("null", "1", "2", "90")
        value = rng.choice(counts if name in COUNTS else ("'>=0'", "'>=2.11,<3'", "null", "==1.*"))
    else:
        value = rng.choice(VALUES)
    if rng.random() < odd:
        value = f"[{', '.join([value] * rng.randrange(5))}]"
    return f"'{value}'" if rng.random() < odd else value


def _growing(rng: random.Random) -> list[str]:
    """Return flags with aliases or references to others that have some: they grow by powers."""
    fan, steps = rng.choice((1, 1, 2, 3, 12)), rng.choice((2, 3, 5, 12, 60, 400))
    if rng.random() < 0.5:
        lines = [f"  --a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * fan)}]\n" for i in range(1, steps)]
        return [f"  --a0: &a0 {rng.choice(('1', '[a]'))}\n", *lines]
    lines = [f"  --a{i}: {f'${{megatron_args.--a{i - 1}}}' * fan}\n" for i in range(1, steps)]
    lines.append(f"  --a0: {'x' * rng.choice((1, 100, 50_000))}\n")
    rng.shuffle(lines)
    return lines


def _override(rng: random.Random, odd: float) -> str:
    section, names = rng.choice(
        (("requires", REQUIREMENTS), ("megatron_args", FLAGS), ("moe_optim", field_names()))
    )
    if rng.random() < odd / 3:
        section = rng.choice(("base", "x", "", "megatron_args.--a"))
    key = _key(rng, names, odd)
    return f"{section}{'.' if rng.random() >= odd / 9 else ''}{key}={_value(rng, key, odd)}"


def _mutate(rng: random.Random, text: str) -> str:
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.choice((0, 1, 1, 3, 10, 100)))
    piece = text[start:end]
    changes: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(TOKENS),
        lambda: f" {rng.choice(TOKENS)}\n",
        lambda: "",
        lambda: piece * rng.choice((2, 3, 100, 3000)),
        lambda: piece[::-1],
        lambda: chr(rng.choice((0, 9, 10, 13, 32, 39, 58, 91, 123, 127, 0xE9, 0xFEFF, 0x1F600))),
        lambda: "\n" + " " * rng.randrange(6),
        lambda: f"&a {piece}" if rng.random() < 0.5 else "*a",
        lambda: text[: rng.randrange(200)],
    )
    return (text[:start] + rng.choice(changes)() + text[end:])[: 2**19]


def prepare(folder: Path) -> None:
    """Fill a folder with everything that a recipe can name, and go there."""
    os.chdir(folder)
    os.environ |= {"TEXT": "[1, ${oc.env:HOME}]", "PRIVATE": SECRET, "HOME": "/home/of/nobody"}
    for name in ("private", "folder"):
        Path(name).mkdir()
    for name, text in PRIVATE.items():
        Path("private", name).write_bytes(text.encode(errors="surrogateescape"))
    for path in RECIPES:
        shutil.copy(path, ".")
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    Path("loop").symlink_to("loop")
    Path("run.yaml").touch()
    Path("link.yaml").hardlink_to("run.yaml")


def check(case: Case) -> None:
    """Raise unless the case loads, or ends in one error of ours that tells nothing it must not."""
    Path("run.yaml").write_bytes(case.recipe.encode(errors="surrogatepass"))
    Path("other.yaml").write_bytes(case.base.encode(errors="surrogatepass"))
    before = sorted(Path().iterdir())
    for load in (
        lambda: load_recipe("run.yaml", case.overrides),
        lambda: MoEOptimConfig().replace_from(case.assignments),
    ):
        result: Any = None
        with _Watch() as seen:
            try:
                result = load()
            except MoEOptimError as error:
                result = error
        assert not seen, f"did {seen}"
        if isinstance(result, MoEOptimError):
            _check_error(result)
        elif isinstance(result, Recipe):
            _check_recipe(result)
    assert sorted(Path().iterdir()) == before


def _check_error(error: MoEOptimError) -> None:
    message = str(error)
    assert len(message) < 8000, f"{len(message)} characters"
    message.encode()  # it can be printed
    shown = "".join(traceback.format_exception(error))
    assert SECRET not in shown, "shows what a private file holds"


def _check_recipe(recipe: Recipe) -> None:
    argv = recipe.megatron_argv()
    assert all(type(word) is str and "\0" not in word for word in argv)
    assert sum(map(len, argv)) <= 2**25
    assert recipe.ranks >= 1


class _Watch:
    """Notes what Python does meanwhile that reading a recipe has no need of."""

    current: list[str] | None = None
    is_hooked = False

    def __enter__(self) -> list[str]:
        if not _Watch.is_hooked:  # a hook cannot be taken off
            sys.addaudithook(self._note)
            _Watch.is_hooked = True
        _Watch.current = []
        return _Watch.current

    def __exit__(self, *_: Any) -> None:
        _Watch.current = None

    @staticmethod
    def _note(event: str, args: tuple[Any, ...]) -> None:
        if _Watch.current is None:
            return
        writes = (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writes or event in FORBIDDEN:
            _Watch.current.append(f"{event} {args!r}"[:200])


def _time_over(*_: Any) -> NoReturn:
    raise TimeoutError(f"more than {SECONDS} s")


def _import_what_is_imported_late() -> None:
    for reference in ("oc.env:HOME", "oc.decode:1", "oc.select:a,1", "oc.dict.keys:requires", ".b"):
        Path("run.yaml").write_text(f"megatron_args: {{--a: '${{{reference}}}'}}\n")
        with contextlib.suppress(MoEOptimError):
            load_recipe("run.yaml")


def run(first: int, last: int) -> None:
    """Check the cases of all numbers from ``first`` on, before ``last``, under bounds."""
    with tempfile.TemporaryDirectory(prefix="recipes-") as folder:
        prepare(Path(folder))
        _import_what_is_imported_late()
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
        signal.signal(signal.SIGPROF, _time_over)
        for number in range(first, last):
            case = make_case(number)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its own time: the machine may be busy
            faulthandler.dump_traceback_later(60, exit=True)  # it waits, or no signal reaches it
            print(f"at {number}", flush=True)
            try:
                check(case)
            except BaseException as error:
                signal.setitimer(signal.ITIMER_PROF, 0)
                lines = traceback.format_exception(error)
                fault = {"number": number, "error": repr(error)[:500], "trace": lines[-6:]}
                print(json.dumps(fault), flush=True)
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(make_case(int(sys.argv[1])))
    else:
        run(int(sys.argv[1]), int(sys.argv[2]))
