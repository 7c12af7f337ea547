"""Comparing what the ranks are about to do, before anything else is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from struct import Struct

import torch
from torch.distributed import ProcessGroup

from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError, CollectiveMismatchError
from comm_utils.torch_support import factories

__all__ = ["Agreement", "sum_of_sizes"]

_DIGEST_BYTES, _TEXT_BYTES = 16, 224
# Elements; no host has memory for so many.
_MOST = 1 << 40
# The number of a rank that refuses the call.
_REFUSED = _MOST
_NUMBERS = Struct("<QQ")
_TEXT_AT = _DIGEST_BYTES + _NUMBERS.size
_BYTES = _TEXT_AT + _TEXT_BYTES
# Of a polynomial, in which sizes are the coefficients.
_PRIME, _PLACE = (1 << 61) - 1, 0x1B873593CC9E2D51


class Agreement:
    """Compares a description of the call on all ranks, while the first piece is encoded.

    Args:
        what: the operation, its sizes and its codec.
        number: what may differ between ranks, for :meth:`largest`; not with ``refusal``.
        sums: of the sizes that this rank sends and expects, from :func:`sum_of_sizes`, for :attr:`sizes_match`.
        subject: what ranks that differ disagree about, for the error.
        refusal: why this rank cannot make the call; "" where it can.

    Attributes:
        sizes_match: each rank sends what the others expect of it, as far as ``sums`` tell; known after :meth:`check`.

    Raises:
        ArgumentError: all ranks refuse the call.
        CollectiveMismatchError: this one does, and not all do.
    """

    def __init__(
        self,
        backend: Backend,
        group: ProcessGroup | None,
        what: str,
        number: int = 0,
        subject: str = "a compressed collective, of which nothing was sent",
        refusal: str = "",
        sums: int = 0,
    ) -> None:
        self._backend, self._group, self._largest, self._subject = backend, group, number, subject
        self.sizes_match = True
        self._refusal, number = refusal, _REFUSED if refusal else number
        text = (f"{refusal} ({what})" if refusal else what).encode()
        own = hashlib.sha256(text).digest()[:_DIGEST_BYTES] + _NUMBERS.pack(number, sums)
        own += text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        size = self._backend.get_world_size(self._group)
        self._sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._received = factories.empty(size * _BYTES, dtype=torch.uint8, device="cpu")
        device = next(iter(self._backend.device_types(self._group)))
        if device != "cpu" and "cpu" not in self._backend.device_types(self._group):
            self._sent, self._received = self._sent.to(device), self._received.to(device)
        self._work: Work | None = self._backend.all_gather_into_tensor(self._received, self._sent, self._group, True)
        if refusal:
            self.check()

    def check(self) -> None:
        """Wait for the others' descriptions.

        Raises:
            CollectiveMismatchError: they differ; on every rank, and before anything else was sent.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        work.wait()
        everything = bytes(self._received.cpu().tolist())
        rows = [everything[at : at + _BYTES] for at in range(0, len(everything), _BYTES)]
        numbers, sums = zip(*(_NUMBERS.unpack_from(row, _DIGEST_BYTES) for row in rows), strict=True)
        if self._refusal and all(one == _REFUSED for one in numbers):
            raise ArgumentError(self._refusal)
        if len({row[:_DIGEST_BYTES] for row in rows}) > 1:
            ranks = self._backend.get_process_group_ranks(self._group)
            texts = [row[_TEXT_AT:].rstrip(b"\0").decode(errors="replace") for row in rows]
            said = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True))
            raise CollectiveMismatchError(f"the ranks disagree about {self._subject}: {said}")
        self._largest, self.sizes_match = max(numbers), sum(sums) % _PRIME == 0
        if self._largest > _MOST:
            raise CollectiveMismatchError(
                f"a rank says {self._largest} of {self._subject}; expected at most {_MOST}: its message is damaged"
            )

    def largest(self) -> int:
        """Return the largest ``number`` of all ranks, after :meth:`check`."""
        self.check()
        return self._largest


def sum_of_sizes(rank: int, sent: Sequence[int], expected: Sequence[int]) -> int:
    """Return a sum which is 0 together with those of all ranks where each rank sends what the others expect of it.

    It has 61 bits, so that a row need not grow with the number of ranks.

    Args:
        sent: elements for each rank.
        expected: elements from each rank.
    """
    size, found = len(sent), 0
    for other, (to, of) in enumerate(zip(sent, expected, strict=True)):
        found += to * pow(_PLACE, rank * size + other, _PRIME) - of * pow(_PLACE, other * size + rank, _PRIME)
    return found % _PRIME
