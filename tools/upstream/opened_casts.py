"""A pytest plug-in of both sides: Transformer Engine says that this GPU has MXFP8.

Its casts into MXFP8 run on a Hopper, and so do tests that multiply nothing. Loaded by its bare
name, as ``outcome_lines`` is.
"""

import pytest


@pytest.hookimpl
def pytest_load_initial_conftests():
    from transformer_engine.pytorch import quantization

    quantization.check_mxfp8_support = lambda: (True, "")
