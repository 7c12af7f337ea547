"""Objects between all ranks of a group: gather, broadcast, scatter.

Sizes are exchanged first, then the objects. Where a rank has an object that cannot be sent, or does not accept one,
every rank raises before any object moves, and the group stays usable.

Common to all: ``group=None`` is the world group; ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst``
ranks within the group, by default that of global rank 0. A rank that is not a member does nothing and gets None.
``allow_pickle``: pickle what has no encoding, and accept pickles, by which other ranks can run any code here; None is
what ``set_object_policy`` says. What a call overwrites or returns are copies, also of this rank's own object.

Errors: ``ArgumentTypeError`` (a ``TypeError``) for an object that cannot be sent, with its place;
``ObjectExchangeError`` on the other ranks then; ``ObjectDecodeError`` (a ``ValueError``) for one that this rank does
not accept; ``CollectiveMismatchError`` where ranks call different functions, or with different roots or lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup

from comm_collectives import graph_breaks
from comm_collectives.arguments import enter, group_rank_of
from comm_collectives.collective import collective
from comm_collectives.object_codec import ObjectDecodeError, decode_object, encode_object, resolve_allow_pickle
from comm_collectives.objects.agreement import Misuse, Offer, agree, record_of
from comm_collectives.objects.channel import Channel
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = [
    "all_gather_object",
    "all_gather_over",
    "allgather_object",
    "broadcast_object",
    "broadcast_object_list",
    "check_list",
    "exchange_to_root",
    "gather_object",
    "root_of",
    "scatter_object_list",
    "try_to_encode",
]


@collective(compiled=graph_breaks.OBJECTS)
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Collect every rank's object on every rank.

    Args:
        object_list: W entries; overwritten, in rank order.
        obj: this rank's.
    """
    call = "all_gather_object"
    backend = enter(call, group, timeout)
    if backend is None:
        return
    unpickle = resolve_allow_pickle(call, allow_pickle)
    channel = Channel(call, backend, group)
    object_list[:] = all_gather_over(
        channel, obj, unpickle, lambda: check_list(call, "object_list", object_list, channel.W)
    )


@collective(compiled=graph_breaks.OBJECTS, labels=False)
def allgather_object(
    obj: Any,
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool | None = None,
    timeout: float | timedelta | None = None,
) -> Any:
    """Collect every rank's object on every rank and return the list, in rank order.

    Args:
        obj: any object that can be sent.
    """
    call = "allgather_object"
    backend = enter(call, group, timeout)
    if backend is None:
        return None
    return all_gather_over(Channel(call, backend, group), obj, resolve_allow_pickle(call, allow_pickle))


def all_gather_over(
    channel: Channel, obj: Any, unpickle: bool, check_arguments: Callable[[], None] | None = None
) -> list[Any]:
    """Every rank's object, in rank order, on every rank.

    Args:
        check_arguments: raises if this rank was called wrongly; then all ranks raise.
    """
    call = channel.call
    message, failure = try_to_encode(lambda: encode_object(obj, unpickle, call=call), check_arguments)
    record = record_of(call, -1, 0, _none_or_one(message), unpickle, failure)
    offers = agree(channel, record, message, failure, -1)
    messages = _inline(offers)
    if messages is None:
        with channel.delivering():
            messages = channel.all_gather(message, [offer.size for offer in offers])
    return _decode_all(channel, messages, unpickle)


