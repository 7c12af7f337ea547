"""Comparing what the ranks are about to do, before anything else is sent."""

from __future__ import annotations

import hashlib

import torch
from torch.distributed import ProcessGroup

from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError, CollectiveMismatchError

__all__ = ["Agreement"]

_DIGEST_BYTES, _TEXT_BYTES = 16, 232
# Elements; no host has memory for so many.
_MOST = 1 << 40
# The number of a rank that refuses the call.
_REFUSED = _MOST
_BYTES = _DIGEST_BYTES + 8 + _TEXT_BYTES


class Agreement:
    """Compares a description of the call on all ranks, while the first piece is encoded.

    Args:
        what: the operation, its sizes and its codec.
        number: what may differ between ranks, for :meth:`largest`; not with ``refusal``.
        subject: what ranks that differ disagree about, for the error.
        refusal: why this rank cannot make the call; "" where it can.

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
    ) -> None:
        self._backend, self._group, self._largest, self._subject = backend, group, number, subject
        self._refusal, number = refusal, _REFUSED if refusal else number
        text = (f"{refusal} ({what})" if refusal else what).encode()
        own = hashlib.sha256(text).digest()[:_DIGEST_BYTES] + number.to_bytes(8, "little")
        own += text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        size = self._backend.get_world_size(self._group)
        self._sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._received = torch.empty(size * _BYTES, dtype=torch.uint8, device="cpu")
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
        numbers = [int.from_bytes(row[_DIGEST_BYTES : _DIGEST_BYTES + 8], "little") for row in rows]
        if self._refusal and all(one == _REFUSED for one in numbers):
            raise ArgumentError(self._refusal)
        if len({row[:_DIGEST_BYTES] for row in rows}) > 1:
            ranks = self._backend.get_process_group_ranks(self._group)
            texts = [row[_DIGEST_BYTES + 8 :].rstrip(b"\0").decode(errors="replace") for row in rows]
            said = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True))
            raise CollectiveMismatchError(f"the ranks disagree about {self._subject}: {said}")
        self._largest = max(numbers)
        if self._largest > _MOST:
            raise CollectiveMismatchError(
                f"a rank says {self._largest} of {self._subject}; expected at most {_MOST}: its message is damaged"
            )

    def largest(self) -> int:
        """Return the largest ``number`` of all ranks, after :meth:`check`."""
        self.check()
        return self._largest
