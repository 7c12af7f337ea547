"""Create the communicator of a group: exchange the ranks' processes through its store and choose the engine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store

from comm_backend_ccl import host_profile, member_records, oneccl_library, placement, shared_memory, tuning, variables
from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.member_records import Member
from comm_backend_ccl.oneccl_communicator import OneCclCommunicator
from comm_backend_ccl.peers import Peers, this_process
from comm_backend_ccl.shared_communicator import SharedCommunicator
from comm_utils import topology
from comm_utils.errors import (
    BackendUnavailableError,
    CommError,
    CommTimeoutError,
    ConfigurationError,
    PeerLostError,
)
from comm_utils.group_names import listed
from comm_utils.log import logger
from comm_utils.rank_processes import PROCESSES, named_ranks
from comm_utils.reachability import Listener
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.connecting import Connecting, Place, Reports
from comm_utils.torch_support.failures import is_interruption
from comm_utils.torch_support.group_agreement import LEFT, let_others_read, report_ended
from comm_utils.torch_support.store_waits import await_keys, delete_read_keys, look_at_waits

__all__ = ["make_communicator"]

_NO_TIMEOUT_S = 10.0**6
_LAST_MOMENT_S = 5.0
# The key under which the ranks report why they could not be connected.
_CONNECTED = "connected"
# Reasons why groups do without shared memory: those of a process often have the same.
_warned_of: set[str] = set()


def make_communicator(
    store: Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] | None = None
) -> Communicator:
    """Create a group's communicator; every rank calls this with the same store, and it returns when all have.

    Ranks of one host share memory; ranks of several hosts, and those that cannot, use oneCCL.

    Args:
        ranks: global ranks of the members; None is the world.

    Raises:
        CommTimeoutError: not every rank came in time.
        PeerLostError: another rank has ended, or gave up.
        BackendUnavailableError: there is not enough shared memory, or oneCCL is needed and cannot be used.
    """
    return _Factory(store, rank, size, timeout, ranks).communicator()


class _Start(NamedTuple):
    """The beginning of a group in shared memory, as its first rank finds it.

    Attributes:
        profile: rows of the host's profile.
        measures: the group measures the host first.
        measured_by: what measured the profile; empty where there is none.
    """

    profile: list[host_profile.Row]
    measures: bool
    measured_by: str

    @classmethod
    def of_this_host(cls, ranks: int, oversubscribed: bool, held: ExitStack) -> _Start:
        """Return the beginning of a group of so many ranks.

        Args:
            oversubscribed: ranks share hardware threads, so that a measurement would time their waits for these.
            held: keeps other groups from measuring at the same time, until it is closed.
        """
        if variables.fixed_transfer():
            return cls([], False, "")
        try:
            measures = (
                variables.learns()
                and not oversubscribed
                and host_profile.is_wanted(ranks)
                and held.enter_context(host_profile.sole_measurement())
                and host_profile.is_wanted(ranks)  # another group may have measured it just now
            )
            rows, measured_by = host_profile.load(ranks)
            return cls(rows, measures, measured_by)
        except Exception as error:  # the other ranks wait for what this returns
            logger.warning("the host's profile is not used: %s", error)
            return cls([], False, "")


class _Factory:
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] | None) -> None:
        self._rank, self._size, self._timeout, self._ranks = rank, size, timeout, ranks
        self._limit_s = timeout.total_seconds() or _NO_TIMEOUT_S
        self._store = BoundedStore(store, f"rank {self._name(rank)}: the making of {self._group()}", self._limit_s)
        self._end = time.monotonic() + self._limit_s
        self._reports = Reports(self._store, _CONNECTED, self._on_rank(), self._name(rank))

    def communicator(self) -> Communicator:
        try:
            return self._connected()
        except BaseException as error:
            # The others have the errors of this module as well, but know nothing of Ctrl-C.
            if is_interruption(error) or not isinstance(error, CommError):
                self._reports.tell_of(error)
            raise

    def _connected(self) -> Communicator:
        interface = os.environ.get("FI_TCP_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
        listener = Listener(interface.split(",")[0].strip())
        with ExitStack() as held:
            held.callback(listener.close)
            return self._communicator(listener.address, held)

    def _communicator(self, address: str, held: ExitStack) -> Communicator:
        reason = shared_memory.unavailable_reason()
        mine = {
            "process": asdict(this_process()),
            "unavailable": reason and reason[0],
            "failure": oneccl_library.earlier_failure(),
            "settings": variables.settings(),
            "build": shared_memory.build(),
            "place": placement.mine().encoded(),
            "address": address,
        }
        texts = self._exchange("process", json.dumps(mine))
        self._check_all_came(texts)
        members = [member_records.member(text, self._who(rank)) for rank, text in enumerate(texts)]
        places = [one.place for one in members]
        peers = Peers([one.process for one in members], self._rank)
        try:
            if len(peers.local) == self._size:
                why = next((one.unavailable for one in members if one.unavailable), None)
                if why is None and self._size > shared_memory.MOST_RANKS:
                    why = f"shared memory serves up to {shared_memory.MOST_RANKS} ranks, the group has {self._size}"
                if why is None:
                    self._check_builds(members, peers)
                    self._check_settings(members, peers)
                    made = self._in_shared_memory(peers, places, held)
                    if isinstance(made, Communicator):
                        return made
                    why = made
                self._need_oneccl(why, members)
            else:
                without_proc = shared_memory.NEEDS_PROC in [one.unavailable for one in members]
                self._need_oneccl(shared_memory.NEEDS_PROC if without_proc else "the group spans hosts", members)
                if without_proc:
                    self._warn_of_oneccl(shared_memory.NEEDS_PROC)
            on_oneccl = OneCclCommunicator(
                self._store.unbounded,
                peers,
                self._rank,
                self._timeout,
                self._ranks,
                self._connecting(members),
                places,
            )
            self._delete_read("process")
            return on_oneccl
        except BaseException:
            peers.close()
            raise

    def _check_all_came(self, texts: Sequence[bytes]) -> None:
        left = [text.decode(errors="replace") for text in texts if text.startswith(LEFT.encode())]
        if left:
            come = [rank for rank, text in enumerate(texts) if not text.startswith(LEFT.encode())]
            let_others_read(self._store, "process", self._rank, come)
            raise PeerLostError(
                f"the making of {self._group()} lost a peer, as seen by rank {self._name(self._rank)}: "
                f"{left[0].removeprefix(LEFT)}"
            )

    def _connecting(self, members: Sequence[Member]) -> Connecting:
        found = {
            self._name(rank): Place(one.process.machine, one.process.host, one.address)
            for rank, one in enumerate(members)
        }
        own, left_s = self._name(self._rank), max(0.0, self._end - time.monotonic())
        return Connecting(self._store, _CONNECTED, self._on_rank(), own, found, "oneCCL", left_s)

    def _need_oneccl(self, why: str, members: Sequence[Member]) -> None:
        # All ranks know of it, so none waits for one that cannot take part.
        for rank, one in enumerate(members):
            if one.failure is not None:
                raise BackendUnavailableError(
                    f"{why}, and rank {self._name(rank)}: {one.failure}; {oneccl_library.START_AGAIN}, or use "
                    "dist_backend='gloo'"
                )
        reason = oneccl_library.unavailable_reason()
        if reason is not None:
            raise BackendUnavailableError(f"{why}, and {reason[0]}; {reason[1]}")

    def _check_builds(self, members: Sequence[Member], peers: Peers) -> None:
        """Raise where ranks would understand shared memory differently; all of them do."""
        if len({one.build for one in members}) > 1:
            found = ", ".join(f"rank {self._name(rank)}: {one.build}" for rank, one in enumerate(members))
            self._wait_for_readers(peers)
            raise ConfigurationError(f"comm-backend-ccl differs between the ranks of a group; install one ({found})")

    def _check_settings(self, members: Sequence[Member], peers: Peers) -> None:
        """Raise where ranks have different settings of how data is moved; all of them do."""
        for name in variables.SETTINGS:
            values = [dict(zip(variables.SETTINGS, one.settings, strict=False)).get(name, "") for one in members]
            if len(set(values)) > 1:
                found = ", ".join(f"rank {self._name(rank)}: {value!r}" for rank, value in enumerate(values))
                self._wait_for_readers(peers)
                raise ConfigurationError(f"{name} differs between the ranks of a group; give all the same ({found})")

    def _in_shared_memory(
        self, peers: Peers, places: Sequence[placement.Place], held: ExitStack
    ) -> SharedCommunicator | str:
        """Return the communicator, or why no rank can use shared memory."""
        made: SharedCommunicator | None = None
        created = -1, 0
        problem: tuple[str, str] | None = None
        # Any exception may come at any call, as a handler of signals raises it.
        with ExitStack() as always, ExitStack() as unless_made:
            try:
                try:
                    if self._rank == 0:
                        created = shared_memory.create(self._size)
                        always.callback(shared_memory.close_descriptor, created[0])
                finally:
                    # The others are waiting for it, whatever became of it.
                    if self._rank == 0:
                        oversubscribed = placement.are_oversubscribed(places, topology.cpus_of_launcher())
                        start = _Start.of_this_host(self._size, oversubscribed, held)
                        self._store.set("memory", json.dumps([*created, *start]))
                memory = member_records.memory(self._await(["memory"], [0], peers)[0], self._who(0))
                if memory.descriptor >= 0:
                    place = memory.descriptor, memory.inode
                    made = SharedCommunicator(peers, self._rank, self._timeout, self._ranks, place, places)
                    unless_made.callback(shared_memory.close, made.native)
                    made.start_from(memory.profile)
                    made.profile_by = memory.measured_by
            except CommError:
                raise
            except MemoryError as error:
                problem = "memory", str(error)
            except OSError as error:
                problem = "access", str(error)
            except RuntimeError as error:
                problem = "other", str(error)
            texts = self._exchange("joined", json.dumps(problem), peers)
            problems = [member_records.problem(text, self._who(rank)) for rank, text in enumerate(texts)]
            self._delete_read("process", "joined")
            always.close()
            failures = [(rank, one) for rank, one in enumerate(problems) if one is not None]
            if made is not None and not failures:
                made.warn_of_single_copy()
                if memory.measures:
                    self._measure(made)
                unless_made.pop_all()
                return made
        rank, (kind, text) = failures[0]
        if kind != "access":
            self._wait_for_readers(peers)
            raise BackendUnavailableError(
                f"rank {self._name(rank)}: {text}; {variables.SWITCH}=0 does without shared memory"
            )
        self._warn_of_oneccl(f"rank {self._name(rank)}: {text}")
        return str(text)

    def _warn_of_oneccl(self, why: str) -> None:
        if self._rank == 0 and why not in _warned_of:
            _warned_of.add(why)
            logger.warning("oneCCL is used instead of shared memory: %s", why)

    def _measure(self, made: SharedCommunicator) -> None:
        is_whole = tuning.measure(made, tuning.quick(made.size))
        rows = host_profile.rows_of(made.methods())
        if rows:
            made.profile_by = host_profile.FIRST_GROUP
        if self._rank == 0:
            host_profile.store(self._size, rows, host_profile.FIRST_GROUP, is_whole)

    def _wait_for_readers(self, peers: Peers) -> None:
        """Wait until all ranks have read the failure, as the rank that serves the store may end."""
        self._end = min(self._end, time.monotonic() + _LAST_MOMENT_S)
        with suppress(CommError, RuntimeError):
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                self._await([f"left/{rank}" for rank in range(self._size)], range(self._size), peers)

    # --- through the store

    def _who(self, rank: int) -> str:
        return f"rank {self._name(rank)} of {self._group()}"

    def _on_rank(self) -> str:
        return f"the making of {self._group()}, on rank {self._name(self._rank)}"

    def _name(self, rank: int) -> int:
        return rank if self._ranks is None else self._ranks[rank]

    def _exchange(self, what: str, mine: str, peers: Peers | None = None) -> list[bytes]:
        """Return every rank's value of ``what``, in the order of ranks."""
        self._store.set(f"{what}/{self._rank}", mine)
        return self._await([f"{what}/{rank}" for rank in range(self._size)], range(self._size), peers)

    def _await(self, keys: list[str], ranks: Sequence[int], peers: Peers | None = None) -> list[bytes]:
        def look() -> None:
            self._reports.look()
            if (
                peers is not None
                and (gone := peers.gone())
                and (lost := sorted(gone & set(self._missing(keys, ranks))))
            ):
                who = ", ".join(
                    f"rank {self._name(one)} ({peers.processes[one]}) ended{peers.describe_end(one)}" for one in lost
                )
                raise PeerLostError(
                    f"the making of {self._group()} lost a peer, as seen by rank {self._name(self._rank)}: {who}; its "
                    "own output says why"
                )
            if peers is None and self._ranks is None:  # the world, of whose ranks the rendezvous knows the processes
                report_ended(self._store, dict(zip(ranks, keys, strict=True)))
            look_at_waits()

        if not await_keys(self._store, keys, self._end - time.monotonic(), look):
            look()
            missing = self._missing(keys, ranks)
            if missing:  # the last one has not come just now
                who = named_ranks((self._name(one) for one in missing), PROCESSES)
                raise CommTimeoutError(
                    f"rank {self._name(self._rank)}: {who} of {self._group()} did not come to make it within "
                    f"{self._limit_s:g} s; see what {'it' if len(missing) == 1 else 'they'} printed, and whether "
                    f"{'it reaches' if len(missing) == 1 else 'they reach'} this call"
                )
        return self._store.multi_get(keys)

    def _delete_read(self, *whats: str) -> None:
        """Delete the members' values, which this one has read, with the last member that does so."""
        keys = [f"{what}/{rank}" for what in whats for rank in range(self._size)]
        delete_read_keys(self._store, ["memory", *keys], f"read/{'-'.join(whats)}", self._size)

    def _missing(self, keys: list[str], ranks: Sequence[int]) -> list[int]:
        return [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]

    def _group(self) -> str:
        return f"the group of ranks {listed(range(self._size) if self._ranks is None else self._ranks)}"
