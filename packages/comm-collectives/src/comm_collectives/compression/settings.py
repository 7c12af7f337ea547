"""A compression as users ask for it: a codec, its options, and the state of its error feedback."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from comm_collectives.compression import saved_states
from comm_collectives.compression.codec import Codec
from comm_collectives.compression.feedback import Feedback, empty, new_state, state_of_other_steps
from comm_collectives.compression.low_rank import LowRank
from comm_collectives.compression.members import Members
from comm_collectives.compression.registry import codec_names, make_codec
from comm_collectives.compression.saved_states import POWERSGD
from comm_collectives.compression.shares import Shares
from comm_collectives.compression.states import (
    State,
    StatesByMemory,
    StateUsers,
    check_owner,
    current_padding,
    owners,
)
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.measured_choice import AUTO
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["POWERSGD", "SEQ_PARALLEL", "Compression", "as_compression", "configure_seq_parallel", "forget_states"]

#: The name of what the configuration says for sequence parallelism.
SEQ_PARALLEL = "seq_parallel"


class Compression:
    """A way to compress what collectives send, and what its encodings have lost so far.

    Give it to a call as ``compression=``. With error feedback, what a call loses is added to what the next one sends.
    That belongs to one tensor in one group: to the name of :meth:`of`, which can be saved, or else to a place in
    memory that is not freed between two calls.

    Args:
        method: ``"fp16" "bf16" "fp8" "fp8_e4m3" "fp8_e5m2" "int8" "int4" "onebit" "topk" "powersgd"``, or a codec that
            another package offers through the entry point ``comm_utils.codecs``.
        block_size: elements that share a scale: a multiple of 16 up to 4096; of formats with scales alone.
        error_feedback: keep what encodings of reductions lose; on by default where results are of no use otherwise,
            off elsewhere. An ``all_gather`` and an ``all_to_all`` keep nothing: they add nothing up in which a later
            call could make it good.
        min_size_bytes: smaller tensors travel as they are. ``"auto"``, which ``"powersgd"`` has not, for the size at
            which a group measures that compressed calls are faster: in the first call of an operation from 64 KiB on.
        ratio: the share of elements that ``"topk"`` sends.
        rank: of the matrices that ``"powersgd"`` sends, 4 by default.
        between_hosts: encode only what travels between hosts, and reduce or gather within each host before; calls on
            one host travel as they are. Where hosts have one rank each, or different numbers, everything is encoded,
            and so it is of tensors that are not on the CPU. Not for ``"powersgd"``; an all_to_all is not compressed
            then.

    Raises:
        ArgumentError: an option that the method does not have, or a value that is out of range.
    """

    @with_keyword_errors
    def __init__(
        self,
        method: str,
        block_size: int | None = None,
        error_feedback: bool | None = None,
        min_size_bytes: int | str = 0,
        ratio: float | None = None,
        rank: int | None = None,
        between_hosts: bool = False,
    ) -> None:
        if not isinstance(method, str):
            raise ArgumentTypeError(f"compression: got {shown(method)}; expected a name such as 'int8'")
        if error_feedback not in (None, True, False):
            raise ArgumentTypeError(f"compression: error_feedback: got {shown(error_feedback)}; expected a flag")
        if min_size_bytes != AUTO and (type(min_size_bytes) is not int or min_size_bytes < 0):
            raise ArgumentError(
                f"compression: min_size_bytes: got {shown(min_size_bytes)}; expected 0 or more bytes, or 'auto'"
            )
        #: None for ``"powersgd"``, whose factors travel as they are.
        self.codec: Codec | None = None
        if method == POWERSGD:
            if min_size_bytes == AUTO:
                raise ArgumentError(
                    "compression: min_size_bytes: got 'auto'; whether powersgd is faster depends on the shape of a "
                    "tensor too; give a size"
                )
            if block_size is not None or ratio is not None:
                raise ArgumentError("compression: powersgd takes rank, and neither block_size nor ratio")
            if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
                raise ArgumentError(f"compression: rank: got {shown(rank)}; expected 1 or more")
        else:
            self.codec = make_codec(method, block_size=block_size, ratio=ratio, rank=rank)
        self.method, self.rank, self.min_size_bytes = method, rank or 4, min_size_bytes
        needed = self.codec is None or self.codec.needs_feedback
        if needed and error_feedback is False:
            raise ArgumentError(f"compression: {method} is of no use without error feedback; leave it on")
        self.error_feedback = needed if error_feedback is None else bool(error_feedback)
        if between_hosts not in (True, False):
            raise ArgumentTypeError(f"compression: between_hosts: got {shown(between_hosts)}; expected a flag")
        if between_hosts and self.codec is None:
            raise ArgumentError(
                "compression: between_hosts is not for powersgd, whose factors go through all_reduce as they are; "
                "leave it out"
            )
        self.between_hosts = bool(between_hosts)
        self._states: dict[str, State] = {}
        self._unnamed = StatesByMemory()
        #: The hooks that have names of these states to themselves.
        self.users = StateUsers()
        self._name: str | None = None
        self._repr = self._described(repr(self.codec))

    def __repr__(self) -> str:
        """Return what ranks have to agree on."""
        return self._repr

    def _described(self, codec: str) -> str:
        return f"{self._of_everything(codec)}{' between hosts' * self.between_hosts}"

    def _of_everything(self, codec: str) -> str:
        if self.codec is None:
            return f"{POWERSGD}(rank={self.rank})"
        return f"{codec}{'+error_feedback' * self.error_feedback}"

    def describe_one_step(self) -> str:
        """Return the method of a call in one step for the record: everything is encoded, whatever ``between_hosts``."""
        return self._of_everything(repr(self.codec))

    def describe_call(self) -> str:
        """Return what ranks compare in each call: ``repr()``, with ``Codec.describe()`` for the codec."""
        return self._described("" if self.codec is None else self.codec.describe())

    def describe(self) -> str:
        """Return what ranks have to agree on before the first call: ``repr()``, and the least size."""
        return f"{self!r} with min_size_bytes={self.min_size_bytes!r}"

    @property
    def name(self) -> str | None:
        """The name of the tensor that :meth:`of` was called with; None for none."""
        return self._name

    def of(self, name: str) -> Compression:
        """Return the same compression for the tensor ``name``, whose state has that name and can be saved."""
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(f"Compression.of: got {shown(name)}; expected a name")
        named = copy.copy(self)
        named._name = name
        return named

    def with_min_size(self, min_size_bytes: int) -> Compression:
        """Return the same compression, with the same state, for tensors from this size on."""
        other = copy.copy(self)
        other.min_size_bytes = min_size_bytes
        return other

    def without_state(self) -> Compression:
        """Return the same compression with a state of its own, which is empty."""
        other = copy.copy(self)
        other._states, other._unnamed, other._name = {}, StatesByMemory(), None
        other.users = StateUsers()
        return other

    @property
    def settled_min_size_bytes(self) -> int:
        """Return the bytes from which on tensors are compressed, where that was measured or is known."""
        assert isinstance(self.min_size_bytes, int)
        return self.min_size_bytes

    def feedback(
        self,
        place: torch.Tensor,
        count: int,
        owned: int,
        average: bool,
        members: Members,
        shares: Shares | None = None,
    ) -> Feedback | None:
        """Return the state of a tensor of ``count`` elements; None without feedback.

        Args:
            place: begins where the tensor does.
            owned: how many elements of the sum this rank encodes, in one step; 0 where no rank does.
            members: this rank of the group.
            shares: what it encodes in a call in steps; None in one step.

        Raises:
            ArgumentError: the state of this name belongs to another tensor, group or rank.
        """
        if not self.error_feedback:
            return None
        state = self._state(place, count, members)
        if not isinstance(state, Feedback):
            state = new_state(place.device, count, owned, shares)
            self._keep(place, count, members, state)
        elif state.shares != shares:
            state.become(state_of_other_steps(state, owned, shares, members, self.codec))
        # A reduce_scatter leaves alone what an all_reduce of this name has lost: not every rank has a part of that.
        elif shares is None and owned and state.reduced.numel() != owned:
            if self._name is not None and state.reduced.numel():
                raise ArgumentError(
                    f"compression: the error feedback of {self._name!r} is that of another number of ranks; "
                    "Compression.reshard() turns the states of all ranks into those of this world"
                )
            state.reduced = empty(owned, place.device)
        state.average, state.members, state.padding = average, members, current_padding()
        return state

    def low_rank(self, place: torch.Tensor, count: int, average: bool, members: Members) -> LowRank:
        """Return the state of a tensor of ``count`` elements for ``"powersgd"``; see :meth:`feedback`."""
        state = self._state(place, count, members)
        if not isinstance(state, LowRank):
            state = LowRank(empty(count, place.device), empty(0, place.device).view(0, 0))
            self._keep(place, count, members, state)
        state.average, state.members, state.padding = average, members, current_padding()
        return state

    def _state(self, place: torch.Tensor, count: int, members: Members) -> State | None:
        if self._name is None:
            state = self._unnamed.get(owners(place), count, members.ranks or ())
        else:
            state = self._states.get(self._name)
            if state is not None:
                state.fit(count, current_padding())
                check_owner(self._name, state, count, members)
        if state is not None:
            state.move_to(place.device)
        return state

    def _keep(self, place: torch.Tensor, count: int, members: Members, state: State) -> None:
        if self._name is None:
            self._unnamed.keep(owners(place), count, members.ranks or (), state)
        else:
            self._states[self._name] = state

    def reset(self) -> None:
        """Forget what encodings have lost."""
        self._states.clear()
        self._unnamed.clear()

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, of tensors that have a name, with its rank and its group; copies.

        The first call that leaves out states of tensors without a name logs a warning.
        """
        self._unnamed.warn_unsaved()
        found = {name: saved_states.save(state) for name, state in self._states.items()}
        return {"compression": repr(self), "tensors": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` or :meth:`reshard` returned for this rank.

        Raises:
            ArgumentError: it is that of another compression. The first call with a name raises it on all ranks where
                the state of that name is that of another number of ranks, of another group or of another rank.
        """
        saved_states.check_state("Compression.load_state_dict", state, "what state_dict() or reshard() returned")
        if state["compression"] != repr(self):
            raise ArgumentError(
                f"Compression.load_state_dict: got the state of {state['compression']!r}; expected that of {self!r}"
            )
        loaded = {name: saved_states.load(one, self.codec is None) for name, one in state["tensors"].items()}
        self.reset()
        self._states.update(loaded)

    @staticmethod
    def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """Return the states of ``world_size`` ranks that lose nothing of those of all ranks of another world.

        What results still lack stays the same in total, of sums and of averages. The states are on the CPU.

        Args:
            states: what :meth:`state_dict` returned on every rank, in their order.

        Raises:
            ArgumentError, ArgumentTypeError: they are no such states, those of different compressions or tensors, or
                not those of all ranks of one group in their order.
        """
        return saved_states.reshard(states, world_size)


class _Configured:
    seq_parallel: ClassVar[Compression | None] = None


def configure_seq_parallel(compression: Compression | None) -> None:
    """Say what :data:`SEQ_PARALLEL` stands for in this world; None for no compression."""
    _Configured.seq_parallel = compression


@functools.lru_cache(maxsize=64)
def _named(method: str) -> Compression:
    return Compression(method)


def forget_states() -> None:
    """Forget what encodings have lost in calls that gave a name alone, and what the configuration said."""
    _named.cache_clear()
    configure_seq_parallel(None)


def as_compression(call: str, given: Any) -> Compression | None:
    """Return what a user gave as ``compression=``; None for none.

    Raises:
        ArgumentError: there is no such codec.
        ArgumentTypeError: it is no codec and no ``Compression``.
    """
    if given is None or given is False or given == "none":
        return None
    if isinstance(given, Compression):
        return given
    if isinstance(given, str):
        if given == SEQ_PARALLEL:
            return _Configured.seq_parallel
        try:
            return _named(given)
        except ArgumentError as error:
            raise ArgumentError(f"{call}: {error}") from None
    raise ArgumentTypeError(
        f"{call}: compression: got {shown(given)}; expected one of {', '.join([*codec_names(), POWERSGD])}, or a "
        "Compression"
    )
