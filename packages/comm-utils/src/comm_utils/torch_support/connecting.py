"""The members of a group that spans hosts tell each other how connecting them went.

A library that connects the members of a group does not say which two hosts do not reach each other, and not every rank
gets an error: gloo waits five times its timeout (``Pair::waitUntilConnected`` of its ``transport/tcp/pair.h``) on one
rank while another rank has failed at once and a third has finished.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from comm_utils.errors import BackendUnavailableError, CommError, CommTimeoutError, PeerLostError
from comm_utils.host_identity import host_identity, host_name
from comm_utils.reachability import unreachable
from comm_utils.threads import CONNECTING
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.failures import classify, is_exhausted, is_interruption, summarize
from comm_utils.torch_support.store_waits import answers, store_has_gone

__all__ = ["Connecting", "Place", "Reports", "in_thread", "spans_hosts"]

T = TypeVar("T")

# How often a rank looks whether another one has failed.
_LOOK_S = 0.05
# A host that answers does so much sooner.
_PROBE_S = 2.0
# How much longer a rank waits for those that are still looking for the cause, or have not read it.
_GRACE_S = _PROBE_S + 1
# What a rank gives as a reason, in a store in which others may write as well.
_MOST_BYTES = 2000
_KINDS = {one.__name__: one for one in (PeerLostError, CommTimeoutError, BackendUnavailableError)}
# Ranks that are named one by one.
_MOST_NAMED = 8


@dataclass(frozen=True)
class Place:
    """The place where a member runs, as it says itself.

    Attributes:
        machine: the same for processes that share a network, and for no others; "" where that is not known.
        host: its name, for messages.
        address: where it listens while it is connected, as ``Listener.address`` of ``comm_utils.reachability``.
    """

    machine: str = ""
    host: str = ""
    address: str = ""

    @classmethod
    def of_this_process(cls, address: str) -> Place:
        """Return the place of this process, which listens at ``address``."""
        try:
            machine = host_identity("net")
        except OSError:
            machine = ""
        return cls(machine, host_name(), address)

    def encoded(self) -> str:
        """Return it as one line."""
        return "\t".join((self.machine, self.host, self.address))

    @classmethod
    def decoded(cls, line: str) -> Place:
        """Return the place in a line of :meth:`encoded`; an unknown one for other lines."""
        parts = line.split("\t")
        return cls(*parts) if len(parts) == 3 else cls()


def spans_hosts(places: Sequence[Place]) -> bool:
    """Return whether the members are known to run on more than one host."""
    machines = {one.machine for one in places}
    return len(machines) > 1 and "" not in machines


def in_thread(
    connect: Callable[[], T],
    discard: Callable[[T], None],
    look: Callable[[], None],
    library: str,
    finish: Callable[[], None] = lambda: None,
    needs_thread: bool = True,
) -> T:
    """Return what ``connect`` returns, which a thread calls, as its library may wait for ranks that do not come.

    Args:
        discard: gets what is of no use any more.
        look: is called while it waits; raises where it waits in vain.
        library: what connects the members.
        finish: is called afterwards; where it raises, the result is of no use.
        needs_thread: False calls ``connect`` here, without looks, where there can be no thread.
    """
    made: list[T] = []
    failed: list[BaseException] = []
    lock, given_up = threading.Lock(), [False]
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def create() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            result = connect()
            with lock:
                if not given_up[0]:
                    made.append(result)
                    return
            discard(result)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=create, name=CONNECTING + library, daemon=True)
    try:
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            if needs_thread:
                raise
            create()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive():
                look()
        if failed:
            raise failed[0]
        finish()
    except BaseException:
        with lock:
            given_up[0] = True
            unused, made[:] = list(made), []
        for one in unused:
            discard(one)
        raise
    return made[0]


class Reports:
    """The first failure of a member, which the others read while they connect.

    Args:
        store: the members', with a connection in which the library does not wait.
        key: of this attempt; no other has it.
        who: the call and the rank, for messages.
        rank: this one's global rank.
    """

    def __init__(self, store: BoundedStore, key: str, who: str, rank: int) -> None:
        self._store, self._key, self._who, self._rank = store, f"{key}/failed", who, rank
        self._left = f"{key}/left/{rank}"

    def look(self) -> None:
        """Raise what another member has reported, if one has.

        Raises:
            CommError: the other's failure.
        """
        try:
            self.raise_of_others()
        except _ReportedError as error:
            raise error.kind(str(error)) from None

    def raise_of_others(self) -> None:
        """Raise the report of another member as one that needs no further search for the cause."""
        if not self._store.check([self._key]):
            return
        rank, _, rest = self._store.get(self._key)[:_MOST_BYTES].decode(errors="replace").partition("\n")
        name, _, text = rest.partition("\n")
        if rank != str(self._rank):
            raise _ReportedError(_KINDS.get(name, PeerLostError), f"{self._who}: {text} [reported by rank {rank}]")

    def tell(self, kind: type[CommError], said: str) -> None:
        """Report to the others, unless a member has."""
        with suppress(RuntimeError):  # the store may have gone as well
            if not self._store.check([self._key]):
                self._store.set(self._key, f"{self._rank}\n{kind.__name__}\n{said}"[:_MOST_BYTES])

    def tell_of(self, error: BaseException) -> None:
        """Report that this rank gave up with ``error``, of which the others know nothing."""
        self.tell(
            BackendUnavailableError if is_exhausted(error) else PeerLostError,
            f"rank {self._rank} gave up: {type(error).__name__}: {summarize(error)}",
        )
        self.leave()

    def leave(self) -> None:
        """Let the rank that may hold the store know that this one needs it no longer."""
        with suppress(RuntimeError):
            self._store.set(self._left, "")


class Connecting:
    """One attempt to connect the members of a group that spans hosts; every member makes one.

    Args:
        store: the members', whose connections are open.
        key: of this attempt; no other has it.
        who: the call and the rank, for messages.
        rank: this one's global rank.
        places: of every member, by global rank.
        library: what connects them, for messages.
        limit_s: how long the members have for it, from now on.
    """

    def __init__(
        self,
        store: BoundedStore,
        key: str,
        who: str,
        rank: int,
        places: Mapping[int, Place],
        library: str,
        limit_s: float,
    ) -> None:
        self._store, self._key, self._who, self._rank, self._places = store, key, who, rank, places
        self._reports = Reports(store, key, who, rank)
        self._library, self._limit_s = library, limit_s
        self._end = time.monotonic() + limit_s

    def run(self, connect: Callable[[], T], discard: Callable[[T], None], look: Callable[[], None]) -> T:
        """Return what ``connect`` returns on this rank, once it has returned on every member.

        Args:
            connect, discard, look: see :func:`in_thread`.

        Raises:
            PeerLostError, CommTimeoutError: not all could be connected; on every member, with the cause.
        """

        def check_and_look() -> None:
            self.check()
            look()

        try:
            return in_thread(connect, discard, check_and_look, self._library, lambda: self._await_others(look))
        except BaseException as error:
            failure = self.failure(error)
            self._wait_for_readers()
            if failure is error:
                raise
            raise failure from error

    def check(self) -> None:
        """Raise where connecting them is pointless by now: another member has failed, or the time is over.

        Raises:
            CommError: the other's failure; CommTimeoutError at the end of the time.
        """
        self._reports.raise_of_others()
        if time.monotonic() >= self._end:
            raise _NotFinishedError(f"{self._library} did not finish within {self._limit_s:.3g} s")

    def _await_others(self, look: Callable[[], None]) -> None:
        """Wait until every member is connected."""
        self._store.set(f"{self._key}/{self._rank}", "")
        keys = {rank: f"{self._key}/{rank}" for rank in self._places}
        pause_s = 0.0005
        while not self._store.check(list(keys.values())):
            self._reports.raise_of_others()
            look()
            if time.monotonic() >= self._end + _GRACE_S:
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                host = self._places[self._rank].host
                raise CommTimeoutError(
                    f"{self._who}: {self._named(missing)} did not say within {self._limit_s:.3g} s that "
                    f"{self._library} had connected them; rank {self._rank} on {host} was connected"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)

    def failure(self, error: BaseException) -> BaseException:
        """Tell the others why this rank is not connected with them; return the error to raise here."""
        if isinstance(error, _ReportedError):
            return error.kind(str(error))
        is_other = not isinstance(error, (CommError, RuntimeError, OSError)) or is_interruption(error)
        if is_other or is_exhausted(error):
            self._reports.tell_of(error)
            return error
        if not isinstance(error, CommError) and not answers(self._store):
            return store_has_gone(self._who, error)
        of_library = isinstance(error, (_NotFinishedError, BackendUnavailableError)) or not isinstance(error, CommError)
        lost = self._unreachable() if of_library else ""
        if not lost and isinstance(error, _NotFinishedError) and (reported := self._report_of_others()) is not None:
            return reported
        if isinstance(error, CommError) and not lost and not isinstance(error, _NotFinishedError):
            self._reports.tell(type(error), str(error))
            return error
        own, text = f"rank {self._rank} on {self._places[self._rank].host}", summarize(error)
        said = (
            f"{self._library} cannot connect {own} with all members: it does not reach {lost}; check routes and "
            f"firewalls between these hosts, which need all TCP ports open, and {self._interface()} [{text}]"
            if lost
            else f"{self._library} could not connect {own} with all members ({text}); check routes and firewalls "
            f"between {self._hosts()}, which need all TCP ports open in both directions, and {self._interface()}"
        )
        timed_out = isinstance(error, CommTimeoutError) or classify(error) is CommTimeoutError
        kind = CommTimeoutError if timed_out else PeerLostError
        self._reports.tell(kind, said)
        return kind(f"{self._who}: {said}")

    def _report_of_others(self) -> CommError | None:
        """Return the failure of a member that has found the cause; None where none has, a moment later."""
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            try:
                self._reports.raise_of_others()
            except _ReportedError as error:
                return error.kind(str(error))
            time.sleep(_LOOK_S)
        return None

    def _unreachable(self) -> str:
        """Return the members that this host cannot reach, and why; "" where it reaches all."""
        others = {rank: place.address for rank, place in self._places.items() if rank != self._rank}
        lost = unreachable(others, _PROBE_S)
        named = [
            f"{self._named([rank])} ({self._places[rank].address.rpartition(':')[0]}: {reason})"
            for rank, reason in list(lost.items())[:_MOST_NAMED]
        ]
        return "; ".join(named) + (f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else "")

    def _wait_for_readers(self) -> None:
        """Wait until all members have read the failure where this process may hold the store."""
        self._reports.leave()
        with suppress(RuntimeError):
            if self._rank == 0:
                end = time.monotonic() + _GRACE_S
                left = [f"{self._key}/left/{rank}" for rank in self._places]
                while not self._store.check(left) and time.monotonic() < end:
                    time.sleep(_LOOK_S)

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} on {self._places[rank].host}" for rank in ranks)

    def _hosts(self) -> str:
        hosts = list(dict.fromkeys(place.host for place in self._places.values()))
        return ", ".join(hosts[:_MOST_NAMED]) + (f" and {len(hosts) - _MOST_NAMED} more" * (len(hosts) > _MOST_NAMED))

    def _interface(self) -> str:
        name = "FI_TCP_IFACE" if self._library == "oneCCL" else "GLOO_SOCKET_IFNAME"
        value = os.environ.get(name)
        return f"the interface that {name} names (here {value})" if value else f"the interface, which {name} sets"


class _NotFinishedError(CommTimeoutError):
    """The library is still connecting this rank."""


class _ReportedError(Exception):
    """Another member has failed."""

    def __init__(self, kind: type[CommError], text: str) -> None:
        super().__init__(text)
        self.kind = kind
