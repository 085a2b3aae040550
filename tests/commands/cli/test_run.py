"""`moe-optim run`: a script as python runs it, and with the flag a run of the plug-in."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils._config_module import ConfigModule

from moe_optim.commands.cli import main as cli
from moe_optim.config import MoEOptimConfig
from moe_optim.integration.arguments import config_from_argv
from moe_optim.integration.engine import patch_state
from moe_optim.integration.patches import PATCHES, SCRIPT
from moe_optim.integration.script_runner import prepare_imports, run_script
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_run, pretrain
from tests.support.training_runs.scripts import PRETRAIN, write_fake_tree

pytest.importorskip("megatron.core")

PLUGIN = ["--use-moe-grouped-optim", "--moe-optim-set", "format=mxfp8"]
SHORT = ["--train-iters", "2", "--eval-interval", "2"]

TELL = """
import json, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "spec": __spec__,
    "main": sys.modules["__main__"].__dict__ is globals(), "docstring": __doc__,
    "loaded": sorted({name.partition(".")[0] for name in sys.modules} & {"megatron", "torch"}),
}))
"""

RUN_SCRIPT = """
import sys
from pathlib import Path
from moe_optim.integration.arguments import config_from_argv
from moe_optim.integration.script_runner import prepare_imports, run_script
script = Path(sys.argv[1])
prepare_imports(script, None)
run_script(script, sys.argv[2:], cpu=False)
"""


@pytest.fixture
def imports(monkeypatch):
    """Take back what `run` does to this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "scripts" / "pretrain_mine.py"
    path.parent.mkdir()
    path.write_text(PRETRAIN)
    return path


