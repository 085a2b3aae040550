"""A pickle is read to the values that it holds, and to the words of what it would have made."""

import argparse
import collections
import enum
import io
import os
import pickle
import tracemalloc
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_optim.checkpoint.files.objects import ForeignNameError, load_object, require_plain
from moe_optim.checkpoint.files.plain_pickles import Made, Named, Stored, read_pickle
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
def test_what_is_named_stays_a_name_and_what_is_called_its_words(protocol):
    def read(value):
        return read_pickle(pickle.dumps(value, protocol))

    assert read(len) == Named("builtins", "len")  # also in protocol 2, which says __builtin__
    assert read(collections.OrderedDict(a=1)) == {"a": 1}
    assert read(torch.Size([2, 3])) == (2, 3)
    red, nothing = read(Color.RED), read(Nothing())
    assert (red.by, red.args) == (Named(__name__, "Color"), (2,))
    assert (nothing.by, nothing.args, nothing.state) == (
        Named(__name__, "Nothing"),
        (),
        {"size": 3},
    )
    made = read(Call(os.mkdir, "/nowhere/at/all"))
    assert (made.by, made.args) == (Named("posix", "mkdir"), ("/nowhere/at/all",))


def test_names_are_admitted_one_by_one():
    seen = []
    read_pickle(pickle.dumps([len, Color.RED]), seen.append)
    assert seen == [Named("builtins", "len"), Named(__name__, "Color")]


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
    "cut off in a text": b"\x80\x04\x8c\x09abc",
    "empty": b"",
    "without an end": b"\x80\x04N",
    "two values": b"\x80\x04NN.",
    "no value": b"\x80\x04.",
    "a value of an open mark": b"\x80\x04(N.",
    "a call of text": b"\x80\x04\x8c\x03len)R.",
    "a call of what was made": b"\x80\x04cx\ny\n)R)R.",
    "elements of text": b"\x80\x04\x8c\x01aNa.",
    "elements of a class": b"\x80\x04cx\ny\nNa.",
    "items of a list": b"\x80\x04]NNs.",
    "a state of a class": b"\x80\x04cx\ny\n}b.",
    "a list as a key": b"\x80\x04}]Ns.",
    "a tuple of tuples as a key": b"\x80\x04})\x85\x85Ns.",
    "a key without a value": b"\x80\x04}(Nu.",
    "a name that is no text": b"\x80\x04NN\x93.",
    "text of another encoding": b"\x80\x04c_codecs\nencode\n\x8c\x01a\x8c\x03zip\x86R.",
    "an operation of protocol 0": b"I1\n.",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_pickler_writes_is_refused(name):
    with pytest.raises(ValueError):  # noqa: PT011  # whatever it says
        read_pickle(REFUSED[name])


def archive(value):
    content = io.BytesIO()
    torch.save(value, content)
    return content


def test_tensors_in_an_object_are_words_too():
    value = load_object(archive({"weight": torch.ones(3)}))
    made = value["weight"]
    assert isinstance(made, Made) and made.by == Named("torch._utils", "_rebuild_tensor_v2")
    assert isinstance(made.args[0], Stored) and made.args[0].words[0] == "storage"


@pytest.mark.parametrize("code", CODE)
def test_an_object_that_names_code_is_no_plain_data(code):
    module, name = CODE[code]
    content = f"c{module}\n{name}\n.".encode()
    with pytest.raises(ForeignNameError) as raised:
        require_plain(archive_of(b"\x80\x02" + content), lambda _: False)
    assert raised.value.named.name == name
    require_plain(archive(argparse.Namespace(a=[torch.ones(2), {1, 2}])), lambda _: False)
    with pytest.raises(ForeignNameError, match="Color"):
        require_plain(archive(Color.RED), lambda _: False)
    require_plain(archive(Color.RED), lambda named: named.name == "Color")


def archive_of(pickled):
    """Return an archive of ``torch.save`` with another pickle."""
    source, target = zipfile.ZipFile(archive(None)), io.BytesIO()
    with zipfile.ZipFile(target, "w") as changed:
        for record in source.namelist():
            content = pickled if record.endswith("data.pkl") else source.read(record)
            changed.writestr(record, content)
    return target


def test_a_far_memo_place_is_refused_for_the_readers_that_reserve_all_before_it():
    """Megatron's is one of them: what passes here is unpickled there."""
    with pytest.raises(ValueError, match="memo place 2,147,483,648 in a pickle of 9 bytes"):
        read_pickle(b"\x80\x02Nr" + (2**31).to_bytes(4, "little") + b".")
