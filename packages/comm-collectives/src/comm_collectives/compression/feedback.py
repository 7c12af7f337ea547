"""Error feedback: what an encoding loses is added to what is encoded next.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs", Interspeech 2014; why it converges: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from comm_collectives.compression.codec import Codec
from comm_collectives.compression.link import Sizes
from comm_collectives.compression.members import Members
from comm_collectives.compression.shares import Shares
from comm_utils.torch_support import factories

__all__ = [
    "Feedback",
    "empty",
    "errors_of",
    "keep_error",
    "keep_own_errors",
    "new_state",
    "own_errors",
    "state_of_other_steps",
]


@dataclass
class Feedback:
    """The losses of the encodings of one tensor so far.

    Attributes:
        local: of what this rank sent, float32, as many elements as the tensor, or as its shares.
        reduced: of the sum that this rank sent to all, float32, as many elements as its slice, or slices.
        average: whether the result is an average, which ``reduced`` is of, too.
        nothing_lost: begin and end of a part of ``local`` that is known to be zero.
        members: of the last call, or of the state that was loaded; None where that says nothing of them.
        shares: what it encodes in calls in steps; None in one step.
        unsent: of encodings in other shares, float32, as many elements as the tensor, to be added to the next input.
        padding: elements at the end of the tensor that depend on the number of ranks.
    """

    local: torch.Tensor
    reduced: torch.Tensor
    average: bool = False
    nothing_lost: tuple[int, int] | None = None
    members: Members | None = None
    shares: Shares | None = None
    unsent: torch.Tensor | None = None
    padding: int = 0
    _pieces: list[Feedback] = field(default_factory=list, repr=False)

    @property
    def count(self) -> int:
        """Elements of the tensor."""
        return self.local.numel() if self.shares is None else self.shares.count

    def move_to(self, device: torch.device) -> None:
        """Move the state to ``device``, that of its tensor; a saved one may come from another."""
        if self.local.device == device:
            return
        self.local, self.reduced = self.local.to(device), self.reduced.to(device)
        self.unsent = None if self.unsent is None else self.unsent.to(device)
        self._pieces = []

    def fit(self, count: int, padding: int) -> None:
        """Take the padding of this number of ranks, where this is a resharded state, which has none.

        Args:
            count: elements of the tensor, with the padding.
            padding: how many of them, at the end, depend on the number of ranks.
        """
        if self.shares is None and self.count == count - padding:
            self.local = torch.nn.functional.pad(self.local, (0, padding))

    def become(self, other: Feedback) -> None:
        """Go on as ``other``, a state of the same tensor."""
        self.__dict__.update(other.__dict__)

    def of_pieces(self) -> list[Feedback]:
        """Return the states of the pieces of a call in steps, which are parts of this one."""
        assert self.shares is not None
        if not self._pieces:
            local = torch.split(self.local, self.shares.sent_counts)
            reduced = torch.split(self.reduced, self.shares.summed_counts)
            self._pieces = [Feedback(*parts, self.average) for parts in zip(local, reduced, strict=True)]
        return self._pieces

    def take_unsent(self) -> torch.Tensor | None:
        """Return what is to be added to the input of the call that is about to be made, once."""
        unsent, self.unsent = self.unsent, None
        return unsent


def new_state(device: torch.device, count: int, owned: int, shares: Shares | None) -> Feedback:
    """Return the losses of nothing; see ``Compression.feedback``."""
    if shares is not None:
        count, owned = sum(shares.sent_counts), sum(shares.summed_counts)
    return Feedback(empty(count, device), empty(owned, device), shares=shares)


def state_of_other_steps(
    state: Feedback, owned: int, shares: Shares | None, members: Members, codec: Codec | None
) -> Feedback:
    """Return the state of the same tensor for calls in other steps, or in one, with nothing of ``state`` lost."""
    assert codec is not None
    device, world_size = state.local.device, members.world_size
    if state.shares is not None:
        whole = state.shares.whole(state.local, state.reduced, state.average, world_size)
        if state.unsent is not None:
            whole += state.unsent
    else:
        whole = state.local.clone()
        begin = members.rank * Sizes(codec, world_size, members.rank).slice_elements(state.count)
        own = whole[begin : begin + state.reduced.numel()]
        own.add_(state.reduced, alpha=world_size if state.average else 1)
    if shares is None:
        return Feedback(whole, empty(owned, device))
    found = new_state(device, state.count, owned, shares)
    found.unsent = whole if whole.any() else None
    return found


def empty(count: int, device: torch.device) -> torch.Tensor:
    """Return the losses of nothing, as float32, whatever torch's default dtype is: native code gets the address."""
    return factories.zeros(count, dtype=torch.float32, device=device)


def own_errors(feedback: Feedback | None, slices: Sequence[torch.Tensor], rank: int) -> torch.Tensor | None:
    """Return the part of ``feedback.local`` for this rank's slice, whose elements are added and not encoded.

    Returns:
        None where nothing is lost there, as after a first call. An earlier world may have encoded these elements.
    """
    if feedback is None:
        return None
    place = _place(slices, rank)
    if feedback.nothing_lost == place:
        return None
    feedback.nothing_lost = None
    return feedback.local[slice(*place)]


def keep_own_errors(feedback: Feedback | None, slices: Sequence[torch.Tensor], rank: int) -> None:
    """Note that what :func:`own_errors` returned was added and is zero now."""
    if feedback is not None:
        feedback.nothing_lost = _place(slices, rank)


def _place(slices: Sequence[torch.Tensor], rank: int) -> tuple[int, int]:
    begin = sum(one.numel() for one in slices[:rank])
    return begin, begin + slices[rank].numel()


def errors_of(feedback: Feedback | None, slices: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """Return the part of ``feedback.local`` for each slice."""
    if feedback is None:
        return None
    return torch.split(feedback.local, [one.numel() for one in slices])


def keep_error(values: torch.Tensor, decoded: torch.Tensor, error: torch.Tensor) -> None:
    """Overwrite ``error`` with what ``decoded`` lacks of ``values``, with 0 where that is not finite."""
    torch.sub(values, decoded, out=error)
    error.masked_fill_(~error.isfinite(), 0.0)