def refusal(capsys, *words):
    """Return the one line that the command refuses with."""
    assert cli.main(["run", *map(str, words)]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    return line


def test_a_script_sees_what_it_sees_under_python(tmp_path):
    """Its arguments, its name, its folder first on the path; and nothing heavy was imported."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "tell.py").write_text(TELL)
    (tmp_path / "tell.py").symlink_to("real/tell.py")
    told = []
    mine, given = str(Path(cli.__file__).parents[2]), os.environ.get("PYTHONPATH")
    search_path = os.pathsep.join([mine, given] if given else [mine])
    for words in (["tell.py"], ["-c", RUN_SCRIPT, "tell.py"]):
        done = subprocess.run(
            [sys.executable, *words, "--lr", "1", "--", "-x"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": search_path},
        )
        told.append(json.loads(done.stdout))
    under_python, under_run = told
    assert under_run == under_python
    assert under_run["argv"] == ["tell.py", "--lr", "1", "--", "-x"]
    assert under_run["path"][0] == str(tmp_path / "real")


@pytest.mark.parametrize("words", [["a", "--", "-x"], ["--", "--", "a"], ["--", "a", "--"], ["--"]])
def test_words_behind_a_script_reach_it_unchanged(words, script, imports, monkeypatch):
    """argparse drops two dashes that follow a positional argument."""
    passed = []
    monkeypatch.setattr(
        "moe_optim.commands.cli.run.run_script", lambda script, argv, cpu: passed.append(argv)
    )
    for given in ([str(script)], ["--", str(script)]):
        assert cli.main(["run", *given, *words]) == 0
    assert passed == [words, words]


def test_a_source_tree_wins_over_the_installed_megatron_and_children_get_it_too(tmp_path, imports):
    script, before = tmp_path / "mine.py", sys.path[1:]
    assert not prepare_imports(script, None).checkout
    assert sys.path == [str(tmp_path), *before]
    assert os.environ["PYTHONPATH"] == "/elsewhere"
    tree = write_fake_tree(tmp_path / "tree")
    package = prepare_imports(script, tree)
    assert (package.version, package.checkout) == ("0.19.1", True)
    assert package.path == str(tree / "megatron" / "core")
    assert sys.path[:2] == [str(tmp_path), str(tree)]
    assert os.environ["PYTHONPATH"] == f"{tree}{os.pathsep}/elsewhere"


def test_the_line_says_which_megatron_wins(tmp_path, imports, capsys, monkeypatch):
    """On the first rank alone; the script is found in the tree."""
    monkeypatch.setattr("moe_optim.commands.cli.run.run_script", lambda script, argv, cpu: None)
    tree = write_fake_tree(tmp_path / "tree")
    (tree / "mine.py").touch()
    assert cli.main(["run", "--megatron-lm", str(tree), "mine.py"]) == 0
    line = capsys.readouterr().err
    assert line.startswith(f"moe-optim run: megatron-core 0.19.1 from {tree}/megatron/core, a ")
    installed = importlib.metadata.version("megatron-core")
    assert f"overrides the installed {installed}" in line
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["run", "--megatron-lm", str(tree), "mine.py"]) == 0
    assert capsys.readouterr().err == ""


def test_without_a_launcher_it_is_one_rank(script, imports, monkeypatch):
    """torch then meets itself at a free port; what a launcher sets is left alone."""
    monkeypatch.setattr("moe_optim.commands.cli.run.run_script", lambda script, argv, cpu: None)
    cli.main(["run", str(script)])
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", "0")
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    cli.main(["run", str(script)])
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node7", "29500")


def test_a_script_or_a_source_tree_that_is_none_is_refused(tmp_path, capsys, script, imports):
    tree, empty = write_fake_tree(tmp_path / "tree"), tmp_path / "empty"
    empty.mkdir()
    missing = tmp_path / "none"
    for words, said in (
        (["--megatron-lm", tree, "none.py"], f"a script at none.py or {tree / 'none.py'}"),
        (["none.py"], "give --megatron-lm PATH"),
        (["--megatron-lm", missing, script], "got no folder"),
        (["--megatron-lm", missing, "in_the_tree.py"], "got no folder"),
        (["--megatron-lm", empty, script], "a folder without megatron/core"),
        ([script, "--moe-optim-set", "format=mxfp8"], "need --use-moe-grouped-optim"),
    ):
        assert said in refusal(capsys, *words)


def test_a_megatron_beside_the_script_is_not_mixed_with_the_source_tree(tmp_path, capsys, imports):
    """What stands beside a script is imported first, as under python: then both are refused."""
    own, tree = (write_fake_tree(tmp_path / name) for name in ("own", "tree"))
    (own / "mine.py").touch()
    line = refusal(capsys, "--megatron-lm", tree, own / "mine.py")
    assert f"expected megatron.core from there, got {own}/megatron/core" in line


def test_the_flag_is_refused_for_another_version(tmp_path, capsys, imports, script):
    """Before anything of it is imported."""
    tree = write_fake_tree(tmp_path / "tree", "0.21.0")
    line = refusal(capsys, "--megatron-lm", tree, script, *PLUGIN)
    assert "--use-moe-grouped-optim: megatron-core: expected >=0.19,<0.21, got 0.21.0" in line


RECIPE = """
megatron_args: {--lr: 1e-3, --num-layers: 3, --bf16: true, --mock-data: false}
moe_optim: {format: nvfp4, wire: bf16}
"""


def test_a_recipe_gives_all_of_its_flags_and_arguments_win(script, tmp_path, imports, monkeypatch):
    """Those of the plug-in, too; a flag that a recipe has off is left out."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE)
    seen = []
    monkeypatch.setattr(
        "moe_optim.commands.cli.run.run_script", lambda script, argv, cpu: seen.append(argv)
    )
    mine = ["--lr", "1", "--moe-optim-set", "wire=quantized"]
    assert cli.main(["run", "--recipe", str(recipe), str(script), *mine]) == 0
    (argv,) = seen
    given = ["--lr", "1e-3", "--num-layers", "3", "--bf16", "--use-moe-grouped-optim"]
    assert argv == [*given, "--moe-optim-recipe", str(recipe), *mine]
    assert config_from_argv(argv) == MoEOptimConfig(format="nvfp4", wire="quantized")


def test_a_recipe_for_other_versions_is_refused_and_hardware_is_the_launchers(
    script, tmp_path, capsys, imports, monkeypatch
):
    monkeypatch.setattr("moe_optim.commands.cli.run.run_script", lambda script, argv, cpu: None)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("requires: {gpus: 256, sm: 100, ranks: 256}\nmoe_optim:\n")
    assert cli.main(["run", "--recipe", str(recipe), str(script)]) == 0
    recipe.write_text("requires: {megatron-core: '<0.19'}\nmoe_optim:\n")
    line = refusal(capsys, "--recipe", recipe, script)
    assert line.startswith(f"error: {recipe}: requires: expected more than this machine has.")


def run_and_examine(script, argv):
    """Run a script in a rank, on its way to a GPU, and return what is rebound afterwards."""
    os.environ["PYTHONPATH"] = ""
    prepare_imports(script, None)
    run_script(script, argv, cpu=False)
    return [patch.id for patch in (*SCRIPT, *PATCHES) if patch_state(patch) == "applied"]


def bindings():
    """Return every global of every module of Megatron and torch, and torch's settings."""
    return {
        f"{name}:{key}": value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("megatron", "torch")
        for key, value in list(_names_of(module).items())
    }


def _names_of(module):
    if isinstance(module, ConfigModule):  # lends copies: equal ones are one string here
        settings = module.shallow_copy_dict()
        return {key: sys.intern(repr(value)) for key, value in settings.items()}
    return vars(module)


def run_and_compare(script, cpu):
    """Run a script without the plug-in's flag, and return everything that is another afterwards."""
    os.environ["PYTHONPATH"] = ""
    for name in ("TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        os.environ.pop(name, None)
    variables, before = dict(os.environ), bindings()
    run_script(script, ["--lr", "1"], cpu=cpu)
    after = bindings()
    rebound = {name for name, value in before.items() if after.get(name) is not value}
    return rebound, dict(os.environ.items() - variables.items()), sys.argv[1:]


@pytest.fixture
def importing_script(tmp_path):
    path = tmp_path / "import.py"
    path.write_text("import megatron.training\n")
    return path


def test_without_the_flag_nothing_is_replaced_on_gpus(importing_script):
    """Every global of Megatron and torch is the same object, and so are arguments and variables."""
    ((rebound, variables, argv),) = run_ranks(1, run_and_compare, importing_script, False)
    assert rebound == set()
    assert variables == {}
    assert argv == ["--lr", "1"]


def test_the_flag_installs_the_plugin_and_the_parser_takes_its_settings(tmp_path):
    """A parser that the script fills itself with the plug-in's flags is left to do so."""
    script = tmp_path / "parse.py"
    script.write_text(
        "import sys\n"
        "from megatron.training.arguments import parse_args\n"
        "from moe_optim.integration.arguments import add_moe_optim_arguments\n"
        "from moe_optim.integration.installation import installed_config\n"
        "for provider in (None, add_moe_optim_arguments):\n"
        "    args = parse_args(provider)\n"
        "    assert args.use_moe_grouped_optim and args.moe_optim_set == ['format=mxfp8']\n"
        "assert installed_config().format == 'mxfp8'\n"
    )
    (applied,) = run_ranks(1, run_and_examine, script, PLUGIN)
    assert {"script-arguments", "distributed-optimizer", "local-experts"} <= set(applied)


def train_through_run(script, flags):
    """Train as a rank of `moe-optim run` does; None stands for the entry of `moe-optim train`."""
    import moe_optim.commands.train.pretrain as entry

    if script is not None:
        os.environ["PYTHONPATH"] = ""

        def run(argv):
            assert cli.main(["run", str(script), *argv]) == 0

        entry.train = run
    return pretrain([*SHORT, *flags], None)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(1, PLUGIN, id="flag"),
        pytest.param(2, [], id="no flag, 2 ranks", marks=pytest.mark.extended),
    ],
)
def test_an_unmodified_script_trains_as_moe_optim_train_does(script, ranks, flags):
    """Losses, masters, moments and weights are equal to the bit; so are the classes."""
    got = run_ranks(ranks, train_through_run, script, flags)
    want = run_ranks(ranks, train_through_run, None, flags)
    for mine, other in zip(got, want, strict=True):
        assert_same_run(mine, other, what="run against train")
        optimizer = "GroupedDistributedOptimizer" if flags else "DistributedOptimizer"
        assert mine.classes == other.classes == {optimizer}
    assert len(got[-1].losses) == 2
