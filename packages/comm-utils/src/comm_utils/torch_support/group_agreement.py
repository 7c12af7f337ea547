"""The members of a new group tell each other whether they can make it, before the library waits for all of them."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store

from comm_utils.errors import BackendUnavailableError, CommTimeoutError
from comm_utils.torch_support.store_waits import StoreWait
from comm_utils.watch.watch import WATCH

__all__ = ["agree"]

_READY = "ready"
# What a rank gives as a reason, in a store in which others may write as well.
_MOST_REASON_BYTES = 1000


def agree(
    store: Store, key: str, wait: StoreWait, rank: int, refusal: BackendUnavailableError | None, limit: timedelta
) -> None:
    """Return when every member is ready.

    Args:
        store: of the world, whose connection is open: a process without free descriptors can use it.
        key: of this attempt; no other has it.
        wait: the making of the group, whose members it has.
        rank: this one's.
        refusal: why this rank cannot go on; None if it can.

    Raises:
        BackendUnavailableError: a member cannot go on; the same on every one.
        CommTimeoutError: members did not come in time; names them.
        PeerLostError, CollectiveMismatchError: the watch has found that members do not come.
    """
    store.set(f"{key}/{rank}", _READY if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    ranks = wait.group.ranks
    keys = {one: f"{key}/{one}" for one in ranks}
    if not wait.until(store, list(keys.values()), limit.total_seconds()):
        missing = [one for one in ranks if not store.check([keys[one]])]
        if missing:
            doing = WATCH.absent(missing, wait.call)
            raise CommTimeoutError(
                f"{wait.call} on rank {rank}: not every rank of {list(ranks)} came to make the group: {missing} did "
                f"not within {limit.total_seconds():g} s{f' ({doing})' if doing else ''}; all of them have to call "
                f"{wait.call}, and as often with these ranks"
            )
    for one in ranks:
        said = store.get(keys[one])[:_MOST_REASON_BYTES].decode(errors="replace")
        if said != _READY:
            raise BackendUnavailableError(f"{said} [reported by rank {one}; rank {rank} could go on]")
