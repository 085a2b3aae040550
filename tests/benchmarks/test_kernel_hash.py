"""The hash of kernels changes with what a GPU executes, and with nothing else."""

import pytest

from benchmarks.kernel_hash import hash_kernels, kernel_sources

CODE = """
TILE = 64

@triton.jit
def scale(values, factor):
    return values * factor

@triton.jit
def kernel(source, out):
    loaded = tl.load(source + tl.arange(0, TILE))
    tl.store(out, scale(values=loaded, factor=2.0))
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        pytest.param("def kernel(", "def requantize(", True, id="the name of a kernel"),
        pytest.param("source", "masters", True, id="the name of a parameter"),
        pytest.param("loaded", "read", True, id="the name of a local"),
        pytest.param("TILE", "TILE_NUMEL", True, id="the name of a tuned number"),
        pytest.param("scale", "multiply", True, id="the name of a function that is called"),
        pytest.param("factor", "by", True, id="the name of an argument in a call"),
        pytest.param("    loaded", "    # why\n    loaded", True, id="a comment"),
        pytest.param("    loaded", '    """What."""\n    loaded', True, id="a docstring"),
        pytest.param("TILE = 64", "import triton\nTILE = 64", True, id="imports"),
        pytest.param("TILE = 64", "TILE = 64\ndef launch():\n    pass", True, id="host code"),
        pytest.param("64", "128", False, id="a tuned number"),
        pytest.param("2.0", "4.0", False, id="a number in a kernel"),
        pytest.param("* factor", "/ factor", False, id="an operator of a function that is called"),
        pytest.param("tl.load", "tl.atomic_add", False, id="an intrinsic"),
        pytest.param("values * factor", "factor * factor", False, id="another local"),
    ],
)
def test_names_do_not_count_and_arithmetic_does(old, new, same):
    assert old in CODE
    changed = CODE.replace(old, new)
    assert (hash_kernels({"a.py": changed}) == hash_kernels({"a.py": CODE})) is same


def test_files_do_not_count():
    first, second = CODE.split("@triton.jit\ndef kernel")
    apart = {"b/one.py": first, "two.py": f"@triton.jit\ndef kernel{second}"}
    assert hash_kernels(apart) == hash_kernels({"a.py": CODE})


def test_the_kernels_of_the_package_are_read():
    sources = kernel_sources()
    whole = hash_kernels(sources)
    for name in ("adam", "requantize_mxfp8_kernel"):
        assert any(f"def {name}" in source for source in sources.values()), name
    changed = {name: text.replace("sqrt.approx", "rsqrt.approx") for name, text in sources.items()}
    assert changed != sources
    assert hash_kernels(changed) != whole
