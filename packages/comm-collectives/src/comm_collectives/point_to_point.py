"""Messages between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from comm_collectives import fast_path, untraced
from comm_collectives.arguments import check_tensor, describe, enter, group_rank_of
from comm_collectives.memory import Landing, after_landing, as_bytes, readable
from comm_collectives.work import After, Received, run
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError, ArgumentTypeError

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]

# c10d passes tags as C ints.
_LAST_TAG = (1 << 31) - 1


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    async_op: bool = False,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """Send ``tensor`` to ``dst``; return when it may be overwritten.

    Args:
        tensor: any shape and dtype; only read.
        dst: a member other than this rank.
        tag: matches a ``recv`` with the same one; other than 0 only where the backend knows tags (not NCCL, oneCCL).
    """
    if is_dynamo_compiling():
        return untraced.send(tensor, dst, group, tag, group_dst, async_op, timeout=timeout)
    if async_op:
        return isend(tensor, dst, group, tag, group_dst, timeout=timeout)
    usual = timeout is None and type(dst) is int and type(tag) is int and tag == 0 and group_dst is None
    short = fast_path.on("send", dst, tensor, group) if usual else None
    if short is not None:
        with suppress(NotImplementedError):  # as in all_reduce
            short(tensor)
            return None
    backend = enter("send", group, timeout)
    if backend is not None:
        position, sent = _prepare_send("send", backend, tensor, dst, group, tag, group_dst)
        if usual:
            fast_path.remember_moving(
                backend, "send", dst, tensor, group, lambda: backend.prepare("send", group, None, position)
            )
        backend.send(sent, None, group, tag, position)
    return None


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    async_op: bool = False,
    *,
    timeout: float | timedelta | None = None,
) -> Any:
    """Receive into ``tensor``; return the sender's global rank, or the handle for ``async_op``.

    Args:
        tensor: the size and dtype of what is sent; dense; overwritten.
        src: a member other than this rank; None for any source, if the backend supports it (not NCCL, oneCCL).
    """
    if is_dynamo_compiling():
        return untraced.recv(tensor, src, group, tag, group_src, async_op, timeout=timeout)
    if async_op:
        return irecv(tensor, src, group, tag, group_src, timeout=timeout)
    usual = timeout is None and type(src) is int and type(tag) is int and tag == 0 and group_src is None
    short = fast_path.on("recv", src, tensor, group) if usual else None
    if short is not None:
        with suppress(NotImplementedError):
            short(tensor)
            return src
    backend = enter("recv", group, timeout)
    if backend is None:
        return -1
    position, received, landing = _prepare_recv("recv", backend, tensor, src, group, tag, group_src)
    if usual:
        fast_path.remember_moving(
            backend, "recv", src, tensor, group, lambda: backend.prepare("recv", group, None, position)
        )
    source = backend.recv(received, None, group, tag, position)
    finish = after_landing([landing])
    if finish is not None:
        run(finish)
    return source if position is None else backend.get_process_group_ranks(group)[position]


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """:func:`send` that returns at once; ``tensor`` must stay as it is until ``wait()`` returns."""
    if is_dynamo_compiling():
        return untraced.isend(tensor, dst, group, tag, group_dst, timeout=timeout)
    backend = enter("isend", group, timeout)
    if backend is None:
        return None
    position, sent = _prepare_send("isend", backend, tensor, dst, group, tag, group_dst)
    return After([backend.isend(sent, None, group, tag, position)], None, tensor)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """:func:`recv` that returns at once; ``result()`` is ``tensor``."""
    if is_dynamo_compiling():
        return untraced.irecv(tensor, src, group, tag, group_src, timeout=timeout)
    backend = enter("irecv", group, timeout)
    if backend is None:
        return None
    position, received, landing = _prepare_recv("irecv", backend, tensor, src, group, tag, group_src)
    work = backend.irecv(received, None, group, tag, position)
    return Received([work], after_landing([landing]), tensor)


def _prepare_send(
    call: str,
    backend: Backend,
    tensor: torch.Tensor,
    dst: int | None,
    group: ProcessGroup | None,
    tag: int,
    group_dst: int | None,
) -> tuple[int, torch.Tensor]:
    check_tensor(call, "tensor", tensor, backend, group)
    position = group_rank_of(call, "dst", backend, group, dst, group_dst)
    _check_peer(call, "dst", backend, group, position)
    capabilities = backend.capabilities(group, tensor.device.type)
    _check_tag(call, backend, group, tag, capabilities.tags)
    return position, as_bytes(readable(tensor), capabilities.dtypes)


def _prepare_recv(
    call: str,
    backend: Backend,
    tensor: torch.Tensor,
    src: int | None,
    group: ProcessGroup | None,
    tag: int,
    group_src: int | None,
) -> tuple[int | None, torch.Tensor, Landing]:
    check_tensor(call, "tensor", tensor, backend, group, written=True)
    capabilities = backend.capabilities(group, tensor.device.type)
    _check_tag(call, backend, group, tag, capabilities.tags)
    position = None
    if src is None and group_src is None:
        if not capabilities.any_source:
            raise ArgumentError(
                f"{call}: src: missing; backend {backend.get_backend(group)!r} cannot receive from any source; "
                "name the sender"
            )
    else:
        position = group_rank_of(call, "src", backend, group, src, group_src)
        _check_peer(call, "src", backend, group, position)
    landing = Landing(tensor)
    return position, as_bytes(landing.memory, capabilities.dtypes), landing


def _check_peer(call: str, name: str, backend: Backend, group: ProcessGroup | None, position: int) -> None:
    if position == backend.get_rank(group):
        raise ArgumentError(f"{call}: {name}: got this rank itself ({position}); expected another member of the group")


def _check_tag(call: str, backend: Backend, group: ProcessGroup | None, tag: int, served: bool) -> None:
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise ArgumentTypeError(f"{call}: tag: got {describe(tag)}; expected an integer of 0 or more")
    if tag < 0:
        raise ArgumentError(f"{call}: tag: got {tag}; expected an integer of 0 or more")
    if tag > _LAST_TAG:
        raise ArgumentError(f"{call}: tag: got {tag}; expected an integer of 0 to {_LAST_TAG}")
    if tag and not served:
        raise ArgumentError(f"{call}: tag: got {tag}; backend {backend.get_backend(group)!r} has no tags, expected 0")


class P2POp:
    """One message of a :func:`batch_isend_irecv`.

    Args:
        op: ``isend`` or ``irecv``, ours or ``torch.distributed``'s.
        tensor: sent or overwritten.
        peer, group_peer: the other rank, global or within ``group``.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        kind = getattr(op, "__name__", None)
        if kind not in ("isend", "irecv"):
            raise ArgumentTypeError(f"P2POp: op: got {op!r}; expected isend or irecv")
        self.op = c10d.isend if kind == "isend" else c10d.irecv
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer


