"""The exchange of encoded pieces within a group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from comm_collectives.buffers import Buffers
from comm_collectives.compression.agreement import Agreement
from comm_collectives.compression.codec import Codec
from comm_collectives.pieces import pieces
from comm_utils.backend import Backend, Work

__all__ = ["Link", "Sizes", "decode_into", "sum_in"]

# Bytes on the wire of a piece: long enough to hide what starting an operation costs, short enough to overlap.
_PIECE_BYTES = 1 << 20
_MOST_ELEMENTS = 1 << 20
# On devices, of a piece of all ranks: the host takes longer to start operations than most links to carry a megabyte.
_DEVICE_BYTES = 32 << 20
# Of the longest pieces, the shortest.
_SHORTEST_PART = 8
# Of messages, which a program hardly uses.
_TAG = 0x636F6D70
# Of the wire, at which the elements of each rank begin.
_ALIGNMENT = 16


class Sizes:
    """The sizes of what one of ``size`` ranks, ``rank``, exchanges encoded."""

    def __init__(self, codec: Codec, size: int, rank: int) -> None:
        self.codec, self.size, self.rank = codec, size, rank

    def wire_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` elements, with what aligns the next ones; nothing travels for none."""
        if not count:
            return 0
        return -(-self.codec.encoded_bytes(count) // _ALIGNMENT) * _ALIGNMENT

    def slice_elements(self, count: int) -> int:
        """Return the elements of a slice of a tensor of ``count``; the last slices may have fewer."""
        unit = math.lcm(_ALIGNMENT, max(1, self.codec.granularity))
        return -(-count // (self.size * unit)) * unit

    def slices(self, count: int) -> list[int]:
        """Return how many of ``count`` elements each rank adds up."""
        length = self.slice_elements(count)
        return [max(0, min(length, count - rank * length)) for rank in range(self.size)]

    def all_reduce_bytes(self, count: int) -> int:
        """Return the bytes that this rank sends in an all_reduce of ``count`` elements."""
        counts = self.slices(count)
        to_owners = sum(self.wire_bytes(one) for rank, one in enumerate(counts) if rank != self.rank)
        summed = counts[self.rank] if self.size == 2 else counts[0]  # several ranks send as much as the first
        return to_owners + (self.size - 1) * self.wire_bytes(summed)


class Link(Sizes):
    """The exchange of encoded pieces within a group.

    Args:
        backend: moves bytes, as uint8.
        compression: what ranks have to agree on; "" is the codec alone.
        refusal: see ``agreement.Agreement``.
    """

    def __init__(
        self, backend: Backend, group: ProcessGroup | None, codec: Codec, compression: str = "", refusal: str = ""
    ) -> None:
        super().__init__(codec, backend.get_world_size(group), backend.get_rank(group))
        self.backend, self.group = backend, group
        self.compression, self._refusal = compression or codec.describe(), refusal

    def agree(self, what: str, number: int = 0) -> Agreement:
        """Begin to compare what the ranks are about to do; "with" the compression is added."""
        return Agreement(self.backend, self.group, f"{what} with {self.compression}", number, refusal=self._refusal)

    def pieces(self, most: int, device: torch.device, piece_bytes: int = _PIECE_BYTES) -> list[slice]:
        """Return the pieces in which slices with up to ``most`` elements travel, of ``piece_bytes`` on the wire.

        The first one is as long as the others: a shorter one gained nothing where it was measured. They are longer
        on devices, but where gloo serves them: there, other ranks may have the tensor on the CPU.
        """
        unit, most_elements = max(1, self.codec.granularity), _MOST_ELEMENTS
        if device.type != "cpu" and not self.backend.capabilities(self.group, device.type).messages_from_host:
            piece_bytes = max(piece_bytes, _DEVICE_BYTES // self.size)
            most_elements = max(most_elements, _DEVICE_BYTES // self.size)
        bytes_of_units = max(1, self.codec.encoded_bytes(unit * 256)) / 256
        longest = max(1, min(most_elements // unit, int(piece_bytes / bytes_of_units)))
        shortest = max(1, longest // _SHORTEST_PART)
        return list(pieces(most, unit, longest * unit, shortest * unit, first=longest * unit))

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, rows: Sequence[int], columns: Sequence[int], even: bool
    ) -> Work:
        """Start sending ``rows[r]`` bytes to rank r, and receiving ``columns[r]`` from it.

        Args:
            even: all of these are equal on all ranks.
        """
        takes, gives = (None, None) if even else (columns, rows)
        work = self.backend.all_to_all_single(received, sent, takes, gives, self.group, True)
        assert work is not None
        return work

    def has_messages(self, device: torch.device) -> bool:
        """Return whether :meth:`receive` and :meth:`send` may take the place of :meth:`exchange`."""
        return self.backend.capabilities(self.group, device.type).independent_messages

    def receive(self, received: torch.Tensor, rank: int) -> Work:
        """Start receiving from a rank of the group."""
        return self.backend.irecv(received, None, self.group, _TAG, rank)

    def send(self, sent: torch.Tensor, rank: int) -> Work:
        """Start sending to a rank of the group."""
        return self.backend.isend(sent, None, self.group, _TAG, rank)

    def gather(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        """Start sending ``sent`` to all."""
        work = self.backend.all_gather_into_tensor(received, sent, self.group, True)
        assert work is not None
        return work


def decode_into(codec: Codec, wire: torch.Tensor, target: torch.Tensor, buffers: Buffers) -> None:
    """Overwrite ``target``, of any float dtype, with what begins at ``wire``."""
    if target.numel() == 0:
        return
    encoded = wire[: codec.encoded_bytes(target.numel())]
    if target.dtype is torch.float32:
        codec.decode(encoded, target)
    else:
        whole = buffers.scratch(target.numel())
        codec.decode(encoded, whole)
        target.copy_(whole)


def sum_in(target: torch.Tensor, own: torch.Tensor, buffers: Buffers) -> torch.Tensor:
    """Return ``own`` as float32, to be added to: in ``target`` itself where that is float32, else in scratch memory."""
    total = target if target.dtype is torch.float32 else buffers.scratch(own.numel())
    if total.data_ptr() != own.data_ptr():
        total.copy_(own)
    return total
