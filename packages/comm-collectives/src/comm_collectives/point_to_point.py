"""Messages between two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, overload

import torch
import torch.distributed as c10d

from comm_collectives.annotations import Group, Timeout
from comm_collectives.arguments import check_tensor, describe, enter, group_rank_of
from comm_collectives.collective import collective
from comm_collectives.groups import get_global_rank, get_group_rank
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.memory import StagingBuffer, as_bytes, contiguous, copy_back
from comm_collectives.work import After, Received, run
from comm_utils.backend import Backend, Capabilities, Work
from comm_utils.errors import ArgumentError, ArgumentTypeError, CommError
from comm_utils.given import shown

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]

# c10d passes tags as C ints.
_LAST_TAG = (1 << 31) - 1


@overload
def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
) -> None: ...
@overload
def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None: ...
@collective(("tensor",), "dst")
def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Send ``tensor`` to ``dst``; return when it may be overwritten.

    Args:
        tensor: any shape and dtype; only read.
        dst: a member other than this rank.
    """
    if async_op:
        return isend(tensor, dst, group, tag, group_dst, timeout=timeout)
    backend = enter("send", group, timeout)
    if backend is not None:
        position, sent = _prepare_send("send", backend, tensor, dst, group, tag, group_dst)
        backend.send(sent, None, group, tag, position)
    return None


@overload
def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
) -> int: ...
@overload
def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> int | Work: ...
@collective(("tensor",), "src", result="src")
def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Any:
    """Receive into ``tensor``; return the sender's global rank, or the handle for ``async_op``.

    Args:
        tensor: the size and dtype of what is sent; dense; overwritten.
        src: a member other than this rank; None for any source, if the backend supports it (not NCCL).
    """
    if async_op:
        return irecv(tensor, src, group, tag, group_src, timeout=timeout)
    backend = enter("recv", group, timeout)
    if backend is None:
        return -1
    position, received, buffer = _prepare_recv("recv", backend, tensor, src, group, tag, group_src)
    source = backend.recv(received, None, group, tag, position)
    finish = copy_back([buffer])
    if finish is not None:
        run(finish)
    return source if position is None else backend.get_process_group_ranks(group)[position]


@collective()
def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`send` that returns a handle at once.

    Args:
        tensor: any shape and dtype; must stay as it is until ``wait()`` returns.
        dst: a member other than this rank.
    """
    backend = enter("isend", group, timeout)
    if backend is None:
        return None
    position, sent = _prepare_send("isend", backend, tensor, dst, group, tag, group_dst)
    return After([backend.isend(sent, None, group, tag, position)], None, tensor)


@collective()
def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`recv` that returns a handle at once; its ``result()`` is ``tensor``.

    Args:
        tensor: the size and dtype of what is sent; dense; overwritten when ``wait()`` returns.
        src: a member other than this rank; None for any source, if the backend supports it.
    """
    backend = enter("irecv", group, timeout)
    if backend is None:
        return None
    position, received, buffer = _prepare_recv("irecv", backend, tensor, src, group, tag, group_src)
    work = backend.irecv(received, None, group, tag, position)
    return Received([work], copy_back([buffer]), tensor)


def _prepare_send(
    call: str,
    backend: Backend,
    tensor: torch.Tensor,
    dst: int | None,
    group: Group,
    tag: int,
    group_dst: int | None,
) -> tuple[int, torch.Tensor]:
    check_tensor(call, "tensor", tensor, backend, group)
    position = group_rank_of(call, "dst", backend, group, dst, group_dst)
    _check_peer(call, "dst", backend, group, position)
    capabilities = backend.capabilities(group, tensor.device.type)
    _check_tag(call, backend, group, tag, capabilities.tags)
    return position, _as_sent(_to_send(tensor, capabilities), capabilities)


