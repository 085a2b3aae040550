"""A pickle is read to the values that it holds, and to the words of what it would have made."""

import argparse
import collections
import enum
import io
import os
import pickle
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.checkpoint.files.archives import Archive
from moe_optim.checkpoint.files.pickles import (
    ForeignNameError,
    Made,
    Record,
    Stored,
    foreign_name,
    read_pickle,
)
from tests.support.hostile.hostile_pickles import BOMBS, CODE

atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=False),
    st.text(max_size=300),
    st.binary(max_size=300),
)
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=5),
    ),
    max_leaves=30,
)


@given(value=values, protocol=st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_values_come_back_as_python_unpickles_them(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol)) == value


class Color(enum.Enum):
    RED = 2


class Nothing:
    """Is made without arguments, and given a state."""

    def __init__(self):
        self.size = 3


class Call:
    def __init__(self, function, *args):
        self.made = function, args

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_is_named_stays_a_name_and_what_is_called_its_words(protocol, tmp_path):
    def read(value):
        return read_pickle(pickle.dumps(value, protocol))

    assert str(read(len)) == "builtins.len"  # also in protocol 2, which says __builtin__
    assert read(collections.OrderedDict(a=1)) == {"a": 1}
    assert read(torch.Size([2, 3])) == (2, 3)
    assert str(read(torch.bfloat16)) == "torch.bfloat16"
    red, nothing = read(Color.RED), read(Nothing())
    assert (str(red.by), red.args) == (f"{__name__}.Color", (2,))
    assert (str(nothing.by), nothing.args, nothing.state) == (
        f"{__name__}.Nothing",
        (),
        {"size": 3},
    )
    made = read(Call(os.mkdir, str(tmp_path / "ran")))
    assert (str(made.by), made.args) == ("posix.mkdir", (str(tmp_path / "ran"),))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_pickle_takes_much_more_memory_than_it_has_bytes(bomb):
    content = b"\x80\x04" + BOMBS[bomb] + b"."
    tracemalloc.start()
    try:
        read_pickle(content)
    except ValueError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 20_000 + 250 * len(content)


REFUSED = {
    "cut off": b"\x80\x04K",
    "empty": b"",
    "without an end": b"\x80\x04N",
    "without a protocol": b"N.",
    "a call of text": b"\x80\x04\x8c\x03len)R.",
    "a call of what was made": b"\x80\x04cx\ny\n)R)R.",
    "elements of text": b"\x80\x04\x8c\x01aNa.",
    "a state of a class": b"\x80\x04cx\ny\n}b.",
    "a list as a key": b"\x80\x04}]Ns.",
    "more names than any checkpoint has": b"\x80\x04"
    + b"".join(b"cx\n%d\n" % number for number in range(5000))
    + b".",
    "text of another encoding": b"\x80\x04c_codecs\nencode\n\x8c\x01a\x8c\x03zip\x86R.",
    "a size of a list, which is copied": b"\x80\x04ctorch\nSize\n]\x85R.",
    "an operation of protocol 0": b"I1\n.",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_pickler_writes_is_refused(name):
    with pytest.raises(ValueError):  # noqa: PT011  # whatever it says
        read_pickle(REFUSED[name])


def test_a_far_memo_place_is_refused_for_the_readers_that_reserve_all_before_it():
    """Megatron's is one of them: what passes here is unpickled there."""
    with pytest.raises(ValueError, match="memo place 2,147,483,648 in a pickle of 9 bytes"):
        read_pickle(b"\x80\x02Nr" + struct.pack("<I", 2**31) + b".")


def archive(value):
    content = io.BytesIO()
    torch.save(value, content)
    return Archive(content)


def test_tensors_in_an_object_are_words_too():
    made = archive({"weight": torch.ones(3)}).load()["weight"]
    assert isinstance(made, Made) and str(made.by) == "torch._utils._rebuild_tensor_v2"
    assert isinstance(made.args[0], Stored) and made.args[0].words[0] == "storage"


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_an_object_that_names_code_is_no_plain_data(code, protocol):
    module, name = CODE[code]
    content = b"\x80%cc%b\n%b\n." % (protocol, module.encode(), name.encode())
    assert foreign_name(content).endswith(f".{name}")
    with pytest.raises(ForeignNameError) as raised:
        read_pickle(content, lambda _: False)
    assert raised.value.named.name == name


def test_plain_data_are_values_tensors_and_what_the_caller_knows():
    plain = archive(argparse.Namespace(a=[torch.ones(2), {1, 2}], b=collections.OrderedDict(c=1)))
    assert foreign_name(plain.pickled()) is None
    red = archive(Color.RED).pickled()
    assert foreign_name(red) == f"it names {__name__}.Color"
    assert foreign_name(red, lambda named: named.name == "Color") is None


def _record(value, protocol=4):
    names = {(__name__, kind.__qualname__) for kind in (Nothing, Color, Call)}
    return read_pickle(pickle.dumps(value, protocol), records=names)


def test_a_record_is_the_states_that_a_pickle_gives_it_and_runs_nothing():
    record = _record(Nothing())
    assert isinstance(record, Record) and list(record) == [{"size": 3}]
    assert str(type(record)) == f"{__name__}.Nothing"
    assert len({record: 1, _record(Nothing()): 2}) == 2  # a key by identity, never by content
    assert list(_record(Color.RED)) == []  # made with arguments, without a state
    name = f"c{__name__}\nNothing\n".encode()
    for code, want in (
        (b"]K\x01aR.", None),  # arguments that are no tuple
        (b"(K\x01K\x02tR.", []),
        (b")R}b}b.", [{}, {}]),
        (b")RK\x00}s.", None),  # an item where there is none
    ):
        content = b"\x80\x04" + name + code
        try:
            assert list(read_pickle(content, records={(__name__, "Nothing")})) == want
        except ValueError:
            assert want is None
