"""Objects from one rank to another.

The sender describes its message, the receiver answers whether it accepts, and only then the message follows; so both
raise where one refuses, and neither is left with half an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from comm_collectives import graph_breaks
from comm_collectives.arguments import enter, group_rank_of
from comm_collectives.collective import collective
from comm_collectives.object_codec import (
    ObjectDecodeError,
    ObjectExchangeError,
    decode_object,
    encode_object,
    resolve_allow_pickle,
)
from comm_collectives.objects.agreement import FAILED, MISUSED, Misuse, Offer, check_offer, record_of
from comm_collectives.objects.channel import RECORD_NUMBERS, Channel, Inbox, outbox
from comm_collectives.objects.collective import check_list, try_to_encode
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError, CollectiveMismatchError
from comm_utils.torch_support import factories

__all__ = ["recv_object_list", "send_object_list"]

# Tags of offer, answer and message. If the backend supports tags, these separate objects from the tensors of send().
_TAGS = (0x6F626A31, 0x6F626A32, 0x6F626A33)
_ACCEPTED, _REFUSED = 1, 0
_CALL = "send_object_list"
_NOT_SENT = {FAILED: "could not send the objects", MISUSED: "called with a wrong argument"}


class _Peer:
    """Messages of one call to and from another rank."""

    def __init__(self, channel: Channel, position: int | None, use_batch: bool) -> None:
        self._channel = channel
        self._position = position
        self._use_batch = use_batch
        # A backend that has tags and not this moves messages with tags at another speed.
        self._tags = _TAGS if channel.capabilities.tags and channel.capabilities.any_source else (0, 0, 0)

    @property
    def rank(self) -> int:
        """The global rank of the peer, once it is known."""
        assert self._position is not None
        return self._channel.ranks[self._position]

    def send(self, tensor: torch.Tensor, step: int) -> None:
        backend, group, tag = self._channel.backend, self._channel.group, self._tags[step]
        if self._use_batch:
            self._batch(c10d.isend, tensor, tag)
        else:
            backend.isend(tensor, None, group, tag, self._position).wait()

    def recv(self, tensor: torch.Tensor, step: int) -> None:
        backend, group, tag = self._channel.backend, self._channel.group, self._tags[step]
        if self._use_batch and self._position is not None:
            self._batch(c10d.irecv, tensor, tag)
        else:
            source = backend.recv(tensor, None, group, tag, self._position)
            if self._position is None:
                self._position = self._channel.ranks.index(source)

    def _batch(self, op: Any, tensor: torch.Tensor, tag: int) -> None:
        p2p = c10d.P2POp(op, tensor, self.rank, self._channel.group, tag)
        for work in self._channel.backend.batch_isend_irecv([p2p]):
            work.wait()

    def send_numbers(self, numbers: Sequence[int], step: int) -> None:
        tensor = factories.tensor(numbers, dtype=torch.int64, device=self._channel.device)
        self.send(self._channel.bytes_of(tensor), step)

    def recv_numbers(self, count: int, step: int) -> list[int]:
        tensor = factories.zeros(count, dtype=torch.int64, device=self._channel.device)
        self.recv(self._channel.bytes_of(tensor), step)
        numbers: list[int] = tensor.tolist()
        return numbers


@collective(compiled=graph_breaks.OBJECTS, labels=False)
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    allow_pickle: bool | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Send objects to ``dst``; return when it has them.

    Args:
        object_list: only read.
        dst: a member other than this rank.
        device: through whose memory the bytes go; only needed where the group serves several.
        use_batch: send through ``batch_isend_irecv``, as ``dst`` then must receive.
        allow_pickle: pickle objects without an encoding; None uses the setting of ``set_object_policy``.

    Raises:
        ArgumentTypeError: an object cannot be sent, or it is no list; ``dst`` gets an error too.
        ObjectExchangeError: ``dst`` does not accept.
    """
    backend = enter(_CALL, group, timeout)
    if backend is None:
        return
    unpickle = resolve_allow_pickle(_CALL, allow_pickle)
    position = group_rank_of(_CALL, "dst", backend, group, dst, group_dst)
    _check_peer(_CALL, "dst", backend, group, position)
    channel = Channel(_CALL, backend, group, device)
    peer = _Peer(channel, position, use_batch)
    message, failure = try_to_encode(
        lambda: encode_object(object_list, unpickle, call=_CALL, name="object_list"),
        lambda: check_list(_CALL, "object_list", object_list),
    )
    sent = None if message is None else [message]
    length = len(object_list) if isinstance(object_list, list) else 0
    peer.send_numbers(record_of(_CALL, -1, length, sent, unpickle, failure), 0)
    if failure is not None:
        raise failure.error if isinstance(failure, Misuse) else failure
    assert message is not None
    (answer,) = peer.recv_numbers(1, 1)
    if answer != _ACCEPTED:
        raise ObjectExchangeError(f"{_CALL}: rank {peer.rank} does not accept the objects; see the error of that rank")
    peer.send(outbox(message, channel.device), 2)


