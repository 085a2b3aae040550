"""Documents say what the code and the measurements say."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from moe_optim.commands.cli.main import build_parser
from moe_optim.config import MoEOptimConfig, field_names, plain_yaml, recipes, spell, spell_values
from moe_optim.integration.patching.patches import PATCHES
from moe_optim.integration.patching.planning import settings_of_stocks_step
from moe_optim.optimizer.requirements import _refused_settings
from tools.documents import code_tables, results_index
from tools.documents.blocks import BLOCKS, ROOT, blocks_in, documents, made, regenerated
from tools.documents.measured_tables import RESULTS, RESULTS_OF, read_result
from tools.documents.pictures import PICTURES, is_current

README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 950
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in documents()}
every_document = pytest.mark.parametrize("document", DOCUMENTS)


# Generated blocks


@every_document
def test_regenerating_changes_nothing(document):
    """Where this fails: ``make docs``."""
    assert regenerated(DOCUMENTS[document]) == DOCUMENTS[document]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_was_drawn_from_these_figures(name):
    """Where this fails: ``make docs``."""
    assert is_current(name)


def test_every_block_is_shown_somewhere_and_marks_come_in_pairs():
    shown = {name for text in DOCUMENTS.values() for name in blocks_in(text)}
    assert shown == set(BLOCKS)
    for text in DOCUMENTS.values():
        marks = re.findall("^<!-- (?:generated: .*|end) -->$", text, re.M)
        assert len(marks) == 2 * len(blocks_in(text))


def test_a_block_that_says_something_else_is_found():
    stale = "before\n<!-- generated: knobs -->\n\nsomething else\n\n<!-- end -->\nafter"
    made = regenerated(stale)
    assert "something else" not in made
    assert code_tables.knobs() in made
    assert made.startswith("before\n<!-- generated: knobs -->\n")
    assert made.endswith("\n<!-- end -->\nafter")


def test_every_patch_is_in_its_table_word_for_word_and_no_other():
    text = DOCUMENTS["patches/README.md"]
    for patch in PATCHES:
        target = patch.target.removeprefix("megatron.")
        fits = code_tables.patch_fits(patch)
        row = [f"`{patch.id}`", f"`{target}`", fits, patch.because, patch.remove_when]
        assert f"| {' | '.join(row)} |" in text
    assert re.findall(r"^\| `([^`]+)` \|", text, re.M) == [patch.id for patch in PATCHES]


def test_every_knob_is_in_its_table_with_values_default_and_meaning():
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| `(.*?)` \| (.+) \|$", DOCUMENTS["docs/configuration.md"], re.M
    )
    assert [name for name, *_ in rows] == list(field_names())
    for name, values, default, meaning in rows:
        assert re.findall("`(.*?)`", values) == spell_values(name)
        assert default == spell(getattr(MoEOptimConfig(), name))
        assert len(meaning.split()) > 5


# Figures: what a document quotes comes from a file that it links to


@every_document
def test_a_document_links_to_the_results_that_its_figures_come_from(document):
    text = DOCUMENTS[document]
    for block in blocks_in(text):
        for file in RESULTS_OF.get(block, ()):
            assert f"recipes/results/{file})" in text, f"{block} comes from {file}"


def test_every_result_is_quoted_and_every_link_to_one_is_of_a_figure():
    """A new result file needs a block that is made from it."""
    quoted = {file for files in RESULTS_OF.values() for file in files}
    assert quoted == {path.name for path in RESULTS.glob("*.json")}
    for text in DOCUMENTS.values():
        linked = {
            Path(link).name for link in re.findall(r"\]\(([^)]*results/[^)#]+\.json)\)", text)
        }
        assert linked <= {file for block in blocks_in(text) for file in RESULTS_OF.get(block, ())}


BEFORE_VERSIONS = {"gather-4x-h200"}
"""Measured on GPUs when reports did not name versions yet."""

READ_NOT_RUN = {"patch-sources", "published-recipes"}
"""Of sources that are compared on any machine."""


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_a_result_says_what_measured_it(name):
    """Command, commit, device and versions; of each row, run or file where they differ."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    parts = [part for key in ("rows", "runs") for part in values(report.get(key, ()))]
    files = [file for part in parts for file in values(part.get("files", ()))]
    said = {key for record in (report, *parts, *files) for key, value in record.items() if value}
    said |= {"command"} & {key.removesuffix("s") for key in said}
    missing = {"command", "commit", "device", "versions"} - said
    assert missing == {
        *(["versions"] if name in BEFORE_VERSIONS else []),
        *(["device"] if name in READ_NOT_RUN else []),
    }


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_a_result_of_a_gpu_says_which_kernels_it_measured(name):
    """Of each part that names its device, so that a document can say that they have changed."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    parts = [part for key in ("rows", "runs") for part in values(report.get(key, ()))]
    for part in (report, *parts):
        if "NVIDIA" in str(part.get("device")):
            assert re.search('"kernels": "[0-9a-f, ]{12,}"', json.dumps(part))


def test_below_a_table_of_figures_stands_what_measured_them():
    """Device, versions and commit of every block that has a table and comes from results."""
    shown = [name for name in RESULTS_OF if "| --- |" in BLOCKS[name]()]
    assert len(shown) > 30
    for name in shown:
        (line,) = re.findall(r"^Measured: *\n?(.+?\.)\n*\Z", made(name), re.M | re.S)
        for file in RESULTS_OF[name]:
            report = json.loads((RESULTS / file).read_text())
            said = [report.get(key) for key in ("device", "commit")]
            if "torch" in report.get("versions", ()):
                said.append(f"torch {report['versions']['torch']}")
            assert all(one in line for one in said if isinstance(one, str)), (name, file)


def test_a_document_says_that_kernels_have_changed_since(monkeypatch):
    """Of what was measured with others, and of nothing else."""
    report = json.loads((RESULTS / "requantize-h200.json").read_text())
    monkeypatch.setattr(results_index, "_kernels_of_today", lambda: report["kernels"])
    assert made("step-kernels").endswith(f"commit {report['commit']}.")
    monkeypatch.setattr(results_index, "_kernels_of_today", lambda: "0123456789ab")
    assert made("step-kernels").endswith("; kernels have changed since.")
    assert made("losses").endswith(f"commit {read_result('losses-cpu.json')['commit']}.")


def values(records):
    """Return the records of a list, or of a mapping of names."""
    return list(records.values() if isinstance(records, dict) else records)


# Links, tests and commands that documents name


def anchors(text):
    """Return what may follow # in a link to a document, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")