def _prepare_recv(
    call: str,
    backend: Backend,
    tensor: torch.Tensor,
    src: int | None,
    group: Group,
    tag: int,
    group_src: int | None,
) -> tuple[int | None, torch.Tensor, StagingBuffer]:
    check_tensor(call, "tensor", tensor, backend, group, written=True)
    capabilities = backend.capabilities(group, tensor.device.type)
    _check_tag(call, backend, group, tag, capabilities.tags)
    position = None
    if src is None and group_src is None:
        if not capabilities.any_source:
            raise ArgumentError(
                f"{call}: src: missing; backend {backend.get_backend(group)!r} cannot receive from any source; name "
                "the sender"
            )
    else:
        position = group_rank_of(call, "src", backend, group, src, group_src)
        _check_peer(call, "src", backend, group, position)
    buffer = StagingBuffer(tensor, shaped=True, on_host=capabilities.messages_from_host)
    return position, _as_sent(buffer.memory, capabilities), buffer


def _to_send(tensor: torch.Tensor, capabilities: Capabilities) -> torch.Tensor:
    """Return the elements in logical order, where the library sends from."""
    return contiguous(tensor.detach().cpu() if capabilities.messages_from_host else tensor)


def _as_sent(tensor: torch.Tensor, capabilities: Capabilities) -> torch.Tensor:
    """Return a contiguous tensor in the form in which the library moves it."""
    return tensor if capabilities.messages_of_any_dtype else as_bytes(tensor, capabilities.dtypes)


def _check_apart(call: str, messages: Sequence[Any]) -> None:
    """Check that no message arrives where another one arrives or is sent from: they are under way together."""
    spans = sorted(
        (start := entry.tensor.data_ptr(), start + entry.tensor.nbytes, place, entry.op is not c10d.isend)
        for place, entry in enumerate(messages)
        if entry.tensor.numel() and (entry.op is not c10d.isend or entry.tensor.is_contiguous())  # others are copied
    )
    for index, (_, end, one, written) in enumerate(spans):
        for start, _, other, also_written in spans[index + 1 :]:
            if start >= end:
                break
            if written or also_written:
                first, second = sorted((one, other))
                raise ArgumentError(
                    f"{call}: p2p_op_list[{second}].tensor: got memory that p2p_op_list[{first}] uses as well; "
                    "expected separate memory for each message that is received"
                )


def _check_peer(call: str, name: str, backend: Backend, group: Group, position: int) -> None:
    if position == backend.get_rank(group):
        raise ArgumentError(f"{call}: {name}: got this rank itself ({position}); expected another member of the group")


def _check_tag(call: str, backend: Backend, group: Group, tag: int, served: bool) -> None:
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise ArgumentTypeError(f"{call}: tag: got {describe(tag)}; expected an integer of 0 or more")
    if tag < 0:
        raise ArgumentError(f"{call}: tag: got {shown(tag)}; expected an integer of 0 or more")
    if tag > _LAST_TAG:
        raise ArgumentError(f"{call}: tag: got {shown(tag)}; expected an integer of 0 to {_LAST_TAG}")
    if tag and not served:
        raise ArgumentError(f"{call}: tag: got {tag}; backend {backend.get_backend(group)!r} has no tags, expected 0")


