"""The table of operations: its rows agree with one another, and rows can be added and taken out."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from comm_utils import operations
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError
from comm_utils.operations import Direction, Form, OperationSpec, Role, patterns
from comm_utils.sizes import busbw_factor, message_size_bytes

ALL = tuple(operations.rows())
NEW = OperationSpec(
    "all_reduce_max_index",
    patterns.ALL_REDUCE,
    (operations.Argument("tensor", Role.TENSOR, Direction.IN_OUT), operations.Argument("group", Role.GROUP)),
    primitive=True,
)


class Namespace:
    @staticmethod
    def all_reduce() -> None: ...


@pytest.fixture
def registered() -> Iterator[OperationSpec]:
    yield operations.register(NEW)
    operations.unregister(NEW.name)


def test_rows_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        operations.get("all_reduce").name = "x"  # type: ignore[misc]


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_rows_refer_to_rows(row: OperationSpec) -> None:
    assert operations.get(row.measured_as).benchmarked or not row.recorded
    for name in row.travels_as:
        assert operations.get(name).primitive or not row.recorded or row.pattern.is_message
    assert row.name in row.travels_as or not row.primitive


@pytest.mark.parametrize("row", [row for row in ALL if row.recorded], ids=lambda row: row.name)
def test_arguments_fit_the_pattern(row: OperationSpec) -> None:
    pattern = row.pattern
    assert (row.argument(Role.OP) is not None) == pattern.reduces
    assert (row.argument(Role.ROOT) is not None) == (pattern.is_rooted or pattern.is_message)
    assert (row.argument(Role.TAG) is not None) == pattern.is_message
    assert row.argument(Role.GROUP) is not None
    assert bool(row.tensors) != pattern.is_empty
    names = [one.name for one in row.arguments] + list(row.aliases)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", [row for row in ALL if row.primitive], ids=lambda row: row.name)
def test_primitives_are_methods_of_a_backend_with_these_parameters(row: OperationSpec) -> None:
    parameters = list(inspect.signature(getattr(Backend, row.name)).parameters)[1:]
    expected = [one.name for one in row.arguments if one.role not in (Role.TIMEOUT, Role.COMPRESSION)]
    if row.pattern.is_message:  # asynchronous messages have methods of their own
        expected.remove("async_op")
    assert parameters == expected


def test_roles_of_tensors() -> None:
    row = operations.get("all_gather_into_tensor")
    output, input = row.tensors
    assert (output.form, output.is_written) == (Form.FLAT, True)
    assert (input.form, input.is_written) == (Form.SINGLE, False)
    assert row.counted == (input,)
    assert [one.name for one in operations.get("all_to_all_single").counted] == ["output", "input"]
    assert [one.name for one in operations.get("scatter").tensors if one.at_root] == ["scatter_list"]


def test_who_waits_for_whom() -> None:
    ranks = (2, 4, 6)
    reduce, broadcast = patterns.REDUCE, patterns.BROADCAST
    assert patterns.ALL_TO_ALL.sources(4, ranks, -1) == {2, 4, 6}
    assert patterns.BARRIER.sources(4, ranks, -1) == {2, 4, 6}
    assert broadcast.sources(4, ranks, 6) == {6}
    assert broadcast.targets(4, ranks, 6) == set()
    assert broadcast.targets(6, ranks, 6) == {2, 4, 6}
    assert reduce.sources(4, ranks, 6) == set()
    assert reduce.sources(6, ranks, 6) == {2, 4, 6}
    assert reduce.targets(4, ranks, 6) == {6}
    assert patterns.RECV.sources(4, ranks, 2) == {2}
    assert patterns.RECV.targets(4, ranks, 2) == set()
    assert patterns.SEND.targets(4, ranks, 2) == {2}
    assert patterns.SEND.sources(4, ranks, 2) == set()


def test_names_of_records() -> None:
    assert operations.record_name("all_reduce", "inference_all_reduce") == "inference_all_reduce"
    assert operations.record_name("all_to_all_single", "reduce_scatter") == "reduce_scatter"
    assert operations.record_name("all_gather_into_tensor", "all_gather") == "all_gather"
    # What carries out a part of a call alone is recorded under its own name.
    assert operations.record_name("broadcast", "all_gather_object") == "broadcast"
    assert operations.record_name("all_gather", "all_reduce") == "all_gather"
    assert operations.record_name("barrier", "no such call") == "barrier"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(operations.UnknownOperationError, match="did you mean 'all_reduce'"):
        operations.get("al_reduce")
    with pytest.raises(KeyError, match=r"operations.register\(\)"):
        operations.get("frobnicate")
    assert operations.find("frobnicate") is None


def test_a_registered_row_is_known(registered: OperationSpec) -> None:
    assert operations.get(registered.name) is registered
    assert registered in operations.rows()
    assert registered.name in operations.recorded()
    assert registered.name not in operations.PRIMITIVES  # no other backend has it
    assert registered.name not in operations.benchmarked()
    assert message_size_bytes(registered.name, 100, 4) == 100
    assert busbw_factor(registered.name, 4) == 1.5
    assert operations.register(registered) is registered  # once more is nothing new
    with pytest.raises(ArgumentError, match="a second row for 'all_reduce_max_index'"):
        operations.register(replace(registered, benchmarked=True))


def test_a_row_that_refers_to_nothing_is_refused() -> None:
    with pytest.raises(operations.UnknownOperationError, match="'nothing'"):
        operations.register(replace(NEW, measured_as="nothing"))
    assert operations.find(NEW.name) is None


def test_built_in_rows_stay() -> None:
    with pytest.raises(ArgumentError, match="built in"):
        operations.unregister("all_reduce")
    with pytest.raises(operations.UnknownOperationError):
        operations.unregister(NEW.name)


def test_functions_are_found(registered: OperationSpec) -> None:
    assert operations.function_of(operations.get("all_reduce"), Namespace).__name__ == "all_reduce"
    found = operations.function_of(replace(registered, function="os.path:join"))
    assert found("a", "b") == str(Path("a", "b"))
    with pytest.raises(ArgumentError, match=r"'os\.path:nothing'"):
        operations.function_of(replace(registered, function="os.path:nothing"))


def test_installed_packages_add_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows_of_mine.py").write_text(
        "from dataclasses import replace\n"
        "from comm_utils import operations\n"
        "ROW = replace(operations.get('all_reduce'), name='all_reduce_of_mine', function='')\n"
    )
    metadata = tmp_path / "mine-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[comm_utils.operations]\nall_reduce_of_mine = rows_of_mine:ROW\nbad = rows_of_mine:NOTHING\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert operations.get("all_reduce_of_mine").pattern is patterns.ALL_REDUCE
        assert "all_reduce_of_mine" in operations.recorded()
    finally:
        operations.unregister("all_reduce_of_mine")
        sys.modules.pop("rows_of_mine", None)


@pytest.mark.parametrize(
    ("operation", "detail", "op", "root"),
    [
        ("all_reduce", "max", "max", None),
        ("reduce", (3, "sum"), "sum", 3),
        ("broadcast", 3, None, 3),
        ("send", 3, None, 3),
        ("gather", None, None, 0),
        ("all_gather", None, None, None),
        ("barrier", None, None, None),
    ],
)
def test_op_and_root_of_fast_paths(operation: str, detail: object, op: object, root: int | None) -> None:
    assert operations.get(operation).op_and_root(detail) == (op, root)


def test_the_conformance_suite_calls_every_primitive() -> None:
    folder = Path(inspect.getfile(operations)).parents[1] / "testing"
    trees = [ast.parse(path.read_text()) for path in folder.glob("conformance*.py")]
    called = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert called >= operations.PRIMITIVES
