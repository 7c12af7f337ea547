"""Inputs and the check of results, against collectives that are computed here, in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_collectives.compression import make_codec
from comm_orchestrator.tools.bench.data import PERIOD, Data
from comm_orchestrator.tools.bench.operations import ITEM_BYTES, REDUCTIONS, averages, benchmark, benchmarks, reduces
from comm_orchestrator.tools.bench.plan import Row

CPU = torch.device("cpu")
Buffers = list[tuple[torch.Tensor, torch.Tensor]]


def of_group(size: int) -> list[Data]:
    # Any ranks of the world may form a group.
    members = [3 * rank + 1 for rank in range(size)]
    return [Data(members, rank, CPU) for rank in range(size)]


def filled(row: Row, group: list[Data], call: int, lossy: bool = False) -> Buffers:
    dtype = getattr(torch, row.dtype)
    sizes = benchmark(row.operation).elements(row.count, len(group))
    found = []
    for data in group:
        source, target = (torch.zeros(elements, dtype=dtype) for elements in sizes)
        if not benchmark(row.operation).in_parts and row.operation != "send":
            target = source
        data.fill(row, source, target, call, lossy)
        found.append((source, target))
    return found


@pytest.mark.parametrize("codec", ["fp16", "bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("operation", "op"),
    [
        ("all_reduce", "sum"),
        ("all_reduce", "avg"),
        ("reduce_scatter_tensor", "sum"),
        ("all_gather_into_tensor", ""),
        ("all_to_all_single", ""),
    ],
)
def test_lossy_results_keep_the_bound_of_their_codec_and_stale_ones_do_not(
    operation: str, op: str, size: int, codec: str
) -> None:
    row, found = Row(operation, "float32", op, -1, 70_000, 0), make_codec(codec)
    group = of_group(size)
    buffers = filled(row, group, 5, lossy=True)
    for source, _ in buffers:  # as they arrive elsewhere
        wire = torch.empty(found.encoded_bytes(source.numel()), dtype=torch.uint8)
        found.encode(source.clone(), wire)
        found.decode(wire, source)
    perform(row, buffers)
    for data, (source, target) in zip(group, buffers, strict=True):
        assert data.wrong(row, source, target, 5, found) == 0
        # Most elements of another call are further off than any codec here may be.
        assert data.wrong(row, source, target, 9, found) > target.numel() // 4
        target[7] = float("nan")
        assert data.wrong(row, source, target, 5, found) == 1


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype = inputs[0].dtype
    wide = torch.stack([one.to(torch.float64 if dtype.is_floating_point else torch.int64) for one in inputs])
    if op in ("sum", "avg"):
        total = wide.sum(0)
        return (total / len(inputs) if op == "avg" else total).to(dtype)
    if op == "product":
        return wide.prod(0).to(dtype)
    return (wide.amin(0) if op == "min" else wide.amax(0)).to(dtype)


def perform(row: Row, buffers: Buffers) -> None:
    sources, n = [source.clone() for source, _ in buffers], row.count
    for rank, (_, target) in enumerate(buffers):
        if row.op:
            total = reduced(sources, row.op)
            target.copy_(total[rank * n :][:n] if row.operation == "reduce_scatter_tensor" else total)
        elif row.operation == "broadcast":
            target.copy_(sources[row.root])
        elif row.operation == "scatter":
            target.copy_(sources[row.root][rank * n :][:n])
        elif row.operation == "send":
            target.copy_(sources[0])
        elif row.operation == "all_to_all_single":
            target.copy_(torch.cat([source[rank * n :][:n] for source in sources]))
        else:
            target.copy_(torch.cat(sources))


def row_of(operation: str, dtype: str, op: str, count: int) -> Row:
    root = 0 if benchmark(operation).rooted else -1
    return Row(operation, dtype, op, root, count, 0)


KINDS = [
    (name, dtype, op)
    for name, one in benchmarks().items()
    if name != "barrier"
    for dtype in ITEM_BYTES
    for op in (REDUCTIONS if one.reduces else ("",))
    if not op or (averages(dtype) if op == "avg" else reduces(dtype))
]


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(KINDS), size=st.integers(2, 5), count=st.integers(1, 300), call=st.integers(0, 50))
def test_right_results_are_right_and_each_wrong_element_counts(
    kind: tuple[str, str, str], size: int, count: int, call: int
) -> None:
    row, group = row_of(*kind, count), of_group(size)
    buffers = filled(row, group, call)
    perform(row, buffers)
    assert [data.wrong(row, *pair, call) for data, pair in zip(group, buffers, strict=True)] == [0] * size
    first = buffers[0][1].view(torch.uint8)
    first[-1] ^= 0x40
    first[0] ^= 0x40
    number = 1 if buffers[0][1].numel() == 1 else 2
    # Where both flips hit the only byte of the only element, they cancel out.
    if first.numel() > 1:
        assert group[0].wrong(row, *buffers[0], call) == number


@pytest.mark.parametrize(("operation", "dtype", "op"), KINDS)
def test_the_result_of_the_call_before_is_wrong(operation: str, dtype: str, op: str) -> None:
    row, group = row_of(operation, dtype, op, 64), of_group(2)
    buffers = filled(row, group, 6)
    perform(row, buffers)
    assert group[0].wrong(row, *buffers[0], 7) > 32
    assert group[0].wrong(row, *buffers[0], 10) > 16


@pytest.mark.parametrize(("operation", "dtype", "op"), KINDS)
def test_what_no_call_wrote_is_wrong(operation: str, dtype: str, op: str) -> None:
    row, group = row_of(operation, dtype, op, 64), of_group(2)
    receiver = group[-1] if operation in ("broadcast", "scatter", "send") else group[0]
    buffers = filled(row, group, 1)
    assert receiver.wrong(row, *buffers[receiver.rank], 1) > 10


def test_elements_in_the_wrong_place_are_wrong() -> None:
    row, group = row_of("all_gather_into_tensor", "float32", "", 64), of_group(2)
    buffers = filled(row, group, 1)
    perform(row, buffers)
    target = buffers[0][1]
    assert group[0].wrong(row, buffers[0][0], torch.cat([target[64:], target[:64]]), 1) == 128
    assert group[0].wrong(row, buffers[0][0], target.roll(1), 1) == 128


@pytest.mark.parametrize("count", [PERIOD - 1, PERIOD, 70 * PERIOD + 5])
def test_large_tensors(count: int) -> None:
    row, group = row_of("broadcast", "int8", "", count), of_group(2)
    buffers = filled(row, group, 3)
    perform(row, buffers)
    target = buffers[1][1]
    assert group[1].wrong(row, target, target, 3) == 0
    target[count // 2] ^= 1
    target[-1] ^= 1
    assert group[1].wrong(row, target, target, 3) == 2


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("size", [64, 300])
def test_many_ranks_have_exact_results_in_short_types(op: str, size: int) -> None:
    row, group = row_of("all_reduce", "bfloat16", op, 32), of_group(size)
    buffers = filled(row, group, 2)
    # In the short type itself, one rank after the other, which is exact or within what is allowed.
    total = buffers[0][0].clone()
    for source, _ in buffers[1:]:
        if op == "product":
            total *= source
        elif op in ("sum", "avg"):
            total += source
        else:
            total = torch.minimum(total, source) if op == "min" else torch.maximum(total, source)
    if op == "avg":
        total /= size
    assert group[0].wrong(row, total, total, 2) == 0


def test_not_a_number_is_wrong() -> None:
    row, group = row_of("all_reduce", "float32", "avg", 4), of_group(3)
    nothing = torch.full((4,), float("nan"))
    assert group[0].wrong(row, nothing, nothing, 1) == 4
