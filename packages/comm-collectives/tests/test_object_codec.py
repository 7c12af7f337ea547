"""Objects as messages: what comes back, what is refused, and what no message can do."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import pickle
import re
import struct
import subprocess
import sys
import tracemalloc
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from comm_collectives.object_codec import (
    ObjectDecodeError,
    decode_object,
    encode_object,
    is_pickled,
    object_policy,
    register_object_type,
    set_object_policy,
)
from comm_collectives.object_codec.scalars import DTYPES
from comm_collectives.object_codec.wire import FILLER_BYTES, MAX_DEPTH, Tag
from comm_utils.errors import ArgumentError, ArgumentTypeError, CommError

NOTICES = pytest.mark.filterwarnings(
    "ignore:.*support is experimental:UserWarning", "ignore:.*quantized tensor creation functions.*:UserWarning"
)
HEADER = bytes(encode_object(None)[:-1])
SIZE = struct.Struct("=Q")


@register_object_type
@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0


@register_object_type
@dataclasses.dataclass(frozen=True)
class Frozen:
    values: tuple[int, ...]
    _: dataclasses.KW_ONLY
    total: int = dataclasses.field(init=False, default=-1)


@register_object_type
@dataclasses.dataclass
class Loud:
    value: int

    def __post_init__(self) -> None:
        CALLED.append(self.value)


@register_object_type
class Color(enum.Enum):
    RED = object()
    BLUE = 2


@register_object_type
class Access(enum.Flag):
    READ = 1
    WRITE = 2
    EXECUTE = 4


@register_object_type
class Level(enum.IntEnum):
    LOW = 1


@register_object_type
class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Unregistered:
    state: Any


class Sub(dict):  # type: ignore[type-arg]
    pass


CALLED: list[int] = []


def round_trip(value: Any) -> Any:
    return decode_object(encode_object(value, allow_pickle=False), allow_pickle=False)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, not-a-number included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and tensor_bytes(a) == tensor_bytes(b)
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Point):
        return same((a.x, a.y), (b.x, b.y))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    return bool(a == b)


def tensor_bytes(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
    numbers: list[int] = flat.tolist()
    return numbers


# --- what comes back


VALUES = [
    None,
    True,
    False,
    ...,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**63) - 1,
    10**1000,
    -(10**1000),
    0.0,
    -0.0,
    math.inf,
    math.nan,
    1e-320,
    complex(-0.0, math.nan),
    "",
    "text",
    "ünïcode \U0001f600 \0",
    "lone surrogate \udcff",
    b"",
    b"bytes\0",
    bytearray(b"mutable"),
    b"x" * 100_000,
    bytearray(100_000),
    "long" * 30_000,
    [],
    (),
    set(),
    frozenset(),
    {},
    [1, [2, [3, ()]]],
    [1, 2, 3, 4, 5],
    (1, 2, 3, 4, -5),
    [0.5, math.nan, -0.0, math.inf],
    (0.5, 1.5, 2.5, 3.5),
    [1, 2, 3, 2**70],
    [1, 2.0, 3, 4.0],
    [True, 1, 2, 3],
    {1, "a", None, (1, 2)},
    frozenset([frozenset(), 1]),
    {"z": 1, "a": 2, 3: {"nested": None}, (1, "x"): 0.5, None: b""},
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(list, a=[1]),
    defaultdict(None, {1: 2}),
    Counter("hello"),
    Namespace(),
    Namespace(lr=1e-3, layers=[1, 2], inner=Namespace(name="adam")),
    SimpleNamespace(a=None, __class__=3),
    deque([1, "x"]),
    deque([1, 2], maxlen=5),
    deque(maxlen=0),
    range(10),
    range(10**30, 5, -7),
    slice(None, 3, 2),
    slice("a", None),
    date(2026, 2, 28),
    time(23, 59, 58, 999_999, fold=1),
    datetime(1, 1, 1),
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc, fold=1),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3, seconds=5), "named")),
    time(1, tzinfo=timezone(timedelta(hours=2))),
    timedelta(days=-5, microseconds=7),
    timedelta.max,
    timezone.utc,
    Decimal("-1.230E+5"),
    Decimal("0"),
    uuid.UUID(int=2**100),
    Path("/some/../path"),
    PurePosixPath("a/b"),
    PureWindowsPath("c:\\x"),
    torch.float8_e4m3fn,
    torch.device("cuda:3"),
    torch.device("cpu"),
    torch.Size([]),
    torch.Size([2, 3, 4, 5]),
    Point(1, [Point(2)]),
    Color.RED,
    Color.BLUE,
    Level.LOW,
    Access.READ,
    Access.READ | Access.EXECUTE,
    Access(0),
    Pair(1, Pair("x", None)),
]


def named(value: object) -> str:
    # Processes that run tests side by side name them alike, whatever order a set has in each.
    shown = sorted(map(repr, value)) if isinstance(value, set | frozenset) else value
    return f"{type(value).__name__}-{shown!r:.30}"


@pytest.mark.parametrize("value", VALUES, ids=named)
def test_comes_back_equal_in_type_and_value(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip([value, {"key": value}]), [value, {"key": value}])


def test_nan_keeps_its_payload() -> None:
    value = struct.unpack("=d", struct.pack("=Q", 0xFFF8_0000_DEAD_BEEF))[0]
    assert struct.pack("=d", round_trip(value)) == struct.pack("=d", value)
    assert struct.pack("=d", round_trip([value] * 5)[4]) == struct.pack("=d", value)


def test_decimals_without_a_value() -> None:
    assert str(round_trip(Decimal("sNaN123"))) == "sNaN123"
    assert str(round_trip(Decimal("-Infinity"))) == "-Infinity"


def test_copies_are_independent_and_mutable() -> None:
    shared = [1]
    a, b = round_trip((shared, shared))
    a.append(2)
    assert (a, b, shared) == ([1, 2], [1], [1])  # sharing is not kept
    copied = round_trip(bytearray(b"abc"))
    copied += b"d"
    assert copied == b"abcd"


def test_counter_deque_and_defaultdict_still_work_as_such() -> None:
    assert round_trip(Counter("aa")) + Counter("a") == Counter(a=3)
    assert round_trip(defaultdict(list))["new"] == []
    limited = round_trip(deque([1, 2], maxlen=2))
    limited.append(3)
    assert list(limited) == [2, 3]


def test_an_object_does_not_depend_on_the_message_afterwards() -> None:
    message = encode_object([torch.arange(5), numpy.arange(5), b"bytes", bytearray(b"x")])
    value = decode_object(message)
    message[:] = b"\xff" * len(message)
    assert value[0].tolist() == [0, 1, 2, 3, 4]
    assert value[1].tolist() == [0, 1, 2, 3, 4]
    assert value[2:] == [b"bytes", bytearray(b"x")]


def test_every_kind_of_buffer_is_decoded() -> None:
    message = encode_object({"t": torch.ones(3)})
    for buffer in (message, bytes(message), memoryview(message), memoryview(bytes(message))):
        assert decode_object(buffer)["t"].tolist() == [1, 1, 1]


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
    | st.dates()
    | st.times()
    | st.datetimes(timezones=st.just(timezone.utc) | st.none())
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.sampled_from(list(DTYPES.values()))
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4),
    max_leaves=5,
)
objects = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(st.floats())
        | st.lists(st.integers())
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.builds(Point, inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=30,
)


@settings(deadline=None)
@given(objects)
def test_any_object_comes_back(value: Any) -> None:
    again = round_trip(value)
    assert same(again, value)
    assert encode_object(again, allow_pickle=False) == encode_object(again, allow_pickle=False)


# --- tensors


def opaque(name: str) -> bool:
    return name.startswith("q") or name in {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}


@NOTICES
@pytest.mark.parametrize("name", sorted({str(dtype)[6:] for dtype in DTYPES.values()} - {"bool"}))
def test_tensors_of_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    if opaque(name):
        tensor = torch.empty(2, dtype=dtype)
        remedy = "its int_repr()" if tensor.is_quantized else "view(torch.uint8) of it"
        with pytest.raises(ArgumentTypeError, match=re.escape(f"got a tensor of {dtype}; send {remedy}")):
            encode_object(tensor)
        if not tensor.is_quantized:
            assert same(round_trip(tensor.view(torch.uint8)), tensor.view(torch.uint8))
        return
    raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) * 7
    tensor = raw.view(dtype).view(3, 4)
    for case in (tensor, tensor.t(), tensor[1:, ::2], tensor[0, 1], tensor[:0]):
        again = round_trip({"t": case})["t"]
        assert again.is_contiguous()
        assert same(again, case)


def test_bool_tensors() -> None:
    tensor = torch.tensor([[True, False], [False, True]])
    assert same(round_trip(tensor), tensor)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=5), st.randoms(use_true_random=False))
def test_tensors_of_every_shape_and_stride(shape: list[int], random: Any) -> None:
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).view(shape).permute(order)
    assert same(round_trip(tensor), tensor)


def test_views_with_overlap_and_lazy_views_are_written_out() -> None:
    assert same(round_trip(torch.ones(1, 3).expand(4, 3)), torch.ones(4, 3))
    lazy = torch.tensor([1 + 2j]).conj()
    again = round_trip(lazy)
    assert again.tolist() == [1 - 2j]
    assert not again.is_conj()
    assert round_trip(torch.imag(lazy)).tolist() == [-2.0]


def test_gradients_and_parameters() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert round_trip(leaf).requires_grad
    computed = round_trip(leaf * 2)
    assert not computed.requires_grad
    assert computed.tolist() == [2, 2]
    parameter = round_trip(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert type(parameter) is torch.nn.Parameter
    assert not parameter.requires_grad
    assert round_trip(torch.nn.Parameter(torch.ones(2))).requires_grad


def test_a_state_dict_comes_back_whole() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict()
    again = round_trip(state)
    assert type(again) is OrderedDict
    assert again._metadata == state._metadata  # type: ignore[attr-defined]
    assert same(again, state)
    module.load_state_dict(again)


def test_a_tensor_of_a_device_arrives_on_the_receivers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []

    def to(tensor: torch.Tensor, device: str) -> torch.Tensor:
        moved.append(device)
        return tensor

    message = encode_object(torch.ones(2))
    position = TENSOR_FLAGS + 1
    message[position] = 1  # cuda
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode_object(message).device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "to", to)
    decode_object(message)
    assert moved == ["cuda"]
    message[position] = 99
    with pytest.raises(ObjectDecodeError, match="never sent"):
        decode_object(message)


class Subclass(torch.Tensor):
    pass


class Raising(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise KeyError(function)


class Wrapper(torch.Tensor):
    """A tensor whose elements are in another one; ``as_subclass()`` is of the same kind."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise NotImplementedError


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2).as_subclass(Subclass), r"subclass Subclass, .* send as_subclass\(torch\.Tensor\) of it"),
        (torch.ones(2).as_subclass(Raising), r"subclass Raising, .* send as_subclass\(torch\.Tensor\) of it"),
        (Wrapper(torch.ones(2)), "got a Wrapper, whose elements lie in tensors within it; send these"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), r"got a nested tensor; send unbind\(\)"),
        (torch.nn.UninitializedBuffer(), "got an UninitializedBuffer, which has no shape yet"),
        (fake(), "got a FakeTensor, which has no elements; send a real tensor"),
        (torch.ones([1] * 65), "65 dimensions"),
    ],
    ids=["sparse", "meta", "subclass", "raising", "wrapper", "nested", "lazy", "fake", "dimensions"],
)
def test_tensors_that_are_refused(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"^encode_object: obj\['t'\]: .*{reason}"):
        encode_object({"t": tensor})