class P2POp:
    """One message of a :func:`batch_isend_irecv`.

    Args:
        op: ``isend`` or ``irecv``, ours or ``torch.distributed``'s.
        tensor: sent or overwritten.
        peer, group_peer: the other rank, global or within ``group``.
    """

    @with_keyword_errors
    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        kind = getattr(op, "__name__", None)
        if kind not in ("isend", "irecv"):
            raise ArgumentTypeError(f"P2POp: op: got {shown(op)}; expected isend or irecv")
        self.op = c10d.isend if kind == "isend" else c10d.irecv
        self.tensor = tensor
        self._group = group
        self.tag = tag
        self._given = peer, group_peer

    def __repr__(self) -> str:
        peer, group_peer = self._given
        place = f"peer={peer}" if group_peer is None else f"group_peer={group_peer}"
        group = getattr(self.group, "group_name", self.group)
        tensor = f"{tuple(self.tensor.shape)} {self.tensor.dtype}" if isinstance(self.tensor, torch.Tensor) else "?"
        return f"P2POp({self.op.__name__}, {tensor}, {place}, group={group}, tag={self.tag})"

    @property
    def group(self) -> Group:
        """Return the group, which is the world where none was given; None before the start."""
        return c10d.GroupMember.WORLD if self._group is None else self._group

    @group.setter
    def group(self, group: Group) -> None:
        self._group = group

    @property
    def peer(self) -> int | None:
        """Return the other rank, global; None where it was given in neither way, or is not in the group."""
        peer, group_peer = self._given
        if peer is None and group_peer is not None:
            with suppress(CommError):
                return get_global_rank(self.group, group_peer)
        return peer

    @peer.setter
    def peer(self, peer: int | None) -> None:
        self._given = peer, None

    @property
    def group_peer(self) -> int | None:
        """Return the other rank within the group; None where it was given in neither way, or is not in the group."""
        peer, group_peer = self._given
        if group_peer is None and peer is not None:
            with suppress(CommError):
                return get_group_rank(self.group, peer)
        return group_peer

    @group_peer.setter
    def group_peer(self, group_peer: int | None) -> None:
        self._given = None, group_peer

    @property
    def given(self) -> tuple[int | None, int | None]:
        """Return the other rank as it was given: global, and within the group."""
        return self._given


@collective(labels=False)
def batch_isend_irecv(p2p_op_list: list[Any], *, timeout: Timeout = None) -> list[Work]:
    """Start many messages together, so that no order among them can deadlock; return a handle for each.

    Where the library has one for all, as NCCL may, that one is returned.

    Args:
        p2p_op_list: :class:`P2POp` (or ``torch.distributed.P2POp``) of one group, not empty.
    """
    call = "batch_isend_irecv"
    if not isinstance(p2p_op_list, (list, tuple)) or not p2p_op_list:
        raise ArgumentTypeError(f"{call}: p2p_op_list: got {shown(p2p_op_list)}; expected a list of at least one P2POp")
    wrong = [entry for entry in p2p_op_list if not isinstance(entry, (P2POp, c10d.P2POp))]
    if wrong:
        raise ArgumentTypeError(f"{call}: p2p_op_list: got {shown(wrong[0])}; expected a list of P2POp")
    group = p2p_op_list[0].group
    backend = enter(call, group, timeout)
    if backend is None:
        return []
    world, wire = backend.get_world_group(), []
    buffers: list[StagingBuffer | None] = []
    for place, entry in enumerate(p2p_op_list):
        name, written = f"p2p_op_list[{place}]", entry.op is not c10d.isend
        if (entry.group or world) is not (group or world):
            raise ArgumentError(f"{call}: {name}.group: got another one than p2p_op_list[0] has; expected the same")
        check_tensor(call, f"{name}.tensor", entry.tensor, backend, group, written=written)
        peer, group_peer = entry.given if isinstance(entry, P2POp) else (entry.peer, None)
        position = group_rank_of(call, "peer", backend, group, peer, group_peer)
        _check_peer(call, f"{name}.peer", backend, group, position)
        capabilities = backend.capabilities(group, entry.tensor.device.type)
        _check_tag(call, backend, group, entry.tag, capabilities.tags)
        buffer = None
        if written:
            buffer = StagingBuffer(entry.tensor, shaped=True, on_host=capabilities.messages_from_host)
        buffers.append(buffer)
        memory = _to_send(entry.tensor, capabilities) if buffer is None else buffer.memory
        global_peer = backend.get_process_group_ranks(group)[position]
        wire.append(c10d.P2POp(entry.op, _as_sent(memory, capabilities), global_peer, group, entry.tag))
    _check_apart(call, p2p_op_list)
    works = backend.batch_isend_irecv(wire)
    results = [entry.tensor for entry in p2p_op_list]
    if len(works) == len(results):
        return [
            After([work], None, result) if buffer is None else Received([work], copy_back([buffer]), result)
            for work, buffer, result in zip(works, buffers, results, strict=True)
        ]
    return [After(works, copy_back([one for one in buffers if one is not None]), results)]
