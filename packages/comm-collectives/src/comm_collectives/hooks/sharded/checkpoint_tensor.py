"""Parts of a tensor as ``torch.distributed.checkpoint`` saves and loads them."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from comm_collectives.hooks.sharded.rectangles import rectangles

__all__ = ["CheckpointTensor"]


class CheckpointTensor:
    """A rank's part of a tensor that all ranks of a group have together.

    ``torch.distributed.checkpoint`` saves the parts of all ranks as one tensor of the whole shape, and loads any part
    of it: at another number of ranks, or as a whole. Loading writes into the memory of the part.

    Args:
        shape: of the whole tensor.
        begin: the first element of the part, in the flattened tensor.
        values: (n,), the part; not copied.
    """

    def __init__(self, shape: torch.Size, begin: int, values: torch.Tensor) -> None:
        self.shape, self.begin, self.values = shape, begin, values.detach()
        self._blocks = [
            (
                ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)),
                self.values[one.start - begin :][: torch.Size(one.sizes).numel()].view(one.sizes),
            )
            for one in rectangles(shape, begin, begin + values.numel())
        ]

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self.shape

    def __repr__(self) -> str:
        end = self.begin + self.values.numel()
        return f"CheckpointTensor(shape={tuple(self.shape)}, elements {self.begin} to {end} here)"

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.values)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk, _ in self._blocks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._blocks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset is None:
            raise ValueError(f"{index.fqn}: got a part without its offset; expected one of {self!r}")
        return next(view for chunk, view in self._blocks if chunk.offsets == index.offset)
