"""`moe-optim enable`: one file, after which plain python does what `moe-optim run` does."""

import json
import os
import subprocess
import sys
import sysconfig

import pytest

from moe_optim import import_hook
from moe_optim.commands.cli import enable as site_file
from moe_optim.commands.cli import main as cli
from moe_optim.environment import find_package
from tests.support.training_runs.runs import REPOSITORY
from tests.support.training_runs.scripts import write_fake_tree

pytest.importorskip("megatron.core")

FLAG = "--use-moe-grouped-optim"

# The file


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder that stands for the environment's packages; another file lies there."""
    (tmp_path / "other.pth").write_text("import sys\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def call(command, capsys):
    code = cli.main([command])
    said = capsys.readouterr()
    return code, said.out + said.err


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_enable_writes_one_file_and_disable_leaves_the_folder_as_it_was(packages, capsys):
    """Each says what it wrote or removed and where, and does nothing the second time."""
    before = content_of(packages)
    path = packages / "moe_optim_enable.pth"
    assert call("disable", capsys) == (0, f"not enabled: no {path}\n")
    code, said = call("enable", capsys)
    assert (code, said.splitlines()[0]) == (0, f"enabled: wrote {path}")
    assert content_of(packages) == before | {path.name: site_file.CONTENT}
    assert call("enable", capsys) == (0, f"enabled already: {path}\n")
    assert call("disable", capsys) == (0, f"disabled: removed {path}\n")
    assert content_of(packages) == before


def test_a_file_of_another_version_is_ours_and_one_of_anybody_else_is_not(packages, capsys):
    path = site_file.site_file()
    path.write_bytes(site_file.CONTENT + b"import older\n")
    assert not site_file.is_enabled()
    assert call("enable", capsys)[0] == 0
    assert site_file.is_enabled()
    path.write_text("import mine\n")
    for command in ("enable", "disable"):
        code, said = call(command, capsys)
        assert (code, path.read_text()) == (2, "import mine\n")
        assert said.startswith(f"error: {path}: expected no file, or one that moe-optim enable")


def test_a_folder_that_cannot_be_written_in_is_refused_with_the_other_ways(monkeypatch, capsys):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/proc")  # not even by root
    code, said = call("enable", capsys)
    assert code == 2
    assert said.startswith("error: /proc/moe_optim_enable.pth: expected a file that may be written")
    assert "virtual environment" in said
    assert "`moe-optim run`" in said


# An environment where it is enabled

TELL = """
import json, sys
print(json.dumps({
    "modules": sorted(sys.modules), "argv": sys.argv,
    "finders": [str(getattr(finder, "__name__", type(finder))) for finder in sys.meta_path],
}))
"""

AFTER_IMPORT = """
import importlib.util, json, os, sys
assert importlib.util.find_spec("megatron.training")  # which is no import
from megatron.training.arguments import parse_args
from moe_optim.integration.installation import installed_config
from moe_optim.integration import cpu_runtime
from moe_optim.integration.engine import patch_state
from moe_optim.integration.patches import PATCHES
args = parse_args()
print(json.dumps({
    "applied": [patch.id for patch in PATCHES if patch_state(patch) == "applied"],
    "config": str(installed_config()), "cpu": cpu_runtime.is_installed(),
    "argv": sys.argv, "set": args.moe_optim_set, "lr": args.lr,
    "variables": [os.environ.get(name) for name in ("MASTER_PORT", "TORCHDYNAMO_DISABLE")],
}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a virtual environment with the file, which borrows this one's packages."""
    root = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    python = root / "bin" / "python"
    done = start(python, "-m", "moe_optim.commands.cli.main", "enable")
    assert done.stdout.startswith(f"enabled: wrote {root}"), done.stderr
    return python


def start(python, *words, cwd="/", more_packages="", **variables):
    borrowed = filter(None, [more_packages, str(REPOSITORY), *sys.path])
    hidden = ("RANK", "MASTER_PORT", "TORCHDYNAMO_DISABLE", "MOE_OPTIM_CPU")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PYTHONPATH": os.pathsep.join(borrowed), **variables}
    words = [str(word) for word in (python, *words)]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return write


def test_without_the_flag_python_starts_as_it_did(python, script, tmp_path):
    """Not one module more, no finder, no argument; and with it there is a listener alone."""
    path, bare = script(TELL), tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    with_file = json.loads(start(python, path, "--lr", "1").stdout)
    without = json.loads(start(bare / "bin" / "python", path, "--lr", "1").stdout)
    assert with_file == without
    flagged = json.loads(start(python, path, "--lr", "1", FLAG).stdout)
    assert flagged["argv"] == [str(path), "--lr", "1", FLAG]
    assert len(flagged["finders"]) == len(without["finders"]) + 1
    own = {name for name in flagged["modules"] if name.partition(".")[0] == "moe_optim"}
    assert own == {"moe_optim", "moe_optim.errors", "moe_optim.version", "moe_optim.import_hook"}
    assert not {"torch", "megatron", "yaml"} & set(flagged["modules"])


@pytest.fixture
def with_fused_adam(tmp_path):
    """Variables of an environment whose apex has what Megatron looks for, as on a GPU machine."""
    names = {"optimizers": "FusedAdam FusedSGD", "multi_tensor_apply": "multi_tensor_applier"}
    for module, imported in names.items():
        path = tmp_path / "packages" / "apex" / module / "__init__.py"
        path.parent.mkdir(parents=True)
        path.write_text(
            "".join(f"{name} = type('{name}', (), {{}})\n" for name in imported.split())
        )
    (tmp_path / "packages" / "apex" / "__init__.py").touch()
    (tmp_path / "packages" / "amp_C.py").write_text("multi_tensor_l2norm = multi_tensor_scale = 0")
    return str(tmp_path / "packages")


def test_a_script_that_imports_megatron_gets_what_run_gives(python, script, with_fused_adam):
    """The same names rebound, the same configuration, arguments and variables; on a CPU also where
    packages are installed that step on GPUs alone."""
    words = [script(AFTER_IMPORT), FLAG, "--moe-optim-set", "format=nvfp4", "--lr", "1"]
    plain = start(python, *words, more_packages=with_fused_adam)
    run = start(
        python, "-m", "moe_optim.commands.cli.main", "run", *words, more_packages=with_fused_adam
    )
    assert (plain.returncode, run.returncode) == (0, 0), plain.stderr + run.stderr
    told = json.loads(plain.stdout.splitlines()[-1])
    assert told == json.loads(run.stdout.splitlines()[-1])
    wanted = {"script-arguments", "local-experts", "distributed-optimizer", "adam:optimizer.Adam"}
    assert wanted <= set(told["applied"])
    assert "format='nvfp4'" in told["config"]
    assert f"{FLAG}: megatron-core {find_package('megatron-core').version} from " in plain.stderr


def test_a_refusal_is_one_line_and_exits_with_2(python, script, tmp_path):
    """The Megatron beside the script is the one that counts, as under python."""
    path = script("import megatron.training\nprint('went on')\n")
    core = write_fake_tree(tmp_path) / "megatron" / "core"
    done = start(python, path, FLAG, "--moe-optim-set", "format=mxfp9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: --moe-optim-set: format: expected auto")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 2\n")
    done = start(python, path, FLAG)
    assert (done.returncode, done.stdout) == (2, "")
    assert "megatron-core: expected >=0.19,<0.21, got 0.18.2" in done.stderr


def test_who_switches_it_on_by_other_means_is_left_alone():
    """`moe-optim run` and `train`, and `install()`: the listener goes before they begin."""
    import_hook.arm()
    import_hook.arm()
    assert sys.meta_path.count(import_hook._LISTENER) == 1
    import_hook.disarm()
    import_hook.disarm()
    assert import_hook._LISTENER not in sys.meta_path