@collective(compiled=graph_breaks.OBJECTS, labels=False)
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    allow_pickle: bool | None = None,
    timeout: float | timedelta | None = None,
) -> int:
    """Receive the objects that ``src`` sends; return its global rank, -1 on a rank that is not a member.

    Args:
        object_list: as long as the sender's; overwritten.
        src: a member other than this rank; None for any source, if the backend supports it (not NCCL).
        device, use_batch: as for :func:`send_object_list`.
        allow_pickle: accept a pickle, by which the sender can run any code here; None is what
            ``set_object_policy`` says.

    Raises:
        ArgumentTypeError: ``object_list`` is no list; the sender gets an error too.
        ObjectDecodeError: this rank does not accept the objects; the sender gets an error too.
        ObjectExchangeError: the sender could not send.
        CollectiveMismatchError: the sender's list has another length.
    """
    call = "recv_object_list"
    backend = enter(call, group, timeout)
    if backend is None:
        return -1
    unpickle = resolve_allow_pickle(call, allow_pickle)
    channel = Channel(call, backend, group, device)
    position = None
    if src is not None or group_src is not None:
        position = group_rank_of(call, "src", backend, group, src, group_src)
        _check_peer(call, "src", backend, group, position)
    elif not channel.capabilities.any_source:
        raise ArgumentError(
            f"{call}: src: missing; backend {backend.get_backend(group)!r} cannot receive from any source; name the "
            "sender"
        )
    peer = _Peer(channel, position, use_batch)
    offered = Offer(*peer.recv_numbers(RECORD_NUMBERS, 0))
    refusal = _refusal(call, peer.rank, offered, object_list, unpickle)
    inbox = None
    if refusal is None:
        try:
            inbox = Inbox(offered.size, channel.device)
        except (MemoryError, RuntimeError) as error:
            refusal = ObjectDecodeError(
                f"{call}: rank {peer.rank} sends {offered.size} bytes, for which this rank has no memory "
                f"({type(error).__name__}); no object was delivered"
            )
    if offered.size not in _NOT_SENT:
        peer.send_numbers([_REFUSED if inbox is None else _ACCEPTED], 1)
    if inbox is None:
        assert refusal is not None
        raise refusal
    peer.recv(inbox.tensor, 2)
    source = f"{call}: what rank {peer.rank} sent"
    received = decode_object(inbox.messages([offered.size])[0], unpickle, source=source)
    if type(received) is not list or len(received) != len(object_list):
        raise ObjectDecodeError(f"{source} is not a list of {len(object_list)} objects")
    object_list[:] = received
    return peer.rank


def _refusal(call: str, rank: int, offered: Offer, object_list: Any, unpickle: bool) -> Exception | None:
    try:
        check_list(call, "object_list", object_list)
    except ArgumentError as error:
        return error
    if offered.size in _NOT_SENT:
        return ObjectExchangeError(
            f"{call}: rank {rank} {_NOT_SENT[offered.size]}; see the error there. No object was delivered, and the "
            "group stays usable"
        )
    mine = Offer(*record_of(_CALL, -1, len(object_list), [], unpickle))
    if offered.call != mine.call:
        return CollectiveMismatchError(f"{call}: rank {rank} called something else than send_object_list")
    if offered.detail != mine.detail:
        return CollectiveMismatchError(
            f"{call}: object_list: got a list of {mine.detail}; rank {rank} sends {offered.detail} objects"
        )
    reason = check_offer(offered, mine)
    return None if reason is None else ObjectDecodeError(f"{call}: rank {rank} sends {reason}; no object was delivered")


def _check_peer(call: str, name: str, backend: Backend, group: ProcessGroup | None, position: int) -> None:
    if position == backend.get_rank(group):
        raise ArgumentError(f"{call}: {name}: got this rank itself ({position}); expected another member of the group")
