"""The members of a new group tell each other whether they can make it, before the library waits for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError

from comm_utils.errors import BackendUnavailableError, CommError, CommTimeoutError, PeerLostError
from comm_utils.group_names import listed
from comm_utils.rank_processes import PROCESSES, ended_ranks, named_ranks
from comm_utils.reachability import Listener
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.connecting import Connecting, Place, Reports, in_thread, spans_hosts
from comm_utils.torch_support.failures import classify, is_interruption
from comm_utils.torch_support.store_waits import StoreWait, await_keys, delete_read_keys
from comm_utils.watch.watch import WATCH

__all__ = ["LEFT", "WORLD", "agree", "let_others_read", "make_with_gloo", "report_ended"]

T = TypeVar("T")

#: The key under which the ranks of a world on gloo agree to make it.
WORLD = "comm-world"
#: The beginning of what a rank says that does not come, or has come and left.
LEFT = "left "
# Of a rank that can go on.
_READY = "ready "
# A rank that waits in the store reads it within so long.
_READ_S = 3.0
# What a rank gives as a reason, in a store in which others may write as well.
_MOST_REASON_BYTES = 1000


def agree(
    store: BoundedStore,
    key: str,
    wait: StoreWait,
    rank: int,
    refusal: BackendUnavailableError | None,
    limit: timedelta,
    place: Place | None = None,
) -> dict[int, Place]:
    """Return the places of all members, by global rank, when every one is ready.

    Args:
        store: of the world, whose connection is open: a process without free descriptors can use it.
        key: of this attempt; no other has it.
        wait: the making of the group, whose members it has.
        rank: this one's.
        refusal: why this rank cannot go on; None if it can.
        place: this rank's, where it is known.

    Raises:
        BackendUnavailableError: a member cannot go on; the same on every one.
        CommTimeoutError: members did not come in time; names them. Or the store does not answer.
        PeerLostError: a member has left before all had come.
        PeerLostError, CollectiveMismatchError: the watch has found that members do not come.
    """
    own = Place() if place is None else place
    if not wait.is_alone:  # recorded before others go on: they may wait for one that has not seen yet that all came
        wait.begin()
    store.set(f"{key}/{rank}", f"{_READY}{own.encoded()}" if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    ranks = wait.group.ranks
    keys = {one: f"{key}/{one}" for one in ranks}
    try:
        _await_members(store, keys, wait, rank, limit)
    except BaseException as error:  # also Ctrl-C: those that come later are not to connect with this rank
        what = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"gave up with {type(error).__name__}"
        with suppress(RuntimeError):
            store.set(keys[rank], f"{LEFT}rank {rank} {what} in {wait.call} before all had come")
        raise
    places, values = {}, store.multi_get(list(keys.values()))
    come = [one for one, value in zip(ranks, values, strict=True) if value.startswith(_READY.encode())]
    if wait.is_alone and len(come) < len(ranks):
        let_others_read(store, key, rank, come)
    for one, value in zip(ranks, values, strict=True):
        said = value[:_MOST_REASON_BYTES].decode(errors="replace")
        if said.startswith(LEFT):
            wait.look()  # raises why it has, where that is known
            raise PeerLostError(f"{wait.call} on rank {rank}: {said.removeprefix(LEFT)}")
        if not said.startswith(_READY):
            raise BackendUnavailableError(f"{said} [reported by rank {one}; rank {rank} could go on]")
        places[one] = Place.decoded(said.removeprefix(_READY))
    delete_read_keys(store, list(keys.values()), f"{key}/read", len(ranks))
    return places


def let_others_read(store: BoundedStore, key: str, rank: int, readers: Sequence[int]) -> None:
    """Keep the store of a start, which rank 0 may serve, until ``readers`` have read why the group is not made.

    Args:
        key: as for :func:`agree`.
    """
    with suppress(RuntimeError):
        store.set(f"{key}/heard/{rank}", "")
        if rank == 0:
            await_keys(store, [f"{key}/heard/{one}" for one in readers], _READ_S, lambda: None)


def report_ended(store: BoundedStore, keys: Mapping[int, str]) -> None:
    """Write, for ranks whose process has ended before they came, that they have left, for all members to read.

    Args:
        keys: by global rank, the key that a rank writes when it comes.
    """
    for one in ended_ranks(list(keys), PROCESSES):
        text = f"{named_ranks([one], PROCESSES)} ended before it made the world; its own output says why"
        store.compare_set(keys[one], "", f"{LEFT}{text}")  # a rank that has come, and ended then, is left to gloo


def _await_members(store: BoundedStore, keys: Mapping[int, str], wait: StoreWait, rank: int, limit: timedelta) -> None:
    """Wait until all members have come, whose keys are ``keys``; raises as :func:`agree` does."""

    def look() -> None:
        if wait.is_alone:  # later, the watch sees who has ended
            report_ended(store, keys)

    if wait.until(store, list(keys.values()), limit.total_seconds(), look):
        return
    missing = wait.absent(store, keys)
    if missing:
        doing = WATCH.absent(missing, wait.call) or (named_ranks(missing, PROCESSES) if PROCESSES else "")
        advice = (
            "check that their processes run, and what they printed"
            if wait.is_alone
            else f"all of them have to call {wait.call}, and as often with these ranks"
        )
        raise CommTimeoutError(
            f"{wait.call} on rank {rank}: not every rank of {listed(wait.group.ranks)} came to make the group: "
            f"{listed(missing)} did not within {limit.total_seconds():g} s{f' ({doing})' if doing else ''}; {advice}"
        )


def make_with_gloo(
    store: BoundedStore,
    key: str,
    wait: StoreWait,
    rank: int,
    refusal: BackendUnavailableError | None,
    limit: timedelta,
    make: Callable[[], T],
    discard: Callable[[T], None],
) -> T:
    """Return what ``make`` returns, which gloo connects with what it returns on the other members.

    The arguments are those of :func:`agree`, whose errors it raises as well.

    Args:
        discard: gets what is of no use, as not all members could be connected.

    Raises:
        PeerLostError, CommTimeoutError: not all members could be connected; on all, if they run on several hosts. On
            one host, also the errors of ``wait.look()``, as for a member that has ended since it came.
        PeerLostError: another member came and gave up, for a reason of its own.
    """
    who, limit_s, connected = f"{wait.call} on rank {rank}", limit.total_seconds(), f"{key}/connected"

    # gloo waits in the store, and nobody else can use the connection in which it does.
    own_connection = store.with_own_connection
    of_gloo: list[Exception] = []

    def look_at_gloo() -> None:
        wait.look()
        if of_gloo:
            raise of_gloo[0]

    def look() -> None:
        wait.look()
        own = own_connection(look_at_gloo)
        if own is not store:
            Reports(own, connected, who, rank).look()

    def connect() -> T:
        try:
            return make()
        except Exception as error:
            of_gloo.append(error)
            raise

    listener = Listener(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip())
    try:
        places = agree(store, key, wait, rank, refusal, limit, Place.of_this_process(listener.address))
        if not spans_hosts(list(places.values())):
            return make() if wait.is_alone else in_thread(connect, discard, look, "gloo", needs_thread=False)
        connecting = Connecting(own_connection(wait.look), connected, who, rank, places, "gloo", limit_s)
        return connecting.run(connect, discard, wait.look)
    except BaseException as error:
        # Where gloo or the store reports a loss, the others have an error of their own.
        is_common = isinstance(error, CommError) or (
            (error in of_gloo or isinstance(error, DistError)) and classify(error) is not None
        )
        if is_interruption(error) or not is_common:
            with suppress(CommError):  # the store does not answer
                own = own_connection(wait.look)
                if own is not store:
                    Reports(own, connected, who, rank).tell_of(error)
        raise
    finally:
        listener.close()
