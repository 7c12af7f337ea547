"""To which tensor the state of an error feedback belongs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch.distributed import ProcessGroup

from comm_collectives.compression.feedback import Feedback
from comm_collectives.compression.low_rank import LowRank
from comm_collectives.compression.members import Members
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError
from comm_utils.log import logger

__all__ = [
    "State",
    "StateUsers",
    "StatesByMemory",
    "check_owner",
    "current_padding",
    "find_state",
    "owned_by",
    "owners",
]

State: TypeAlias = Feedback | LowRank
_S = TypeVar("_S")

# So many states that were used once and then lost with their memory tell that a program frees its tensors.
_SUSPICIOUS = 8
_Key: TypeAlias = tuple[tuple[tuple[int, int, int], ...], int, tuple[int, ...]]
_owners: ContextVar[Sequence[torch.Tensor]] = ContextVar("owners", default=())
_padding: ContextVar[int] = ContextVar("padding", default=0)


@contextmanager
def owned_by(tensors: Sequence[torch.Tensor], padding: int = 0) -> Iterator[None]:
    """Have the states of calls in the block belong to these tensors; the library passes others, made of them.

    Args:
        padding: elements at the end of what it passes that depend on the number of ranks.
    """
    tokens = _owners.set(tensors), _padding.set(padding)
    try:
        yield
    finally:
        _owners.reset(tokens[0])
        _padding.reset(tokens[1])


def current_padding() -> int:
    """Return the elements at the end of the tensor of a call that depend on the number of ranks."""
    return _padding.get()


def owners(place: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors to which the state of a call with ``place`` belongs."""
    return _owners.get() or (place,)


def check_owner(name: str, state: State, count: int, members: Members) -> None:
    """Check that a state with a name is that of a tensor of ``count`` elements, on this rank of this group.

    Raises:
        ArgumentError
    """
    if state.count != count:
        raise ArgumentError(
            f"compression: the error feedback of {name!r} is that of {state.count} elements; got a "
            f"tensor of {count}: each tensor needs a name of its own"
        )
    owner = state.members
    if owner is None:
        return
    if owner.world_size != members.world_size:
        raise ArgumentError(
            f"compression: the error feedback of {name!r} is that of {owner.world_size} ranks; got a call on a group "
            f"of {members.world_size}: Compression.reshard() turns the states of all ranks into those of this world"
        )
    if owner.ranks is not None and owner.ranks != members.ranks:
        raise ArgumentError(
            f"compression: the error feedback of {name!r} is that of the group of ranks {list(owner.ranks)}; got a "
            f"call on that of ranks {list(members.ranks or ())}: each group needs a name of its own"
        )
    if owner.rank != members.rank:
        raise ArgumentError(
            f"compression: the error feedback of {name!r} is that of group rank {owner.rank}; got a call of group rank "
            f"{members.rank}: save what Compression.state_dict() returns on each rank, and load it on the same one"
        )


def find_state(make: Callable[[Members], _S], backend: Backend, group: ProcessGroup | None) -> tuple[_S | None, str]:
    """Return the state that ``make`` finds for the members of the group, and why it refuses to, for all ranks to raise.

    Raises:
        ArgumentError: it refuses to, and there are no others.
    """
    members = Members.of(backend, group)
    try:
        return make(members), ""
    except ArgumentError as error:
        if members.world_size == 1:
            raise
        return None, str(error)


class StateUsers:
    """Objects of which each alone uses the states of some names, as long as it exists or until :meth:`release`."""

    def __init__(self) -> None:
        self._users: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[type[StateUsers], tuple[()]]:
        """Copy nothing: the states of a copy, in this process or another, have no users yet."""
        return StateUsers, ()

    def taken(self, names: Iterable[str], user: object = None) -> str | None:
        """Return the first of ``names`` that another object than ``user`` has; None for none."""
        for name in names:
            if self._users.get(name, user) is not user:
                return name
        return None

    def claim(self, names: Iterable[str], user: object) -> None:
        """Give ``names`` to ``user``."""
        self._users.update(dict.fromkeys(names, user))

    def release(self, user: object) -> None:
        """Let others have the names of ``user``."""
        for name in [name for name, one in self._users.items() if one is user]:
            del self._users[name]


class StatesByMemory:
    """States of tensors without a name, each as long as the memory of its tensors exists."""

    def __init__(self) -> None:
        # By storage, place in it and number of elements of each tensor, by the sum of these, and by ranks of the group.
        self._states: dict[_Key, tuple[State, list[int]]] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._used_once = 0
        self._warned_unsaved = False

    def __reduce__(self) -> tuple[type[StatesByMemory], tuple[()]]:
        """Copy nothing: a copy, in this process or another, meets other tensors."""
        return StatesByMemory, ()

    def get(self, tensors: Sequence[torch.Tensor], count: int, ranks: tuple[int, ...]) -> State | None:
        """Return the state of some tensors with ``count`` elements together, in the group of ``ranks``."""
        found = self._states.get(_key(tensors, count, ranks))
        if found is None:
            return None
        found[1][0] += 1
        return found[0]

    def keep(self, tensors: Sequence[torch.Tensor], count: int, ranks: tuple[int, ...], state: State) -> None:
        """Keep a state, which :meth:`get` returns from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self._alive:
                self._alive[id(storage)] = weakref.ref(storage, partial(self._freed, id(storage)))
        self._states[_key(tensors, count, ranks)] = state, [1]

    def clear(self) -> None:
        """Forget all states."""
        self._states.clear()
        self._alive.clear()

    def warn_unsaved(self) -> None:
        """Log, the first time, that these states are not saved, if there are any."""
        if self._states and not self._warned_unsaved:
            self._warned_unsaved = True
            logger.warning(
                "Compression.state_dict: the error feedback of %d tensors without a name is not saved; name them with "
                "Compression.of(name), in GradientReduction(compression=...) as well",
                len(self._states),
            )

    def _freed(self, storage: int, _: object) -> None:
        self._alive.pop(storage, None)
        # A finalizer may run in one thread while others add states, or run this too: list() copies all keys at once.
        for key in [key for key in list(self._states) if any(place[0] == storage for place in key[0])]:
            if (found := self._states.pop(key, None)) is not None:
                self._used_once += found[1][0] == 1
        if self._used_once == _SUSPICIOUS:
            self._used_once += 1
            logger.warning(
                "compression: the memory of %d tensors was freed after one call, and with it what error feedback kept; "
                "name them with Compression.of(name), or keep them, as zero_grad(set_to_none=False) does for gradients",
                _SUSPICIOUS,
            )


def _key(tensors: Sequence[torch.Tensor], count: int, ranks: tuple[int, ...]) -> _Key:
    # A single tensor may be the first of several that lie one after the other.
    sizes = [count] if len(tensors) == 1 else [tensor.numel() for tensor in tensors]
    places = tuple(
        (id(tensor.untyped_storage()), int(tensor.storage_offset()), size)
        for tensor, size in zip(tensors, sizes, strict=True)
    )
    return places, count, ranks