# --- numpy


@pytest.mark.parametrize(
    "code",
    [
        "?",
        "i1",
        "u1",
        "<i2",
        ">i2",
        "i4",
        "u4",
        "i8",
        "u8",
        "f2",
        "f4",
        ">f8",
        "f8",
        "c8",
        "c16",
        "S3",
        "<U2",
        ">U2",
        "M8[ns]",
        ">M8[25s]",
        "m8[D]",
        "M8",
        "V4",
    ],
)
def test_arrays_of_every_dtype(code: str) -> None:
    dtype = numpy.dtype(code)
    array = numpy.arange(6).reshape(2, 3).astype("i4" if dtype.kind == "V" else dtype)
    if dtype.kind == "V":
        array = array.view(dtype)
    for case in (array, array.T, array[:, ::2], array[:0], array[0, 1:1], numpy.array(array[1, 1])):
        again = round_trip([case])[0]
        assert same(again, case)
        assert again.flags.writeable
        assert again.flags.owndata
    if dtype.kind != "V":
        scalar = array[1, 2]
        again = round_trip(scalar)
        assert type(again) is type(scalar)
        assert again == scalar
    assert round_trip(dtype) == dtype


def test_numpy_text_keeps_its_last_nulls() -> None:
    assert same(round_trip(numpy.str_("a\0")), numpy.str_("a\0"))
    assert same(round_trip(numpy.bytes_(b"a\0")), numpy.bytes_(b"a\0"))
    assert same(round_trip(numpy.str_("")), numpy.str_(""))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (numpy.array([1, None]), "Python objects"),
        (numpy.zeros(2, [("a", "i4"), ("b", "f8")]), "dtype"),
        (numpy.zeros(2, "V0"), "no bytes"),
        (numpy.ma.array([1, 2], mask=[0, 1]), r"subclass MaskedArray; send its data and its mask, or filled\(\)"),
    ],
    ids=["objects", "records", "empty", "masked"],
)
def test_arrays_that_are_refused(array: Any, reason: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"^encode_object: obj\[0\]: .*{reason}"):
        encode_object([array])