def batch_isend_irecv(p2p_op_list: list[Any], *, timeout: float | timedelta | None = None) -> list[Work]:
    """Start many messages together, so that no order among them can deadlock; return a handle for each or for all.

    Args:
        p2p_op_list: :class:`P2POp` (or ``torch.distributed.P2POp``) of one group, not empty.
    """
    if is_dynamo_compiling():
        return untraced.batch_isend_irecv(p2p_op_list, timeout=timeout)
    call = "batch_isend_irecv"
    if not isinstance(p2p_op_list, (list, tuple)) or not p2p_op_list:
        raise ArgumentTypeError(f"{call}: p2p_op_list: got {p2p_op_list!r:.60}; expected a list of at least one P2POp")
    wrong = [entry for entry in p2p_op_list if not isinstance(entry, (P2POp, c10d.P2POp))]
    if wrong:
        raise ArgumentTypeError(f"{call}: p2p_op_list: got {wrong[0]!r:.60}; expected a list of P2POp")
    group = p2p_op_list[0].group
    backend = enter(call, group, timeout)
    if backend is None:
        return []
    world, wire, landings = backend.get_world_group(), [], []
    for place, entry in enumerate(p2p_op_list):
        name, written = f"p2p_op_list[{place}]", entry.op is not c10d.isend
        if (entry.group or world) is not (group or world):
            raise ArgumentError(f"{call}: {name}.group: got another one than p2p_op_list[0] has; expected the same")
        check_tensor(call, f"{name}.tensor", entry.tensor, backend, group, written=written)
        # torch's own class fills in both.
        group_peer = entry.group_peer if isinstance(entry, P2POp) else None
        position = group_rank_of(call, "peer", backend, group, entry.peer, group_peer)
        _check_peer(call, f"{name}.peer", backend, group, position)
        capabilities = backend.capabilities(group, entry.tensor.device.type)
        _check_tag(call, backend, group, entry.tag, capabilities.tags)
        if written:
            landings.append(landing := Landing(entry.tensor))
            memory = landing.memory
        else:
            memory = readable(entry.tensor)
        global_peer = backend.get_process_group_ranks(group)[position]
        wire.append(c10d.P2POp(entry.op, as_bytes(memory, capabilities.dtypes), global_peer, group, entry.tag))
    works = backend.batch_isend_irecv(wire)
    results = [entry.tensor for entry in p2p_op_list]
    finish = after_landing(landings)
    if len(works) == len(results) and finish is None:
        return [After([work], None, result) for work, result in zip(works, results, strict=True)]
    return [After(works, finish, results)]
