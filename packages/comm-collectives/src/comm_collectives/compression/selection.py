"""Choose which calls are compressed, and how."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed.distributed_c10d as internals
from torch.distributed import ProcessGroup

from comm_collectives.by_group import GroupRecords
from comm_collectives.compression import calls, pace
from comm_collectives.compression.defaults import default_of, forget_defaults
from comm_collectives.compression.settings import Compression, as_compression
from comm_collectives.failed_steps import breaking
from comm_collectives.hierarchy.choice import with_hierarchy
from comm_collectives.hierarchy.plan import find_host_count
from comm_collectives.measured_choice import AUTO, Call, least_faster_size, prepared_call, whole_and_part
from comm_collectives.reduction.order import order_of
from comm_collectives.wrapping import bare_backend
from comm_utils import operations
from comm_utils.active import active_backend, slot
from comm_utils.errors import ArgumentError, NotInitializedError
from comm_utils.log import logger
from comm_utils.operations import Role
from comm_utils.reduce_op import ReduceOp
from comm_utils.sizes import format_size
from comm_utils.torch_support.plain_tensors import present

__all__ = ["DTYPES", "PLAIN", "choose", "forget_choices", "simplify", "threshold"]

#: Dtypes that are compressed; others are exact, or have no place in a format.
DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_OPS = frozenset((ReduceOp.SUM, ReduceOp.AVG))
_OPS_OF_TORCH = (torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG)
_USUAL_OPS = frozenset((None, "sum", "avg", "SUM", "AVG", *_OPS, *_OPS_OF_TORCH))

#: The ``compression`` of a call that travels as it is.
PLAIN = "none"

# What is smaller is not measured, and not compressed.
_MEASURED_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
# A gain below that may have been chance.
_AT_MOST = 0.9

# Of the answers that are kept.
_MOST_KNOWN = 1000

#: By operation, compression and kind of device: the size from which on it is faster; None for never.
_Limits: TypeAlias = dict[tuple[str, str, str], int | None]


_measured: GroupRecords[_Limits] = GroupRecords(dict)


def forget_choices() -> None:
    """Compress nothing in the world to come, and measure again where that is to be measured."""
    forget_defaults()
    pace.forget()
    _measured.forget()


def threshold(operation: str, group: ProcessGroup | None) -> int | None:
    """Return from how many bytes on calls are compressed by default, so that no fast path serves them; None: none."""
    found = default_of(group)
    if found is None or not _serves(found, operation) or not _has_a_link(found, group):
        return None
    # Where ranks have different sizes, all of them have to agree on what is small.
    if operations.get(operation).pattern.uneven:
        return 0
    if found.min_size_bytes != AUTO:
        return found.settled_min_size_bytes
    kinds = present(active_backend().device_types(group))
    limits = [_limit_so_far(operation, found, group, kind) for kind in kinds]
    return min((one for one in limits if one is not None), default=None)


def _limit_so_far(operation: str, compression: Compression, group: ProcessGroup | None, device: str) -> int | None:
    """Return the size from which on calls are compressed, or measured; None where they never are."""
    if active_backend().get_world_size(group) == 1:
        return None
    key = operations.get(operation).measured_as, repr(compression), device
    return _measured.of(group).get(key, _MEASURED_BYTES[0])


def simplify(call: str, given: Any, op: Any, group: ProcessGroup | None, tensors: Sequence[Any]) -> Any:
    """Return :data:`PLAIN` where a call with ``compression=given`` travels as it is, and ``given`` otherwise.

    Where that takes longer to find out, or the call may be wrong, :func:`choose` does.
    """
    if type(given) is str:
        return PLAIN if given == PLAIN else given
    first = tensors[0]
    if type(given) is not Compression or not isinstance(first, torch.Tensor) or first.dtype not in DTYPES:
        return given
    known, device = slot.fast_paths.memo("compression"), first.device.type
    # Not the object, which would stay in memory, and all that its encodings have lost.
    key = call, repr(given), given.min_size_bytes, op, group, device
    try:
        limit = known[key]
    except (KeyError, TypeError):
        try:
            limit = _plain_below(call, given, op, group, device)
        except (NotInitializedError, TypeError):  # for the checked path to say
            return given
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[key] = limit
    if limit is not None:
        for one in tensors:  # lists are left to the checked path
            if not isinstance(one, torch.Tensor) or one.layout is not torch.strided or one.nbytes >= limit:
                return given
    return PLAIN


def _plain_below(call: str, given: Compression, op: Any, group: ProcessGroup | None, device: str) -> int | None:
    """Return the size of the smallest tensors with which a call may not be plain; None where it always is.

    Raises:
        NotInitializedError, TypeError: there is no such group, or no world, or this is no op.
    """
    if group is not None and group not in internals._world.pg_map:
        raise TypeError
    # Of calls of different sizes, ranks have to agree on the size.
    if operations.get(call).pattern.uneven or not _serves(given, call) or op not in _USUAL_OPS:
        return 0
    if not _has_a_link(given, group):
        return None
    return _limit_so_far(call, given, group, device) if given.min_size_bytes == AUTO else given.settled_min_size_bytes


def _serves(compression: Compression, operation: str) -> bool:
    row, codec = operations.get(operation), compression.codec
    if row.argument(Role.COMPRESSION) is None:
        return False
    if compression.between_hosts and row.pattern.uneven:
        return False
    return row.pattern.reduces or (codec is not None and codec.gathers)


def _what_it_serves(compression: Compression) -> str:
    served, where = "all_reduce and reduce_scatter", ""
    if compression.between_hosts:
        served, where = "all_reduce, reduce_scatter and all_gather", " between hosts"
    return f"{compression.method}{where} compresses {served} alone"


def _has_a_link(compression: Compression, group: ProcessGroup | None) -> bool:
    return not compression.between_hosts or find_host_count(active_backend(), group) > 1


def choose(
    call: str,
    given: Any,
    tensor: torch.Tensor,
    op: ReduceOp | None,
    group: ProcessGroup | None,
    size_bytes: int | None = None,
) -> Compression | None:
    """Return what compresses a call; None for nothing.

    Where the least size is to be measured, the first call of an operation on a group does so.

    Args:
        given: the call's own ``compression``.
        op: of a reduction.
        size_bytes: of the call, the same on every rank; None for that of ``tensor``. An all_to_all has no such size:
            ``calls.all_to_all`` finds out whether it is large enough.

    Raises:
        ArgumentError: it was asked for in this call, and there is none for its dtype, op or operation; or it is a
            reduction on a group whose reductions are to be deterministic.
    """
    asked = given is not None
    found = as_compression(call, given) if asked else default_of(group)
    if found is None:
        return None
    refusal = ""
    if tensor.dtype not in DTYPES:
        refusal = f"got a tensor of {tensor.dtype}; {found.method} compresses float32, float16 and bfloat16"
    elif op is not None and op not in _OPS:
        refusal = f"got op {op.name.lower()!r}; {found.method} compresses sums and averages"
    elif not _serves(found, call):
        refusal = _what_it_serves(found)
    if not refusal:
        return _by_size(call, asked, found, tensor, op, group, tensor.nbytes if size_bytes is None else size_bytes)
    if asked:
        raise ArgumentError(f"{call}: compression: {refusal}")
    return None


def _by_size(
    call: str,
    asked: bool,
    found: Compression,
    tensor: torch.Tensor,
    op: ReduceOp | None,
    group: ProcessGroup | None,
    size_bytes: int,
) -> Compression | None:
    row = operations.get(call)
    if not _has_a_link(found, group):
        return None
    if found.min_size_bytes == AUTO:
        if size_bytes < _MEASURED_BYTES[0] and not row.pattern.uneven:
            return None
        limit = _measured_limit(row.measured_as, found, group, tensor.device)
    else:
        limit = found.settled_min_size_bytes
    if limit is None or (size_bytes < limit and not row.pattern.uneven):
        return None
    if found.min_size_bytes == AUTO:
        found = found.with_min_size(limit)
    if op is None or order_of(group) is None:
        return found
    # Where an element lies decides with which others it is encoded, and who adds it without encoding.
    raise ArgumentError(
        f"{call}: compression: got {found.method!r} {'in this call' if asked else 'from set_compression()'} on a "
        "group with deterministic reductions, whose results must not depend on where an element lies; give "
        "compression='none', or call set_deterministic_reductions(False)"
    )


def _measured_limit(
    operation: str, compression: Compression, group: ProcessGroup | None, device: torch.device
) -> int | None:
    """Return the size of a call, as :func:`choose` counts it, from which on ``compression`` is faster; None for never.

    All ranks measure in the same call.
    """
    if active_backend().get_world_size(group) == 1:
        return None
    limits = _measured.of(group)
    key = operation, repr(compression), device.type
    if key not in limits:
        limits[key] = _measure(operation, compression, group, device)
        slot.fast_paths.clear()
    return limits[key]


def _measure(operation: str, compression: Compression, group: ProcessGroup | None, device: torch.device) -> int | None:
    backend, pattern = bare_backend().during(operation), operations.get(operation).pattern
    ranks, scratch = backend.get_world_size(group), compression.without_state()
    # Calls that gather count what one rank gives.
    parts = ranks if pattern.input_is_part else 1

    def make(size_bytes: int) -> tuple[Call, Call]:
        whole_bytes = size_bytes * parts
        uncompressed = with_hierarchy(operation, backend, group, whole_bytes, device)
        whole, part = whole_and_part(whole_bytes, ranks, device)
        return (
            prepared_call(uncompressed, operation, group, whole_bytes, device),
            partial(calls.on_tensors, operation, backend, whole, part, group, scratch),
        )

    with breaking(operation, backend, group, what="the measurement of compressed calls"):
        least = least_faster_size(backend, group, _MEASURED_BYTES, make, _AT_MOST, device)
    if backend.get_rank(group) == 0:
        sizes = "no size" if least is None else f"{format_size(least)} and more"
        logger.info("%s of %d ranks is compressed to %r for %s", operation, ranks, compression, sizes)
    return least
