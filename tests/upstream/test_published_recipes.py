"""Published recipes pass the plug-in's own checks, or are refused for what is documented.

``MEGATRON_BRIDGE_PATH`` and ``MEGATRON_LM_PATH`` name what publishes them.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tools.upstream.stand_in_imports import find_bridge

BRIDGE = find_bridge()
MEGATRON_LM = os.environ.get("MEGATRON_LM_PATH", "")
DOCUMENT = Path(__file__).parents[2] / "docs/megatron-bridge.md"
NARROW = {"mxfp8", "nvfp4", "blockwise"}


def _read_bridge() -> list[Any]:
    from tools.upstream.published_recipes import FAMILIES, bridge_answers

    return list(bridge_answers(BRIDGE, list(FAMILIES)))


def _read_megatron_lm() -> list[Any]:
    from tools.upstream.published_recipes import megatron_lm_answers

    return megatron_lm_answers(Path(MEGATRON_LM))


def _undocumented(answers: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    """Return the recipes of quantized weights with a refusal that the document does not name."""
    document = DOCUMENT.read_text(encoding="utf-8")
    narrow = {one.name: one.refused for one in answers if one.kept in NARROW}
    assert narrow
    return {
        name: refused
        for name, refused in narrow.items()
        if not all(flag.partition(" (")[0] in document for flag in refused)
    }


@pytest.mark.skipif(BRIDGE is None, reason="MEGATRON_BRIDGE_PATH names no Megatron-Bridge")
def test_recipes_of_megatron_bridge_are_refused_for_what_is_documented():
    answers = run_ranks(1, _read_bridge)[0]
    assert all("te_quant.cfg" in one.unread for one in answers if one.unread)  # not in it
    assert not _undocumented(answers)


@pytest.mark.skipif(not MEGATRON_LM, reason="MEGATRON_LM_PATH names no Megatron-LM")
def test_all_recipes_of_megatron_lm_pass():
    answers = run_ranks(1, _read_megatron_lm)[0]
    assert answers
    assert not any(one.refused or one.unread for one in answers)


def _ask_nothing(folder: str) -> int:
    from tools.upstream.published_recipes import main

    try:
        return main(["--bridge", folder])
    except SystemExit as error:
        return int(error.code or 0)


def test_a_folder_without_recipes_is_refused(tmp_path):
    """It would count as one whose recipes all pass."""
    assert run_ranks(1, _ask_nothing, str(tmp_path)) == [2]