def test_numpy_is_not_imported_for_objects_without_it() -> None:
    program = """
import sys
sys.modules["numpy"] = None
import warnings; warnings.simplefilter("ignore")
from comm_collectives.object_codec import decode_object, encode_object, ObjectDecodeError
import torch
value = {"a": [1, 2.5], "t": torch.arange(3)}
assert decode_object(encode_object(value))["t"].tolist() == [0, 1, 2]
try:
    decode_object(bytes.fromhex(sys.argv[1]))
except ObjectDecodeError as error:
    assert "numpy is not installed on this rank" in str(error), error
else:
    raise AssertionError
"""
    message = encode_object(numpy.arange(3)).hex()
    done = subprocess.run([sys.executable, "-c", program, message], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- registered classes


def test_constructors_are_not_called() -> None:
    CALLED.clear()
    value = Loud(3)
    assert CALLED == [3]
    assert round_trip(value) == value
    assert CALLED == [3]
    frozen = Frozen((1, 2))
    object.__setattr__(frozen, "total", 3)
    assert round_trip(frozen) == frozen


def test_slots_and_inheritance() -> None:
    @dataclasses.dataclass
    class Base:
        a: int

    @dataclasses.dataclass
    class Derived(Base):
        b: int

        __slots__ = ("b",)

    register_object_type(Derived, "test.Derived")
    assert round_trip(Derived(1, 2)) == Derived(1, 2)
    with pytest.raises(ArgumentTypeError, match=r"register_object_type\(Base\)"):
        encode_object(Base(1))


def test_a_field_that_was_never_set_is_refused() -> None:
    value = Point(1)
    del value.x
    with pytest.raises(ArgumentError, match=r"obj\[0\]\.x: the field was never set"):
        encode_object([value])


def test_registering() -> None:
    first = dataclasses.make_dataclass("Cell", ["a"])
    first.__module__ = "notebook"
    assert register_object_type(first) is first
    register_object_type(first)
    second = dataclasses.make_dataclass("Cell", ["a", "b"])
    second.__module__ = "notebook"
    register_object_type(second)  # a notebook cell that was run again
    assert round_trip(second(1, 2)) == second(1, 2)
    with pytest.raises(ArgumentTypeError, match=r"register_object_type\(Cell\)"):
        encode_object(first(1))
    with pytest.raises(ArgumentError, match=r"is registered as 'notebook\.Cell' already"):
        register_object_type(second, "other")
    with pytest.raises(ArgumentError, match=r"under which notebook\.Cell is registered"):
        register_object_type(Unregistered, "notebook.Cell")


@pytest.mark.parametrize("cls", [int, dict, Sub, Exception, torch.nn.Linear, Point(1), "Point", tuple, list[int]])
def test_only_dataclasses_enums_and_named_tuples_can_be_registered(cls: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="expected a dataclass, an Enum or a named tuple"):
        register_object_type(cls)


@pytest.mark.parametrize("name", ["", 3, b"x"])
def test_names_are_text(name: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="name: got"):
        register_object_type(Unregistered, name)


def test_a_dataclass_with_a_builtin_base_cannot_be_registered() -> None:
    @dataclasses.dataclass
    class Listed(list):  # type: ignore[type-arg]
        a: int = 0

    with pytest.raises(ArgumentTypeError, match="expected a dataclass"):
        register_object_type(Listed)


def test_classes_that_differ_between_ranks() -> None:
    message = bytes(encode_object(Point(1, 2)))
    with pytest.raises(ObjectDecodeError, match="not registered on this rank"):
        decode_object(message.replace(b"Point", b"Paint"))
    with pytest.raises(ObjectDecodeError, match="has no field 'z'"):
        decode_object(message.replace(text("y"), text("z")))
    with pytest.raises(ObjectDecodeError, match="comes twice"):
        decode_object(message.replace(text("y"), text("x")))
    with pytest.raises(ObjectDecodeError, match=r"comes without the fields \['y'\]"):
        decode_object(message.replace(SIZE.pack(2) + text("x"), SIZE.pack(1) + text("x"))[: -len(text("y")) - 9])
    name = f"{Color.__module__}.Color".encode()
    for tag in (Tag.DATACLASS, Tag.NAMED_TUPLE):
        with pytest.raises(ObjectDecodeError, match="another kind"):
            decode_object(HEADER + bytes((tag,)) + SIZE.pack(len(name)) + name + SIZE.pack(0))
    with pytest.raises(ObjectDecodeError, match="has no member 'GREEN'"):
        decode_object(bytes(encode_object(Color.BLUE)).replace(blob(b"BLUE"), blob(b"GREEN")))
    with pytest.raises(ObjectDecodeError, match="comes as 0 members"):
        decode_object(HEADER + bytes((Tag.ENUM,)) + SIZE.pack(len(name)) + name + SIZE.pack(0))
    with pytest.raises(ObjectDecodeError, match="comes with 1 items"):
        decode_object(bytes(encode_object(Pair(None, None))).replace(SIZE.pack(2) + b"\0\0", SIZE.pack(1) + b"\0"))


def blob(data: bytes) -> bytes:
    return SIZE.pack(len(data)) + data


def text(value: str) -> bytes:
    return bytes((Tag.STR,)) + blob(value.encode())


# --- what is refused where it is sent


class Opaque:
    def __init__(self) -> None:
        self.state = {"a": 1}


class Local(tzinfo):
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Opaque(), r"obj"),
        ({"optimizer": Pair(0, [0, 1, 2, Opaque()])}, r"obj\['optimizer'\]\.right\[3\]"),
        (Point([Opaque()]), r"obj\.x\[0\]"),
        ({(1, 2): Opaque()}, r"obj\[<tuple>\]"),
        ({1: {Opaque(): 1}}, r"obj\[1\]\.<key 0>"),
        ([{Opaque()}], r"obj\[0\]\.<element 0>"),
        ((slice(0, Opaque()),), r"obj\[0\]\.stop"),
        ([1, 2, 3, Opaque()], r"obj\[3\]"),
        (lambda: None, r"obj"),
        (Opaque, r"obj"),
        (Fraction(1, 2), r"obj"),
        (Sub(a=1), r"obj"),
        (Unregistered(1), r"obj"),
        (namedtuple("Other", "a")(1), r"obj"),
    ],
)
def test_refusals_name_place_type_and_remedies(value: Any, path: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        encode_object(value)
    message = str(caught.value)
    assert caught.match(rf"^encode_object: {path}: got a value of type \w")
    for remedy in (
        "register_object_type(",
        "allow_pickle=True",
        "objects.allow_pickle",
        "COMM_OBJECTS__ALLOW_PICKLE=1",
    ):
        assert remedy in message
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (defaultdict(lambda: 0), r"obj\.default_factory: got a defaultdict"),
        (datetime(2026, 1, 1, tzinfo=Local()), r"obj\.tzinfo: got a time zone of type Local; send value\.astimezone"),
    ],
)
def test_other_refusals(value: Any, reason: str) -> None:
    with pytest.raises(ArgumentTypeError, match=reason):
        encode_object(value)


