"""The contract between the collectives and whatever moves the bytes.

Vocabulary. *Group*: a ``torch.distributed`` process group; ``None`` is the world group. *Global rank*: a rank of the
world group (``src``, ``dst``). *Group rank*: a position in one group (``group_src``, ``group_dst``). *W*: the size of
the group. Names and order of parameters are those of ``torch.distributed``.

A backend serves what its :class:`Capabilities` say, for arguments that are already checked, and nothing more: tensors
are dense in memory, sizes fit, ranks are members. Other operations are built once, for every backend, by
``comm_collectives.reduction``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from comm_utils.fast_path import FastPath, FastPathCache

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

    from comm_utils.reduce_op import ReduceOp

__all__ = [
    "ENTRY_POINT_GROUP",
    "Availability",
    "Backend",
    "BackendProvider",
    "Capabilities",
    "Setup",
    "Work",
    "without_spaces",
]

ENTRY_POINT_GROUP = "comm_utils.backends"


def without_spaces(backend: str) -> str:
    """Return the name of a backend without spaces around its parts, as torch takes it: ``"cpu:gloo,cuda:nccl"``."""
    return re.sub(" *([:,]) *", r"\1", backend.strip(" "))


@runtime_checkable
class Work(Protocol):
    """A communication that was started and may still be under way."""

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Return True once the result may be used: complete on the CPU, ordered on the current stream on a device.

        Args:
            timeout: seconds or a timedelta; None waits as long as the group's own timeout allows.

        Raises:
            CommTimeoutError: the time ran out. After the caller's own ``timeout`` the operation goes on and may be
                waited for again; after the group's timeout the group is broken.
            PeerLostError: a peer went away.
        """

    def is_completed(self) -> bool:
        """Return whether ``wait()`` would return at once."""

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None; does not wait."""

    def result(self) -> Any:
        """Wait, then return what the call without ``async_op`` leaves in its output: a tensor or a list of them."""

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of a list of the result's tensors, as torch's handles give it.

        It is completed when the operation is, also where nobody waits, and fails as ``wait()`` does. On a device, it
        is completed once the result is ordered on a stream; callbacks and who waits for it are ordered after that.
        """

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error; does not wait."""

    def synchronize(self) -> None:
        """Wait, as ``wait()`` does."""

    def source_rank(self) -> int:
        """Return the group rank of the sender of a message that was received.

        Raises:
            RuntimeError: the operation is no receive.
        """


@dataclass(frozen=True)
class Capabilities:
    """The native operations of a backend on one kind of device for one group.

    Attributes:
        reductions: pairs of operation and dtype that it reduces itself, correctly.
        dtypes: those it moves as they are; all others travel as bytes.
        messages_of_any_dtype: ``send`` and ``recv`` move every dtype as it is.
        messages_from_host: ``send`` and ``recv`` take memory of the host alone.
        independent_messages: any number of ``isend`` and ``irecv`` of a pair may be under way, begun in any order.
        operations: names of rows in :mod:`comm_utils.operations` that it serves; the others are composed of these.
        any_source: ``recv(src=None)`` works.
        tags: point-to-point tags other than 0 work.
        preserving_reduce: ``reduce`` leaves the tensors of the other ranks as they were.
        fixed_order: its reductions of floats give the bits of ``comm_utils.torch_support.folding.fold``.
        compares_calls: calls that differ between ranks fail before any data moves.
    """

    reductions: frozenset[tuple[ReduceOp, torch.dtype]]
    dtypes: frozenset[torch.dtype]
    operations: frozenset[str]
    messages_of_any_dtype: bool = False
    messages_from_host: bool = False
    independent_messages: bool = False
    any_source: bool = False
    tags: bool = False
    preserving_reduce: bool = False
    fixed_order: bool = False
    compares_calls: bool = False


@dataclass(frozen=True)
class Availability:
    """The availability of a backend, its reason, and the remedy if it is unavailable.

    Attributes:
        details: versions and places of the libraries that it uses, by name.
        within_host: why only ranks of one host can use it; empty where hosts do not matter.
    """

    usable: bool
    reason: str
    remedy: str = ""
    details: Mapping[str, str] = field(default_factory=dict)
    within_host: str = ""


@dataclass(frozen=True)
class Setup:
    """Everything a provider needs to bring up the world group; the store is already private to this generation."""

    backend: str
    rank: int
    world_size: int
    store: Store
    timeout: timedelta | None = None
    device: torch.device | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """One communication library, seen through ``torch.distributed`` process groups.

    Every collective takes ``async_op``: False returns None when the result may be used, True returns a :class:`Work`.
    All of them raise ``PeerLostError`` or ``CommTimeoutError`` and then mark the group as broken, except a receive
    whose time runs out before its turn: of it nothing has begun.
    """

    #: What :meth:`fast_path` returned for calls that were checked in full once. The collectives fill it; the backend
    #: empties it when a group ends or breaks.
    fast_paths: FastPathCache

    def during(self, call: str, timeout: timedelta | None = None) -> Backend:
        """Return the same backend in the course of one call of the user's: failures name ``call``.

        Args:
            timeout: how long an operation may take, instead of the group's timeout.
        """

    def fast_path(
        self, operation: str, detail: object = None, group: ProcessGroup | None = None, async_op: bool = False
    ) -> FastPath | None:
        """Make the fast path of ``operation``; None where there is none.

        Args:
            operation: a collective of this contract, ``"send"`` or ``"recv"``, or one of ``"all_to_all"``,
                ``"reduce_scatter"`` and ``"all_reduce_coalesced"``, which take lists; the last takes a
                :class:`comm_utils.kernels.PlainBatch`, too.
            detail: the op of a reduction; the root or the peer as a global rank, None for the default of ``gather`` and
                ``scatter``; ``(dst, op)`` of a ``reduce``; None of all others.

        The callable takes the tensor arguments of the call in their order, with the lists of split sizes or None, None
        after those of ``all_to_all_single``. It accepts plain tensors only
        (``comm_utils.torch_support.plain_tensors``), which it checks itself. A synchronous one returns True when the
        operation is complete, or False, having done nothing, where the call has to be checked in full. An asynchronous
        one returns the :class:`Work`, or None. Both refuse, and never fail, once their group has ended or is broken. A
        fast path is called many times and has the group's timeout, whatever :meth:`during` sets; failures name the
        call in whose course it was made.
        """

    # --- who is where

    def is_initialized(self) -> bool:
        """Return whether the world group exists. Never raises."""

    def get_backend(self, group: ProcessGroup | None = None) -> str:
        """Return the library that serves ``group``, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``."""

    def get_rank(self, group: ProcessGroup | None = None) -> int:
        """Return this process's group rank, -1 where it is not a member."""

    def get_world_size(self, group: ProcessGroup | None = None) -> int:
        """Return the number of members, -1 where this process is not one."""

    def get_process_group_ranks(self, group: ProcessGroup | None = None) -> list[int]:
        """Global ranks of the members, in the order of their group ranks."""

    def get_world_group(self) -> ProcessGroup:
        """Return the group of all ranks."""

    def get_store(self, group: ProcessGroup | None = None) -> Store:
        """Return the key-value store that the members share."""

    def get_timeout(self) -> timedelta | None:
        """Return the timeout given at initialisation, which groups made later inherit.

        None leaves it to the library.
        """

    def device_types(self, group: ProcessGroup | None = None) -> tuple[str, ...]:
        """Kinds of device whose tensors ``group`` serves, such as ``("cpu", "cuda")``."""

    def capabilities(self, group: ProcessGroup | None = None, device_type: str = "cpu") -> Capabilities:
        """Return what ``group`` does natively with tensors on ``device_type``."""

    def check_group(self, group: ProcessGroup | None = None) -> None:
        """Raise ``BrokenGroupError`` if ``group`` failed, ``NotInitializedError`` if it no longer exists."""

    def mark_broken(self, group: ProcessGroup | None, reason: str) -> None:
        """Have :meth:`check_group` raise ``BrokenGroupError``: a call of several operations failed in one of them."""

    def empty_shared(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | None = None
    ) -> torch.Tensor:
        """Return a new tensor on the CPU, where the ranks of ``group`` can reach it if the library has such memory."""

    # --- groups

    def create_group(
        self,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        device_id: torch.device | None = None,
    ) -> ProcessGroup:
        """Create the group of ``ranks``; called by its members alone, all with the same ``name``."""

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        """Free one group, or everything."""

    # --- collectives

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        """Reduce ``tensor`` over the group, in place, on every rank."""

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Reduce ``tensor`` into the one of ``dst``; see ``Capabilities.preserving_reduce`` for the others'."""

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        """Overwrite ``tensor`` with the one of ``src``."""

    def all_gather(
        self,
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Overwrite the W tensors of ``tensor_list`` with every rank's ``tensor``, all of one shape."""

    def all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Overwrite ``output_tensor``, (W*n,), with every rank's ``input_tensor``, (n,)."""

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Overwrite ``output``, (n,), with this rank's part of the reduced ``input``, (W*n,)."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send part r of ``input`` to rank r and receive its part for this rank into part r of ``output``."""

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Overwrite the W tensors of ``gather_list`` on ``dst`` with every rank's ``tensor``."""

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        """Overwrite ``tensor`` with this rank's entry of ``scatter_list`` on ``src``."""

    def barrier(
        self,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        device_ids: list[int] | None = None,
    ) -> Work | None:
        """Return when every rank of the group has called it."""

    # --- point to point

    def send(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> None:
        """Send ``tensor`` to ``dst``; return when it may be overwritten."""

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        """Overwrite ``tensor`` with what ``src`` (None: anyone) sent; return the sender's global rank."""

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        """Like ``send``, but return at once."""

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        """Like ``recv``, but return at once; ``result()`` is the tensor."""

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Work]:
        """Start a list of ``torch.distributed.P2POp`` together."""


class BackendProvider(Protocol):
    """A provider of a :class:`Backend`; entry points of the group ``comm_utils.backends`` name one."""

    def availability(self) -> Mapping[str, Availability]:
        """Every library this package can activate, by name, and whether it can be used here. Never raises."""

    def initialize(self, setup: Setup) -> Backend:
        """Bring up ``torch.distributed`` as ``setup`` says.

        Raises:
            BackendUnavailableError: ``setup.backend`` cannot be had; names what is missing.
            CommTimeoutError: not every rank arrived in time.
        """

    def adopts(self, backend: str) -> bool:
        """Return whether it serves a ``torch.distributed`` that someone else initialised with ``backend``."""

    def adopt(self) -> Backend:
        """Serve the ``torch.distributed`` that someone else initialised, as it is."""
