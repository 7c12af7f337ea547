"""The conformance suite's checks of collectives, run on every rank. Needs torch."""

from __future__ import annotations

from collections.abc import Collection

import torch

from comm_utils.reduce_op import ReduceOp
from comm_utils.testing.conformance_ways import Way, ways
from comm_utils.testing.conformance_world import World, bring_up, close, reference, same, sample

__all__ = ["movements", "reductions"]


def reductions(provider: str, backend: str, device: str, fast_paths: Collection[str]) -> None:
    """Every reducing operation is right for every pair of operation and dtype that the backend calls native."""
    world = World(bring_up(provider, backend, device), device, fast_paths)
    assert world.capabilities.reductions, "the backend states no native reduction"
    pairs = sorted(world.capabilities.reductions, key=str)
    one_for_each_op = dict(pairs).items()
    for way in ways(world):
        for op, dtype in pairs if way.is_first else one_for_each_op:
            for n in (0, 1, 5, 1000) if way.is_first else (5,):
                _reduce(way, op, dtype, n)
                if not way.async_op:
                    _reduce_fast(way, op, dtype, n)
    world.backend.barrier()
    world.backend.destroy_process_group()


def _reduce(way: Way, op: ReduceOp, dtype: torch.dtype, n: int) -> None:
    up, capabilities, total = way.world.backend, way.world.capabilities, n * way.size
    expected, what = reference(op, way.everyones(dtype, total)), f"{op.name} of {n} {dtype} {way}"
    tensor = way.mine(dtype, total)
    way.call(up.all_reduce, tensor, op=op, result=tensor)
    close(tensor, expected, f"all_reduce {what}")
    dst, tensor = way.size - 1, way.mine(dtype, total)
    is_kept = way.position != dst and capabilities.preserving_reduce
    way.call(
        up.reduce,
        tensor,
        op=op,
        result=tensor if way.position == dst else None,
        inputs=[tensor] if is_kept else (),
        **way.named("dst", dst),
    )
    if way.position == dst:
        close(tensor, expected, f"reduce {what}")
    if "reduce_scatter_tensor" in capabilities.operations:
        source, output = way.mine(dtype, total), way.output(dtype, n)
        way.call(up.reduce_scatter_tensor, output, source, op=op, result=output, inputs=[source])
        close(output, expected[way.position * n : (way.position + 1) * n], f"reduce_scatter_tensor {what}")


def _reduce_fast(way: Way, op: ReduceOp, dtype: torch.dtype, n: int) -> None:
    fast = way.world.backend.fast_path("all_reduce", op, way.group)
    what = f"fast all_reduce {op.name} of {n} {dtype} {way}"
    tensor, expected = way.mine(dtype, n * way.size), reference(op, way.everyones(dtype, n * way.size))
    if fast is not None and fast(tensor):
        close(tensor, expected, what)
    else:
        assert n == 0 or "all_reduce" not in way.world.fast_paths, f"there is no {what}"
        way.world.backend.all_reduce(tensor, op, way.group)  # another rank may have it


def movements(provider: str, backend: str, device: str) -> None:
    """Every dtype that the backend calls native arrives bit by bit through every moving operation."""
    world = World(bring_up(provider, backend, device), device)
    assert torch.uint8 in world.capabilities.dtypes, "the backend does not move bytes, as which other dtypes travel"
    for way in ways(world):
        for dtype in sorted(world.capabilities.dtypes, key=str) if way.is_first else [torch.uint8]:
            for n in (0, 1, 7) if way.is_first else (7,):
                _move(way, dtype, n)
        way.call(world.backend.barrier)
    world.backend.barrier()
    world.backend.destroy_process_group()


def _move(way: Way, dtype: torch.dtype, n: int) -> None:
    up, size, position, last = way.world.backend, way.size, way.position, way.size - 1
    parts = way.everyones(dtype, n)
    together, what = torch.cat(parts), f"of {n} {dtype} {way}"
    tensor = way.mine(dtype, n)
    way.call(up.broadcast, tensor, result=tensor, **way.named("src", last))
    same(tensor, parts[last], f"broadcast {what}")
    source, flat = way.mine(dtype, n), way.output(dtype, n * size)
    way.call(up.all_gather_into_tensor, flat, source, result=flat, inputs=[source])
    same(flat, together, f"all_gather_into_tensor {what}")
    outputs = [way.output(dtype, n) for _ in parts]
    way.call(up.all_gather, outputs, source, result=outputs, inputs=[source])
    same(torch.cat(outputs), together, f"all_gather {what}")
    gathered = [way.output(dtype, n) for _ in parts] if position == last else None
    way.call(up.gather, source, gathered, result=gathered, inputs=[source], **way.named("dst", last))
    if gathered is not None:
        same(torch.cat(gathered), together, f"gather {what}")
    piece, entries = way.output(dtype, n), [part.to(way.world.device) for part in parts] if position == 0 else None
    way.call(up.scatter, piece, entries, result=piece, inputs=entries or (), **way.named("src", 0))
    same(piece, parts[position], f"scatter {what}")
    sizes = [n + (peer + position) % 2 for peer in range(size)]  # the same in both directions
    sent = [[sample(dtype, (n + (of + to) % 2,), 10 * of + to) for to in range(size)] for of in range(size)]
    source, target = torch.cat(sent[position]).to(way.world.device), way.output(dtype, sum(sizes))
    way.call(up.all_to_all_single, target, source, sizes, sizes, result=target, inputs=[source])
    same(target, torch.cat([row[position] for row in sent]), f"all_to_all_single with sizes {what}")
    source, target = way.mine(dtype, n * size), way.output(dtype, n * size)
    way.call(up.all_to_all_single, target, source, result=target, inputs=[source])
    expected = [torch.chunk(whole, size)[position] if n else whole for whole in way.everyones(dtype, n * size)]
    same(target, torch.cat(expected), f"all_to_all_single {what}")