NAMED_TEST = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(\w+))?`")


def test_documents_have_figures_links_and_names_of_tests():
    """Of which one document may have none, but not all of them."""
    texts = "\n".join(DOCUMENTS.values())
    assert any(RESULTS_OF.get(block) for block in blocks_in(texts))
    assert any(anchor for _, anchor in LINK.findall(texts))
    assert any(function for _, function in NAMED_TEST.findall(texts))


@every_document
def test_links_lead_somewhere(document):
    folder = (ROOT / document).parent
    for link, anchor in LINK.findall(DOCUMENTS[document]):
        target = folder / link if link else ROOT / document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}#{anchor}"


@every_document
def test_tests_that_are_named_exist(document):
    """By their whole path, or by a file name that is the only one."""
    names = NAMED_TEST.findall(DOCUMENTS[document])
    upstream = {"docs/testing.md"}  # which names Megatron's own
    for name, function in names:
        path = ROOT / name
        if not name.startswith("tests/"):
            found = [one for one in ROOT.glob(f"tests/**/{name}")]
            if not found and document in upstream:
                continue
            assert len(found) == 1, f"{name}: {found}"
            (path,) = found
        assert path.is_file(), name
        assert not function or f"def {function}(" in path.read_text(encoding="utf-8"), function


def commands_in(text):
    """Yield the arguments of each ``moe-optim`` in code blocks; what has brackets is a synopsis."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"(?:\$ |torchrun .* )?(?:\.venv/bin/)?moe-optim (.*)", line.strip())
            if match and "[" not in line:
                yield shlex.split(match[1].partition(" #")[0].partition(" |")[0])


@every_document
def test_commands_parse(document):
    for argv in commands_in(DOCUMENTS[document]):
        build_parser().parse_args([arg for arg in argv if arg != "..."])


def test_commands_of_the_readme_are_found():
    """So that the test above has something to parse."""
    assert [argv[0] for argv in commands_in(README)] == ["report", "doctor", "train", "run"]


@pytest.mark.parametrize("command", ["train", "test", "docs", "lint", "life-cycle", "fuzz"])
def test_the_commands_of_the_makefile_are_named_and_exist(command):
    assert any(f"make {command}" in text for text in DOCUMENTS.values())
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M)


# The README


def test_the_readme_begins_with_two_commands():
    """Those of a fresh machine, each of which sets it up."""
    (first, *_) = re.findall(r"^```\n(.*?)^```", README, re.M | re.S)
    assert [line.split("  ")[0] for line in first.splitlines()] == ["make train", "make test"]


def test_continuous_integration_calls_the_two_commands_and_lint():
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make ([\w-]+)", script, re.M) == ["lint", "train", "test"]


def test_the_readme_is_short():
    assert len(README.split()) <= MOST_WORDS


def test_the_code_of_the_readme_runs():
    """All Python of it, in its order."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(blocks) == 2
    code = "\n".join(blocks) + "\nassert (values - weights).abs().max() < 0.5\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# What is refused


def flags_in(text):
    return set(re.findall(r"--[a-z][a-z0-9-]+", text))


def section(text, heading):
    """Return what stands below a heading, up to the next one of its kind."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def refused_flags():
    """Return the flags that a document says are refused whatever experts are used."""
    text = section(DOCUMENTS["docs/supported.md"], "What is refused")
    return flags_in(text.partition("\nWith portable experts")[0])


def supported_flags():
    """Return the flags of the rows that begin with "supported"."""
    rows = (line.split("|") for line in DOCUMENTS["docs/supported.md"].splitlines())
    cells = (row[1] for row in rows if len(row) > 3 and row[2].strip().startswith("supported"))
    return flags_in(" ".join(cells))


def test_the_readme_refuses_what_is_refused_and_nothing_that_works():
    (said,) = re.findall(r"^- Refused: .*?\.$", section(README, "Limits"), re.M | re.S)
    flags = flags_in(said)
    assert flags and flags <= refused_flags()
    assert not flags & supported_flags()


def test_every_flag_that_the_optimizer_refuses_is_documented():
    config, ddp_config, model = (mock.MagicMock() for _ in range(3))
    config.main_params_dtype, config.optimizer = None, "sgd"
    model.gtp_weight_remat_size = model.expert_gtp_weight_remat_size = 1
    knobs = MoEOptimConfig()
    refused = _refused_settings(config, ddp_config, [model], knobs, quantized=True, tensorwise=True)
    flags = {re.match(r".*?(--[a-z][a-z0-9-]+)", setting)[1] for setting in refused}
    assert flags <= refused_flags()


def test_all_that_makes_a_step_megatrons_is_documented_apart_from_what_is_refused():
    """A row each; a command line that is refused with ``step: fused`` alone is none."""
    config = mock.MagicMock(exp_avg_dtype="torch.float8", exp_avg_sq_dtype="torch.float8")
    settings = settings_of_stocks_step(config, masters_of_adam=True)
    rows = section(DOCUMENTS["docs/supported.md"], "What falls back to Megatron's step")
    _, _, *documented = re.findall(r"^\| .*\|$", rows, re.M)
    assert len(documented) == len(settings)
    assert flags_in(" ".join(settings)) <= flags_in(" ".join(documented))
    alone = {"--loss-scale", "--exp-avg-dtype", "--exp-avg-sq-dtype"}
    assert alone <= flags_in(" ".join(documented))
    assert not alone & refused_flags()


def test_the_bounds_of_a_recipe_are_those_that_are_documented():
    text = " ".join(DOCUMENTS["recipes/README.md"].split())
    assert (
        f"at most {plain_yaml.MAX_BYTES:,} bytes, {recipes._MAX_CHAIN} files, "
        f"{plain_yaml._MAX_VALUES:,} values with aliases written out, {plain_yaml._MAX_LEVELS} "
        f"levels, and whole numbers of {plain_yaml._MAX_DIGITS} digits"
    ) in text
