"""Shells complete commands, options and files."""

import subprocess

import pytest

from moe_optim.commands.cli import main as cli


def completed(script, words):
    """Return what bash offers for the last of some words."""
    line = " ".join(words)
    program = (
        f'source "{script}"; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; '
        '_shtab_moe_optim; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "moe-optim.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        with pytest.raises(SystemExit) as exit:
            cli.main(["--print-completion", "bash"])
    assert exit.value.code == 0
    return path


def test_bash_completes_commands_options_and_files(script, tmp_path, capsys):
    (tmp_path / "own.yaml").touch()
    for words, offered in (
        (["pl"], {"plan"}),
        (["recipes", "co"], {"copy"}),
        (["plan", "quickstart", "--gpu"], {"--gpu", "--gpus", "--gpu-memory"}),
        (["convert", "a", "b", "--experts", "group"], {"grouped"}),
        (["plan", f"{tmp_path}/ow"], {f"{tmp_path}/own.yaml"}),
    ):
        assert completed(script, ["moe-optim", *words]) == offered
    with pytest.raises(SystemExit):
        cli.main(["--print-completion", "zsh"])
    assert capsys.readouterr().out.startswith("#compdef moe-optim")
