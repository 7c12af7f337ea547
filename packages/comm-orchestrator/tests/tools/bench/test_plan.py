"""Which rows come of what is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_orchestrator.tools.bench.operations import ITEM_BYTES, benchmark, benchmarks
from comm_orchestrator.tools.bench.options import Options
from comm_orchestrator.tools.bench.plan import check_world, plan
from comm_utils.errors import ArgumentError
from comm_utils.sizes import message_size_bytes

SIZED = tuple(name for name in benchmarks() if name != "barrier")


@given(
    operation=st.sampled_from(SIZED),
    world_size=st.integers(2, 70),
    dtype=st.sampled_from(["int8", "bfloat16", "float32", "float64"]),
    minimum=st.integers(2048, 5000),
)
def test_sizes_are_those_of_the_larger_buffer(operation: str, world_size: int, dtype: str, minimum: int) -> None:
    options = Options(operations=(operation,), minbytes=minimum, maxbytes=2**20, stepfactor=3, dtypes=(dtype,))
    for row in plan(options, world_size).rows:
        elements = benchmark(operation).elements(row.count, world_size)
        assert row.size_bytes == max(elements) * ITEM_BYTES[dtype]
        part = row.count * ITEM_BYTES[dtype]
        if operation == "all_to_all_single":
            part *= world_size
        assert row.size_bytes == message_size_bytes(operation, part, world_size)
        assert row.size_bytes in range(1, 2**20 + 1)
        if benchmark(operation).in_parts:
            assert row.count * ITEM_BYTES[dtype] % 16 == 0


def test_parts_are_rounded_down_and_measured_once() -> None:
    found = plan(Options(operations=("all_gather_into_tensor",), minbytes=8, maxbytes=256), 3)
    assert [(row.size_bytes, row.count) for row in found.rows] == [(48, 4), (96, 8), (240, 20)]
    assert found.notes == [
        "all_gather_into_tensor: 8, 16, 32 bytes are too few and left out",
        "sizes of all_gather_into_tensor are rounded down to 3 parts of a multiple of 16 bytes, as in nccl-tests; "
        "those that come out the same are measured once",
    ]


def test_combinations() -> None:
    options = Options(
        operations=("reduce", "broadcast", "barrier"),
        minbytes=64,
        maxbytes=64,
        dtypes=("int32", "float32"),
        all_dtypes=True,
        ops=("sum", "avg"),
        root=-1,
    )
    found = [(row.operation, row.dtype, row.op, row.root) for row in plan(options, 2).rows]
    assert found == [
        *(("reduce", dtype, op, root) for dtype, op in _reductions() for root in (0, 1)),
        *(("broadcast", dtype, "", root) for dtype in ("int32", "float32") for root in (0, 1)),
        ("barrier", "", "", -1),
    ]


def _reductions() -> list[tuple[str, str]]:
    return [("int32", "sum"), ("float32", "sum"), ("float32", "avg")]


def test_nothing_left() -> None:
    with pytest.raises(ArgumentError, match="nothing is left to measure: gather: 8 bytes are too few"):
        plan(Options(operations=("gather",), minbytes=8, maxbytes=8), 2)
    assert plan(Options(operations=("send", "barrier")), 1).notes == ["send needs 2 ranks and is left out"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (Options(group_size=3), r"--group-size: got 3 among 4 ranks; expected a divisor: 1, 2, 4"),
        (Options(root=2, group_size=2), r"--root: got 2 in groups of 2 ranks; expected 0 to 1, or all"),
        (Options(operations=("send",), group_size=1), r"send: got groups of 1 rank"),
    ],
)
def test_what_cannot_be_in_a_world(options: Options, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        check_world(options, 4)
    assert check_world(Options(group_size=2), 4) == 2
    assert check_world(Options(), 4) == 4


def test_a_largest_size_that_the_steps_go_over_is_noted() -> None:
    (note,) = plan(Options(minbytes=8, maxbytes=1000, stepfactor=4), 2).notes
    assert note == "the steps go over --maxbytes 1000; 512 is the largest of the sizes"
    assert plan(Options(minbytes=8, maxbytes=512, stepfactor=4), 2).notes == []
