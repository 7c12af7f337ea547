"""The conformance suite's checks of fast paths, run on every rank. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_utils import operations
from comm_utils.fast_path import FastPath
from comm_utils.operations.types import Argument, Direction, Form, OperationSpec, Role
from comm_utils.reduce_op import ReduceOp
from comm_utils.testing.conformance_ways import some_ranks
from comm_utils.testing.conformance_world import World, bring_up, close, reference, same, sample

__all__ = ["fast_path", "not_plain"]


def _detailed(row: OperationSpec) -> list[Argument]:
    """Return the arguments that the detail of a fast path stands for: the root and the op, as far as there are any."""
    return [one for one in row.arguments if one.role in (Role.ROOT, Role.OP)]


def fast_path(provider: str, backend: str, device: str, expected: Collection[str]) -> None:
    """Do what the ordinary calls do, every time, with other tensors, and on a group of some ranks.

    They refuse what is no plain tensor, having done nothing, and the cache is emptied with its group. Where there is no
    fast path, an ordinary call takes its place: another rank may have one.

    Args:
        expected: operations that have a fast path.
    """
    world = World(bring_up(provider, backend, device), device, expected)
    up = world.backend
    members = some_ranks(world.size)
    _check(world, None, list(range(world.size)))
    _check_lists(world, None, list(range(world.size)))
    _check_refusals(world, None, list(range(world.size)))
    if world.rank in members:
        group = up.create_group(members, "conformance-fast-path")
        _check(world, group, members)
        _check_lists(world, group, members)
        _check_refusals(world, group, members)
        reduce = up.fast_path("all_reduce", "sum", group) or _refuse
        up.fast_paths.synchronous["all_reduce", "sum", group] = reduce
        up.fast_paths.asynchronous["all_reduce", "sum", group] = reduce
        up.fast_paths.memo("conformance")["anything"] = 1
        up.destroy_process_group(group)
        assert not up.fast_paths.synchronous, "the fast paths of a group outlive it"
        assert not up.fast_paths.asynchronous
        assert not up.fast_paths.memo("conformance")
        # A caller that still holds it is refused.
        tensor = torch.ones(2, device=device)
        assert not reduce(tensor), "a fast path of a group that has ended says that it did the work"
        assert tensor.tolist() == [1.0, 1.0]
    up.barrier()
    up.destroy_process_group()


def _refuse(*_: Any) -> Any:
    return False


def _made(world: World, operation: str, detail: object, group: ProcessGroup | None, async_op: bool = False) -> FastPath:
    """Return the fast path, or an ordinary call where there is none."""
    found = world.backend.fast_path(operation, detail, group, async_op)
    assert found is not None or operation not in world.fast_paths, f"there is no fast path for {operation}"
    if found is not None:
        return found
    details = detail if isinstance(detail, tuple) else (detail,)
    names = [one.name for one in _detailed(operations.get(operation))]
    named: dict[str, Any] = {"group": group, **dict(zip(names, details, strict=False))}
    if async_op:
        named["async_op"] = True

    def call(*tensors: Any) -> Any:
        outcome = getattr(world.backend, operation)(*tensors, **named)
        return outcome if async_op else True

    return call


def _check(world: World, group: ProcessGroup | None, members: list[int]) -> None:
    up, device, size, position = world.backend, world.device, len(members), members.index(world.rank)
    root, partner = members[-1], position ^ 1
    # As a call that is checked in full does before there is a fast path: an engine may reserve memory at first.
    up.all_to_all_single(torch.empty(size, device=device), torch.empty(size, device=device), None, None, group)
    make: Callable[..., FastPath] = lambda operation, detail=None, async_op=False: _made(  # noqa: E731
        world, operation, detail, group, async_op
    )
    sums = {op: make("all_reduce", op) for op in ("sum", ReduceOp.MAX)}
    started = make("all_reduce", "sum", True)
    reduce, broadcast = make("reduce", (root, "sum")), make("broadcast", root)
    all_gather, into_list = make("all_gather_into_tensor"), make("all_gather")
    exchange, barrier = make("all_to_all_single"), make("barrier")
    gather, scatter = make("gather", root), make("scatter", root)
    scatter_sum = up.fast_path("reduce_scatter_tensor", "sum", group)
    for seed, shape in enumerate([(1,), (4,), (2, 3), (), (5, 1, 2)]):
        parts = [sample(torch.float32, shape, rank, seed) for rank in members]
        mine, total = parts[position], reference(ReduceOp.SUM, parts)

        def own() -> torch.Tensor:
            return mine.clone().to(device)  # noqa: B023

        for op, call in sums.items():
            tensor = own()
            assert call(tensor) is True
            close(tensor, total if op == "sum" else reference(ReduceOp.MAX, parts), f"fast all_reduce {op} of {shape}")
        work = started(tensor := own())
        assert work is not None
        assert work.wait() is True
        close(tensor, total, f"asynchronous fast all_reduce of {shape}")
        assert work.result() is tensor
        tensor = own()
        assert reduce(tensor)
        if world.rank == root:
            close(tensor, total, f"fast reduce of {shape}")
        elif up.fast_path("reduce", (root, "sum"), group) is not None:
            same(tensor, mine, f"tensor of another rank in a fast reduce of {shape}")
        tensor = own()
        assert broadcast(tensor)
        same(tensor, parts[-1], f"fast broadcast of {shape}")
        whole = torch.empty((size, *shape), device=device)
        assert all_gather(whole, own())
        same(whole, torch.stack(parts), f"fast all_gather_into_tensor of {shape}")
        outputs = [torch.empty(shape, device=device) for _ in range(size)]
        assert into_list(outputs, own())
        same(torch.stack(outputs), torch.stack(parts), f"fast all_gather of {shape}")
        at_root = [torch.empty(shape, device=device) for _ in range(size)] if world.rank == root else None
        assert gather(own(), at_root)
        if at_root is not None:
            same(torch.stack(at_root), torch.stack(parts), f"fast gather of {shape}")
        tensor = own().zero_()
        assert scatter(tensor, at_root)
        same(tensor, mine, f"fast scatter of {shape}")
        if partner < size:
            send, receive = make("send", members[partner]), make("recv", members[partner])
            arrived = torch.empty(shape, device=device)
            for message in (send, receive) if position < partner else (receive, send):
                assert message(arrived if message is receive else own()) is True
            same(arrived, parts[partner], f"fast recv of {shape}")
        sources = [sample(torch.float32, (size, *shape), rank, 100 + seed) for rank in members]
        received = torch.empty((size, *shape), device=device)
        assert exchange(received, sources[position].to(device), None, None)
        same(received, torch.stack([source[position] for source in sources]), f"fast all_to_all_single of {shape}")
        if scatter_sum is not None:
            piece = torch.empty(shape, device=device)
            assert scatter_sum(piece, sources[position].to(device))
            expected = reference(ReduceOp.SUM, [source[position] for source in sources])
            close(piece, expected, f"fast reduce_scatter_tensor of {shape}")
        rows = [[(of + to) % 3 + 1 for to in range(size)] for of in range(size)]  # that each sends to each
        sources = [sample(torch.float32, (sum(rows[of]), *shape), rank, seed) for of, rank in enumerate(members)]
        received = torch.empty((sum(sent[position] for sent in rows), *shape), device=device)
        rows_out = [sent[position] for sent in rows]
        assert exchange(received, sources[position].to(device), rows_out, rows[position])
        pieces = [torch.split(source, rows[of])[position] for of, source in enumerate(sources)]
        same(received, torch.cat(pieces), f"fast all_to_all_single with sizes, of {shape}")
        lists = up.fast_path("all_to_all", None, group)
        if lists is not None:
            outputs = list(torch.split(torch.empty_like(received), rows_out))
            outputs = [one.clone() for one in outputs]
            assert lists(outputs, list(torch.split(sources[position].to(device), rows[position])))
            same(torch.cat(outputs), torch.cat(pieces), f"fast all_to_all of {shape}")
        scatter_list = up.fast_path("reduce_scatter", "sum", group)
        if scatter_list is not None:
            sources = [sample(torch.float32, (size, *shape), rank, 100 + seed) for rank in members]
            piece = torch.empty(shape, device=device)
            assert scatter_list(piece, list(sources[position].to(device)))
            close(piece, reference(ReduceOp.SUM, [one[position] for one in sources]), f"fast reduce_scatter of {shape}")
        assert barrier() is True


def _check_lists(world: World, group: ProcessGroup | None, members: list[int]) -> None:
    """Reduce tensors of several dtypes and sizes in a fast path of lists, which is optional."""
    position = members.index(world.rank)
    reduce = world.backend.fast_path("all_reduce_coalesced", "sum", group)
    if reduce is None:
        return
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float64, torch.int64)
    for scale in (1, 3000, 1):
        tensors = [
            torch.full((scale, number + 1), position + number, dtype=dtype, device=world.device)
            for number, dtype in enumerate(dtypes)
        ]
        assert reduce(tensors), "the fast path of lists refuses plain tensors"
        for number, one in enumerate(tensors):
            assert bool((one == sum(range(len(members))) + len(members) * number).all())


def not_plain(device: str) -> Iterator[tuple[str, Any]]:
    """Yield what no fast path takes, by name: eight elements each where there are elements."""
    plain = torch.ones(8, device=device)
    yield "a number", 1.0
    yield "None", None
    yield "a list", [1.0]
    yield "a negated view", torch._neg_view(plain)
    yield "with gaps", torch.ones(16, device=device)[::2]
    yield "expanded", torch.ones(1, device=device).expand(8)
    yield "sparse", plain.to_sparse()
    yield "nested", torch.nested.nested_tensor([plain[:4], plain[4:]])
    yield "on no device", plain.to("meta")
    yield "zeros without memory", torch._efficientzerotensor(8, device=device)
    yield "a subclass", torch.nn.Parameter(plain)
    yield "complex", torch.ones(4, dtype=torch.complex64, device=device)
    for size in (0, 4):
        small = torch.ones(8, device=device)
        small.untyped_storage().resize_(size)
        yield f"with a storage of {size} bytes", small
    behind = torch.ones(16, device=device)[8:]
    behind.untyped_storage().resize_(12 * behind.element_size())
    yield "behind the end of its storage", behind
    for name in ("uint4", "int1"):
        if hasattr(torch, name):
            yield f"of {name}", torch.empty(8, dtype=getattr(torch, name), device=device)
    has_mkldnn: Callable[[], bool] = torch.backends.mkldnn.is_available
    if device == "cpu" and has_mkldnn():
        yield "of mkldnn", plain.float().to_mkldnn()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(8, device=device)
    yield "fake", fake


def _with_one_wrong_tensor(
    row: OperationSpec, path: FastPath, whole: torch.Tensor, part: torch.Tensor, size: int
) -> Iterator[tuple[str, FastPath]]:
    """Yield a call of one tensor for each tensor argument of an operation, with right ones in the others, by name."""
    pattern = row.pattern

    def right(argument: Argument) -> Any:
        if argument.form is Form.PER_RANK:
            return None if argument.at_root else [torch.zeros_like(part) for _ in range(size)]
        is_part = pattern.output_is_part if argument.direction is Direction.OUTPUT else pattern.input_is_part
        return whole if pattern.has_parts and not is_part else part

    def with_wrong(wrong: Argument, *splits: object) -> FastPath:
        return lambda bad: path(*(bad if one is wrong else right(one) for one in row.tensors), *splits)

    splits = [one for one in row.arguments if one.role in (Role.INPUT_SPLITS, Role.OUTPUT_SPLITS)]
    for argument in row.tensors:
        if argument.form is not Form.PER_RANK:
            yield f"{row.name}, {argument.name}", with_wrong(argument, *(None for _ in splits))
            if splits:
                sizes = ([8] * size for _ in splits)
                yield f"{row.name}, {argument.name}, sizes", with_wrong(argument, *sizes)


def _check_refusals(world: World, group: ProcessGroup | None, members: list[int]) -> None:
    """Call on every rank with what each has to refuse alone; what is sent then arrives as if nothing had been."""
    up, device, size = world.backend, world.device, len(members)
    root = members[0]
    make: Callable[..., FastPath] = lambda operation, detail=None: (  # noqa: E731
        up.fast_path(operation, detail, group) or _refuse
    )
    started = up.fast_path("all_reduce", "sum", group, True) or _refuse
    whole, part = torch.zeros(8 * size, device=device), torch.zeros(8, device=device)
    of_one: dict[str, FastPath] = {}
    for row in operations.rows():
        if row.primitive and not row.pattern.is_message:
            details = tuple(root if one.role is Role.ROOT else "sum" for one in _detailed(row))
            path = make(row.name, details if len(details) > 1 else (*details, None)[0])
            of_one.update(_with_one_wrong_tensor(row, path, whole, part, size))
    for what, bad in not_plain(device):
        for name, call in of_one.items():
            assert not call(bad), f"the fast path of {name} takes a tensor {what}"
        assert not started(bad), f"the asynchronous fast path takes a tensor {what}"
    refused: list[Any] = []

    def call_all(one: torch.Tensor) -> torch.Tensor:
        refused.extend(call(one) for call in of_one.values())
        return one  # as vmap asks for; what matters is that the calls were made there

    vmap: Any = torch.vmap
    vmap(call_all)(torch.ones(3, 8, device=device))
    assert not any(refused), "a fast path takes a tensor under vmap"
    exchange = make("all_to_all_single")
    for rows in ([8] * size + [0], [8 * size] + [0] * (size - 1) if size > 1 else [7], (8,) * size, ["8"] * size):
        mine: Any = rows
        assert not exchange(whole, whole.clone(), mine, [8] * size), f"the fast path takes split sizes of {rows}"
    assert not exchange(whole, whole, None, None), "the fast path exchanges parts of one memory"
    assert not make("all_gather_into_tensor")(whole[:-1] if size > 1 else whole.new_zeros(9), part)
    assert not make("all_reduce", "sum")(torch.ones(2, 2, device=device)[:, :1]), "a column"
    tensor = torch.ones(8, device=device)
    assert _made(world, "all_reduce", "sum", group)(tensor)
    assert tensor.tolist() == [float(size)] * 8, "a call that was refused did something"
