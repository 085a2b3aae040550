"""Checkouts of slime and miles, which the tests take one after the other."""

import os

import pytest

CHECKOUTS = {name: os.environ.get(f"{name.upper()}_PATH") for name in ("slime", "miles")}


@pytest.fixture(
    params=[
        pytest.param(
            name,
            marks=pytest.mark.skipif(not path, reason=f"{name.upper()}_PATH names no checkout"),
        )
        for name, path in CHECKOUTS.items()
    ],
)
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)
