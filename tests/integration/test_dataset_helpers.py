"""The helper of Megatron's datasets is made by Megatron, but where the wheel has it built."""

import pytest

from moe_optim import environment
from moe_optim.errors import ConfigError
from moe_optim.integration import dataset_helpers


@pytest.mark.parametrize(
    ("has_makefile", "is_built", "is_made"),
    [(False, True, False), (False, False, True), (True, True, True), (True, False, True)],
    ids=["wheel", "neither", "checkout", "checkout, not built"],
)
def test_megatron_makes_what_it_can_make_or_has_to(
    has_makefile, is_built, is_made, tmp_path, monkeypatch
):
    """The wheel has the helper and no Makefile; in a checkout ``make`` looks whether it is old."""
    made = []
    monkeypatch.setattr(dataset_helpers, "original", lambda target: lambda: made.append(target))
    monkeypatch.setattr(dataset_helpers, "find_folder", lambda module: tmp_path)
    monkeypatch.setattr(dataset_helpers, "find_spec", lambda module: module if is_built else None)
    if has_makefile:
        (tmp_path / "Makefile").touch()
    dataset_helpers.compile_helpers()
    assert made == ["megatron.core.datasets.utils:compile_helpers"] * is_made


def test_a_checkout_without_pybind11_is_refused_before_make_ends_the_run(tmp_path, monkeypatch):
    (tmp_path / "Makefile").touch()
    places = {"megatron.core.datasets": tmp_path}
    monkeypatch.setattr(environment, "find_folder", places.get)
    with pytest.raises(ConfigError, match=r"needs pybind11 to compile .*pip install 'pybind11'"):
        dataset_helpers.compile_helpers()