@collective(compiled=graph_breaks.OBJECTS, labels=False)
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    *,
    allow_pickle: bool | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Collect every rank's object on ``dst``.

    Args:
        obj: this rank's.
        object_gather_list: on ``dst``, W entries; overwritten, in rank order. None on the other ranks.
        dst: by default global rank 0, where it is a member.
    """
    call = "gather_object"
    backend = enter(call, group, timeout)
    if backend is None:
        return
    unpickle = resolve_allow_pickle(call, allow_pickle)
    root = root_of(call, "dst", backend, group, dst, group_dst)
    channel = Channel(call, backend, group)

    def check_arguments() -> None:
        if channel.rank == root:
            check_list(call, "object_gather_list", object_gather_list, channel.W)
        elif object_gather_list:
            raise ArgumentError(
                f"{call}: object_gather_list: got a list on a rank that is not dst; expected None there"
            )

    gathered = exchange_to_root(channel, obj, root, 0, unpickle, check_arguments=check_arguments)
    if object_gather_list is not None and gathered is not None:
        object_gather_list[:] = gathered


def exchange_to_root(
    channel: Channel,
    obj: Any,
    root: int,
    detail: int,
    unpickle: bool,
    check: Callable[[Any], None] | None = None,
    check_arguments: Callable[[], None] | None = None,
) -> list[Any] | None:
    """Every rank's object, in rank order, on ``root``; None elsewhere.

    Args:
        detail: what else must be the same on every rank.
        check: raises for an object of this rank's that must not be sent.
        check_arguments: raises if this rank was called wrongly; then all ranks raise.
    """

    def encode() -> bytearray:
        if check is not None:
            check(obj)
        return encode_object(obj, unpickle, call=channel.call)

    message, failure = try_to_encode(encode, check_arguments)
    record = record_of(channel.call, root, detail, _none_or_one(message), unpickle, failure)
    offers = agree(channel, record, message, failure, root, True)
    messages = _inline(offers)
    if messages is None:
        with channel.delivering():
            messages = channel.gather(message, [offer.size for offer in offers], root)
    return _decode_all(channel, messages, unpickle) if channel.rank == root else None


@collective(compiled=graph_breaks.OBJECTS)
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Copy the objects of ``src`` to every other rank.

    Args:
        object_list: of the same length on every rank; overwritten except on ``src``.
        src: by default global rank 0, where it is a member.
        device: through whose memory the bytes go; only needed where the group serves several.
    """
    call = "broadcast_object_list"
    backend = enter(call, group, timeout)
    if backend is None:
        return
    unpickle = resolve_allow_pickle(call, allow_pickle)
    root = root_of(call, "src", backend, group, src, group_src)
    channel = Channel(call, backend, group, device)
    length = len(object_list) if isinstance(object_list, list) else 0
    received = _broadcast(
        channel,
        object_list,
        "object_list",
        root,
        length,
        unpickle,
        lambda: check_list(call, "object_list", object_list),
    )
    if channel.rank != root:
        if type(received) is not list or len(received) != len(object_list):
            raise ObjectDecodeError(
                f"{call}: rank {channel.ranks[root]} did not send a list of {len(object_list)} objects"
            )
        object_list[:] = received


@collective(compiled=graph_breaks.OBJECTS, labels=False)
def broadcast_object(
    obj: Any,
    src: int,
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool | None = None,
    timeout: float | timedelta | None = None,
) -> Any:
    """Return the object of ``src`` on every rank.

    Args:
        obj: sent by ``src``, to which it is returned as it is; ignored elsewhere.
    """
    call = "broadcast_object"
    backend = enter(call, group, timeout)
    if backend is None:
        return None
    unpickle = resolve_allow_pickle(call, allow_pickle)
    root = group_rank_of(call, "src", backend, group, src, None)
    return _broadcast(Channel(call, backend, group), obj, "obj", root, 0, unpickle)


def _broadcast(
    channel: Channel,
    obj: Any,
    name: str,
    root: int,
    detail: int,
    unpickle: bool,
    check_arguments: Callable[[], None] | None = None,
) -> Any:
    call = channel.call

    def encode() -> bytearray | None:
        return encode_object(obj, unpickle, call=call, name=name) if channel.rank == root else None

    message, failure = try_to_encode(encode, check_arguments)
    sent = _none_or_one(message) if channel.rank == root else []
    record = record_of(call, root, detail, sent, unpickle, failure)
    offer = agree(channel, record, message, failure, root)[root]
    received = offer.message
    if received is None:
        with channel.delivering():
            received = channel.broadcast(message, offer.size, root)
    return obj if channel.rank == root else _decode(channel, received, root, unpickle)