def test_an_ordered_dict_with_attributes_is_refused() -> None:
    value = OrderedDict(a=1)
    value.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(ArgumentTypeError, match="'extra'"):
        encode_object(value)
    value = OrderedDict(a=1)
    value._metadata = Opaque()  # type: ignore[attr-defined]
    with pytest.raises(ArgumentTypeError, match=r"obj\._metadata: got a value"):
        encode_object(value)


def test_a_flag_with_unknown_bits_is_refused() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("flags keep unknown bits from Python 3.11 on")

    class Loose(enum.IntFlag, boundary=enum.KEEP):
        ONE = 1

    register_object_type(Loose, "test.Loose")
    with pytest.raises(ArgumentError, match="no combination of the members"):
        encode_object(Loose(5))


def test_cycles_are_refused_with_their_place() -> None:
    value: dict[str, Any] = {"a": [1, {}]}
    value["a"][1]["b"] = value["a"]
    with pytest.raises(ArgumentError, match=r"obj\['a'\]\[1\]\['b'\]: is obj\['a'\] again; an object that contains"):
        encode_object(value)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ArgumentError, match=r"obj\[0\]: is obj again"):
        encode_object(endless)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_limited() -> None:
    assert round_trip(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(ArgumentError, match=rf"obj(\[0\])+\.\.\.: containers are nested more than {MAX_DEPTH} deep"):
        encode_object(nested(MAX_DEPTH + 1))


def test_what_is_shared_many_times_over_ends_at_the_size_limit() -> None:
    value: Any = []
    for _ in range(60):
        value = [value, value]
    with pytest.raises(ArgumentError, match="larger than 100000 bytes"):
        encode_object(value, max_bytes=100_000)


@pytest.mark.parametrize(
    "value",
    [
        b"x" * 2000,
        "x" * 2000,
        [1.5] * 250,
        torch.ones(500),
        numpy.ones(250),
        {i: i for i in range(120)},
        ["x" * 200] * 9,
    ],
    ids=["bytes", "str", "floats", "tensor", "array", "dict", "strings"],
)
def test_size_is_limited(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"larger than 1500 bytes.*objects\.max_bytes.*COMM_OBJECTS__MAX_BYTES"):
        encode_object({"a": value}, max_bytes=1500)
    with pytest.raises(ArgumentError, match="larger than 1500 bytes"):
        encode_object({"a": value}, allow_pickle=True, max_bytes=1500)
    assert len(encode_object({"a": value}, max_bytes=5000)) <= 5000


def test_a_view_of_little_memory_is_measured_by_what_it_would_become() -> None:
    for value in (torch.ones(1).expand(1 << 40), numpy.broadcast_to(numpy.ones(1), 1 << 40)):
        with pytest.raises(ArgumentError, match="larger than"):
            encode_object(value)


# --- pickle


class Harmful:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    target = tmp_path / "harm"
    message = encode_object([Harmful(target)], allow_pickle=True)
    assert is_pickled(message)
    for allowed in (False, None):
        with pytest.raises(ObjectDecodeError, match="unpickling lets the sender run any code here") as caught:
            decode_object(message, allowed)
        for remedy in ("allow_pickle=True", "objects.allow_pickle", "COMM_OBJECTS__ALLOW_PICKLE=1"):
            assert remedy in str(caught.value)
    assert not target.exists()
    decode_object(message, allow_pickle=True)
    assert target.exists()


def test_a_pickle_hidden_in_an_encoded_message_does_nothing(tmp_path: Path) -> None:
    target = tmp_path / "harm"
    hidden = pickle.dumps(Harmful(target))
    for message in (HEADER + hidden, hidden):
        with pytest.raises(ObjectDecodeError):
            decode_object(message, allow_pickle=False)
    assert decode_object(encode_object(hidden)) == hidden
    assert not target.exists()


def test_pickle_is_used_only_where_needed() -> None:
    assert not is_pickled(encode_object({"a": torch.ones(2)}, allow_pickle=True))
    assert is_pickled(encode_object({"a": Fraction(1, 2)}, allow_pickle=True))
    cycle: list[Any] = []
    cycle.append(cycle)
    again = decode_object(encode_object(cycle, allow_pickle=True), allow_pickle=True)
    assert again[0] is again
    assert not is_pickled(b"short")


def test_what_cannot_be_pickled_either() -> None:
    with pytest.raises(ArgumentTypeError, match="has no encoding and cannot be pickled either"):
        encode_object(lambda: 0, allow_pickle=True)


def test_a_pickle_is_limited_in_size_and_may_fail() -> None:
    with pytest.raises(ArgumentError, match=r"its pickle has .* at most 100 are sent"):
        encode_object([Fraction(1, n) for n in range(1, 50)], allow_pickle=True, max_bytes=100)
    message = encode_object(Fraction(1, 2), allow_pickle=True)
    with pytest.raises(ObjectDecodeError, match="its pickle fails with"):
        decode_object(message[:-4], allow_pickle=True)


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Unpicklable:
    def __reduce__(self) -> Any:
        raise UnreadableError


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


def _raise(error: BaseException) -> None:
    raise error


def test_whatever_a_pickle_raises_is_an_error_of_its_object() -> None:
    with pytest.raises(ArgumentTypeError, match=r"either \(UnreadableError without a readable message"):
        encode_object(Unpicklable(), allow_pickle=True)
    for error, text in ((UnreadableError(), "UnreadableError without"), (SystemExit("gone"), "SystemExit: gone")):
        message = encode_object(Raising(error), allow_pickle=True)
        with pytest.raises(ObjectDecodeError, match=f"rank 3 cannot be decoded: its pickle fails with {text}"):
            decode_object(message, allow_pickle=True, source="rank 3")
    message = encode_object(Raising(KeyboardInterrupt()), allow_pickle=True)
    with pytest.raises(KeyboardInterrupt):
        decode_object(message, allow_pickle=True)


def test_the_policy() -> None:
    assert (object_policy().allow_pickle, object_policy().max_bytes) == (False, 1 << 30)
    try:
        set_object_policy(True, 1000)
        assert decode_object(encode_object(Fraction(1, 2))) == Fraction(1, 2)
        with pytest.raises(ArgumentTypeError):
            encode_object(Fraction(1, 2), allow_pickle=False)
        with pytest.raises(ArgumentError, match="larger than 1000 bytes"):
            encode_object(b"x" * 1000)
    finally:
        set_object_policy()
    assert not object_policy().allow_pickle


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((1,), "allow_pickle: got 1"),
        ((False, "1GB"), "max_bytes: got '1GB'"),
        ((False, True), "max_bytes: got True"),
        ((False, 0), "max_bytes: got 0"),
        ((False, 1 << 63), "max_bytes: got 9223372036854775808; expected 1 to 9223372036854775807"),
    ],
)
def test_policies_that_are_none(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        set_object_policy(*arguments)


def test_allow_pickle_is_a_bool() -> None:
    with pytest.raises(ArgumentTypeError, match="allow_pickle: got 'yes'"):
        encode_object(1, allow_pickle="yes")  # type: ignore[arg-type]


# --- what no message can do


def tagged(tag: Tag, body: bytes = b"") -> bytes:
    return HEADER + bytes((tag,)) + bytes(FILLER_BYTES.get(tag, 0)) + body


TENSOR_FLAGS = len(tagged(Tag.TENSOR))
HUGE = SIZE.pack(1 << 62)
TENSOR = bytes(encode_object(torch.arange(6, dtype=torch.int32).view(2, 3)))
ARRAY = bytes(encode_object(numpy.arange(6, dtype="<i4").reshape(2, 3)))
BAD = {
    "empty": b"",
    "half a header": HEADER[:7],
    "no value": HEADER,
    "unknown tag": HEADER + b"\xff",
    "left over": tagged(Tag.NONE, b"\0"),
    "other magic": b"x" + bytes(encode_object(1))[1:],
    "other version": HEADER[:7] + b"\x09" + HEADER[8:] + b"\0",
    "other byte order": HEADER[:8] + bytes((1 - HEADER[8],)) + HEADER[9:] + b"\0",
    "other kind": HEADER[:9] + b"\x05" + HEADER[10:] + b"\0",
    "huge int": tagged(Tag.BIG_INT, HUGE),
    "huge str": tagged(Tag.STR, HUGE),
    "huge bytes": tagged(Tag.BYTES, HUGE),
    "huge list": tagged(Tag.LIST, HUGE),
    "huge tuple": tagged(Tag.TUPLE, HUGE),
    "huge dict": tagged(Tag.DICT, HUGE),
    "huge set": tagged(Tag.SET, HUGE),
    "huge floats": tagged(Tag.LIST_OF_FLOATS, HUGE),
    "huge size": tagged(Tag.TORCH_SIZE, HUGE),
    "huge dataclass": tagged(Tag.DATACLASS, blob(f"{__name__}.Point".encode()) + HUGE),
    "huge deque": tagged(Tag.DEQUE, SIZE.pack(2**64 - 1) + SIZE.pack(0)),
    "text that is none": tagged(Tag.STR, blob(b"\xff\xfe")),
    "half a float in a list": tagged(Tag.LIST_OF_FLOATS, blob(b"1234567")),
    "no decimal": tagged(Tag.DECIMAL, blob(b"1.2.3")),
    "no dtype": tagged(Tag.TORCH_DTYPE, blob(b"float37")),
    "a module's attribute as dtype": tagged(Tag.TORCH_DTYPE, blob(b"load")),
    "no device": tagged(Tag.TORCH_DEVICE, blob(b"cpu:x")),
    "no path": tagged(Tag.PATH, b"\x09" + blob(b"x")),
    "no date": tagged(Tag.DATE, struct.pack("=HBB", 2026, 13, 1)),
    "time with a zone that is none": tagged(Tag.TIME, struct.pack("=BBBIB", 1, 1, 1, 1, 0) + bytes((Tag.TRUE,))),
    "zone without offset": tagged(Tag.TIMEZONE, b"\0\0"),
    "range of text": tagged(Tag.RANGE, text("a") * 3),
    "unknown factory": tagged(Tag.DEFAULT_DICT, b"\xff" + SIZE.pack(0)),
    "list as key": tagged(Tag.DICT, SIZE.pack(1) + bytes((Tag.LIST,)) + SIZE.pack(0) + b"\0"),
    "list in a set": tagged(Tag.SET, SIZE.pack(1) + bytes((Tag.LIST,)) + SIZE.pack(0)),
    "equal keys": tagged(Tag.DICT, SIZE.pack(2) + b"\2\2\0\0"),
    "equal elements": tagged(Tag.SET, SIZE.pack(2) + b"\2\2"),
    "tensor without its end": TENSOR[:-1],
    "tensor with a huge dimension": TENSOR.replace(SIZE.pack(3), HUGE),
    "tensor with overflowing dimensions": TENSOR.replace(SIZE.pack(3), HUGE).replace(SIZE.pack(2), HUGE),
    "tensor of another dtype": TENSOR.replace(b"\5int32", b"\5int16"),
    "tensor of a quantized dtype": TENSOR.replace(b"\5int32", b"\5qint8"),
    "integers that require a gradient": TENSOR[:TENSOR_FLAGS] + b"\1" + TENSOR[TENSOR_FLAGS + 1 :],
    "integers as a parameter with gradient": TENSOR[:TENSOR_FLAGS] + b"\3" + TENSOR[TENSOR_FLAGS + 1 :],
    "impossible bool tensor": bytes(encode_object(torch.tensor([True, False])))[:-1] + b"\2",
    "array without its end": ARRAY[:-1],
    "array with a huge dimension": ARRAY.replace(SIZE.pack(3), HUGE),
    "array of objects": ARRAY.replace(b"<i4", b"|O8"),
    "array of nothing": ARRAY.replace(b"<i4", b"|V0"),
    "array with many dimensions": ARRAY.replace(SIZE.pack(2) + SIZE.pack(2), HUGE + SIZE.pack(2)),
    "empty array with huge dimensions": tagged(
        Tag.NUMPY_ARRAY, blob(b"<f8") + SIZE.pack(3) + HUGE + HUGE + SIZE.pack(0)
    ),
    "array of records": tagged(Tag.NUMPY_ARRAY, blob(b"i4,O") + SIZE.pack(0)),
    "impossible bool array": bytes(encode_object(numpy.array([True, False])))[:-1] + b"\2",
    "impossible text array": bytes(encode_object(numpy.array(["ab"])))[:-1] + b"\x7f",
    "scalar with a shape": ARRAY[: len(HEADER)] + bytes((Tag.NUMPY_SCALAR,)) + ARRAY[len(HEADER) + 1 :],
    "numpy text that is none": tagged(Tag.NUMPY_TEXT, b"\0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_messages(case: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ObjectDecodeError, match=r"^the message cannot be decoded: ") as caught:
            decode_object(BAD[case])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(caught.value, CommError)
    assert isinstance(caught.value, ValueError)
    assert peak_bytes < 1 << 20


def test_deeply_nested_messages() -> None:
    for depth in (MAX_DEPTH + 1, 100_000):
        one = bytes((Tag.LIST,)) + SIZE.pack(1)
        metadata = tagged(Tag.ORDERED_DICT, SIZE.pack(0))[len(HEADER) :]
        zone = bytes((Tag.TIMEZONE,))
        point = bytes((Tag.DATACLASS,)) + blob(f"{__name__}.Point".encode()) + SIZE.pack(2) + text("x")
        slices = tagged(Tag.SLICE)[len(HEADER) :]
        for level in (one, metadata, zone, point, slices, bytes((Tag.NUMPY_TEXT,))):
            with pytest.raises(ObjectDecodeError, match=f"nested more than {MAX_DEPTH} deep"):
                decode_object(HEADER + level * depth)


def test_keys_that_were_made_to_collide() -> None:
    modulus = sys.hash_info.modulus
    count = 200_000
    items = b"".join(bytes((Tag.BIG_INT,)) + blob((n * modulus).to_bytes(16, "little")) for n in range(1, count))
    for message in (
        tagged(Tag.SET, SIZE.pack(count - 1) + items),
        tagged(Tag.DICT, SIZE.pack(count - 1) + items + b"\0" * (count - 1)),
    ):
        with pytest.raises(ObjectDecodeError, match="share their hash"):
            decode_object(message)


def test_what_no_receiver_accepts_is_not_encoded() -> None:
    keys = [n * sys.hash_info.modulus for n in range(1500)]
    for value in (dict.fromkeys(keys), set(keys), frozenset(keys), [Counter(keys)]):
        with pytest.raises(ArgumentError, match="more than 1000 keys of one container share their hash"):
            encode_object(value)
        assert decode_object(encode_object(value, allow_pickle=True), allow_pickle=True) == value
    for text_array in (numpy.array([0x110000], "<u4").view("<U1"), numpy.array([0x110000], ">u4").view(">U1")):
        with pytest.raises(ArgumentError, match="an array of text with characters that do not exist"):
            encode_object(text_array, allow_pickle=True)


def test_truths_of_other_bytes_arrive_as_1() -> None:
    raw = torch.tensor([0, 2, 255, 1], dtype=torch.uint8)
    for value in (raw.view(torch.bool), raw.view(torch.bool)[::2], raw.numpy().view(bool), raw.numpy().view(bool)[1:]):
        received = decode_object(encode_object(value))
        assert received.tolist() == value.tolist()
        assert torch.as_tensor(received).view(torch.uint8).max() == 1
    assert raw.tolist() == [0, 2, 255, 1]


MEASURE = """
import gc, os, sys
from argparse import Namespace
from collections import *
from types import SimpleNamespace
from pathlib import PurePosixPath
import numpy, torch
from comm_collectives.object_codec import HEADER_BYTES, decode_object, encode_object
from comm_collectives.object_codec.wire import MOST_TIMES

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def measure(value):
    one = bytes(encode_object(value))[HEADER_BYTES:]
    count = (1 << 20) // len(one)
    message = encode_object([])
    message[-8:] = count.to_bytes(8, sys.byteorder)
    message += one * count
    decode_object(encode_object([value]))
    gc.collect()
    before = resident()
    found = decode_object(message)
    times = (resident() - before) / len(message)
    assert len(found) == count and times <= MOST_TIMES + 4, f"{value!r:.60}: {times:.1f} times"

def versioned(items):
    found = OrderedDict(items)
    found._metadata = True
    return found

singletons = [True, False, None, ..., ()]
values = [
    versioned({}), versioned({None: None}), versioned(dict.fromkeys([*singletons, ""])), Counter({None: None}),
    Namespace(), SimpleNamespace(a=1), set(singletons), frozenset(singletons), dict.fromkeys([*singletons, ""]),
    [], (None,), set(), {1}, frozenset([None]), {}, {1: None}, OrderedDict(), Counter(), defaultdict(int), deque(),
    deque([1]), slice(None), bytearray(), 2**70, PurePosixPath("a"), torch.Size([]), torch.ones(0, dtype=torch.uint8),
    torch.tensor(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8), torch.nn.Parameter(torch.ones(1)),
    torch.ones((1,) * 64), numpy.ones(0, "i1"), numpy.ones(1, "i1"), numpy.dtype("S7"), numpy.str_("a"),
]
for value in values:  # each in a process that has not yet freed anything which could be used again
    child = os.fork()
    if child == 0:
        try:
            measure(value)
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_is_read_takes_memory_in_proportion_to_the_message() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


SAMPLES = [bytes(encode_object(value)) for value in VALUES] + [
    TENSOR,
    ARRAY,
    bytes(encode_object(numpy.datetime64("2026-01-01"))),
    bytes(encode_object(torch.nn.Parameter(torch.ones(2)))),
    bytes(encode_object({"model": torch.nn.Linear(2, 2).state_dict(), "step": 3, "losses": [0.5] * 9})),
]


@settings(deadline=None)
@given(st.binary())
@example(b"\0" * 40)
def test_arbitrary_bytes(data: bytes) -> None:
    for message in (data, HEADER + data):
        decodes_or_raises(message)


@NOTICES
@settings(max_examples=600, deadline=None)
@given(st.sampled_from([sample for sample in SAMPLES if len(sample) < 2000]), st.data())
def test_damaged_messages(message: bytes, data: Any) -> None:
    damaged = bytearray(message)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not damaged:
            break
    decodes_or_raises(bytes(damaged))


def decodes_or_raises(message: bytes) -> None:
    with contextlib.suppress(ObjectDecodeError):
        decode_object(message, allow_pickle=False)


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_truncated_messages(number: int) -> None:
    message = SAMPLES[number]
    lengths = range(len(message)) if len(message) < 600 else (0, 5, 17, 30, len(message) // 2, len(message) - 1)
    for length in lengths:
        with pytest.raises(ObjectDecodeError):
            decode_object(message[:length])


def test_attributes_of_a_namespace_have_names_that_differ() -> None:
    odd = Namespace()
    vars(odd)[3] = 1  # type: ignore[index]
    with pytest.raises(ArgumentTypeError, match="a namespace with the attribute 3"):
        encode_object(odd)
    with pytest.raises(ArgumentTypeError, match=r"\.hook"):
        encode_object(Namespace(hook=print))
    message = bytes(encode_object(Namespace(a=1, b=2)))
    for found in (message.replace(b"b", b"a"), message.replace(bytes((Tag.STR,)), bytes((Tag.BYTES,)))):
        with pytest.raises(ObjectDecodeError):
            decode_object(found)