@collective(compiled=graph_breaks.OBJECTS, labels=False)
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Hand object r of ``src`` to rank r.

    Args:
        scatter_object_output_list: at least one entry; the first is overwritten.
        scatter_object_input_list: on ``src``, W objects; ignored elsewhere.
        src: by default global rank 0, where it is a member.
    """
    call = "scatter_object_list"
    backend = enter(call, group, timeout)
    if backend is None:
        return
    unpickle = resolve_allow_pickle(call, allow_pickle)
    root = root_of(call, "src", backend, group, src, group_src)
    channel = Channel(call, backend, group)

    def check_arguments() -> None:
        check_list(call, "scatter_object_output_list", scatter_object_output_list)
        if not scatter_object_output_list:
            raise ArgumentError(
                f"{call}: scatter_object_output_list: got an empty list; expected one entry to overwrite"
            )
        if channel.rank == root:
            check_list(call, "scatter_object_input_list", scatter_object_input_list, channel.W)

    objects = scatter_object_input_list if channel.rank == root else None
    scatter_object_output_list[0] = _scatter(channel, objects, root, unpickle, check_arguments)


def _scatter(
    channel: Channel, sent: list[Any] | None, root: int, unpickle: bool, check_arguments: Callable[[], None]
) -> Any:
    call = channel.call

    def encode() -> list[bytearray]:
        objects = list(sent or ())
        names = [f"scatter_object_input_list[{rank}]" for rank in range(len(objects))]
        return [encode_object(obj, unpickle, call=call, name=name) for obj, name in zip(objects, names, strict=True)]

    messages, failure = try_to_encode(encode, check_arguments)
    record = record_of(call, root, 0, messages, unpickle, failure)
    offers = agree(channel, record, None, failure, root)
    assert messages is not None
    if channel.W == 1:
        return _decode(channel, memoryview(messages[0]), root, unpickle)
    with channel.delivering():
        received = channel.scatter(messages, offers[root].size, root)
    return _decode(channel, received, root, unpickle)


def root_of(
    call: str, name: str, backend: Backend, group: ProcessGroup | None, rank: int | None, group_rank: int | None
) -> int:
    """Return the group rank of ``src`` or ``dst``.

    Where neither form is given, that of global rank 0, torch's default.
    """
    ranks = backend.get_process_group_ranks(group)
    default = ranks.index(0) if 0 in ranks else None
    return group_rank_of(call, name, backend, group, rank, group_rank, default=default)


def try_to_encode(
    encode: Callable[[], Any], check_arguments: Callable[[], None] | None = None
) -> tuple[Any, Exception | None]:
    """Return the result or the exception of ``encode``: the other ranks must know before it is raised.

    Args:
        check_arguments: raises if this rank was called wrongly, which becomes a ``Misuse``.
    """
    try:
        if check_arguments is not None:
            check_arguments()
    except ArgumentError as error:
        return None, Misuse(error)
    try:
        return encode(), None
    except Exception as error:
        return None, error


def _inline(offers: Sequence[Offer]) -> list[memoryview] | None:
    """Every rank's message, if all of them came with the records."""
    messages = [offer.message for offer in offers if offer.message is not None]
    return messages if len(messages) == len(offers) else None


def _none_or_one(message: bytearray | None) -> list[bytearray] | None:
    return None if message is None else [message]


def _decode(channel: Channel, message: memoryview, rank: int, unpickle: bool) -> Any:
    source = f"{channel.call}: the object of rank {channel.ranks[rank]}"
    return decode_object(message, unpickle, source=source)


def _decode_all(channel: Channel, messages: list[memoryview], unpickle: bool) -> list[Any]:
    return [_decode(channel, message, rank, unpickle) for rank, message in enumerate(messages)]


def check_list(call: str, name: str, value: Any, length: int | None = None) -> None:
    """Refuse what is no list, or not of ``length``."""
    if not isinstance(value, list):
        wanted = "a list" if length is None else f"a list of {length} entries, one for each rank of the group"
        raise ArgumentTypeError(f"{call}: {name}: got {shown(value)} of type {type(value).__name__}; expected {wanted}")
    if length is not None and len(value) != length:
        raise ArgumentError(
            f"{call}: {name}: got a list of {len(value)}; expected {length} entries, one for each rank of the group"
        )
