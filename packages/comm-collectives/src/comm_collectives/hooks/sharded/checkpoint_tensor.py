"""Parts of a tensor as ``torch.distributed.checkpoint`` saves and loads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from comm_collectives.hooks.sharded.rectangles import Rectangle, rectangles

if TYPE_CHECKING:
    # Its import takes seconds, and has happened where it calls the methods below.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["CheckpointTensor"]


class CheckpointTensor(torch.Tensor):
    """A rank's part of a tensor that all ranks of a group have together.

    ``torch.distributed.checkpoint`` saves the parts of all ranks as one tensor of the whole shape, and loads any part
    of it: at another number of ranks, or as a whole. Loading writes into the memory of the part. It is a tensor because
    torch looks for parts in tensors only; :meth:`size` is that of the whole.

    Args:
        shape: of the whole tensor.
        begin: the first element of the part, in the flattened tensor.
        part: (n,), the elements from there on; not copied.
    """

    begin: int
    part: torch.Tensor
    _whole: torch.Size
    _blocks: list[tuple[Rectangle, torch.Tensor]]

    def __new__(cls, shape: Sequence[int], begin: int, part: torch.Tensor) -> CheckpointTensor:
        return part.detach().as_subclass(cls)

    def __init__(self, shape: Sequence[int], begin: int, part: torch.Tensor) -> None:
        self._whole, self.begin, self.part = torch.Size(shape), begin, part.detach()
        self._blocks = [
            (
                one,
                self.part[one.start - begin :][: torch.Size(one.sizes).numel()].view(one.sizes),
            )
            for one in rectangles(self._whole, begin, begin + part.numel())
        ]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # results are ordinary tensors
            return function(*args, **(kwargs or {}))

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the whole tensor, or its size in one dimension."""
        return self._whole if dim is None else self._whole[dim]

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointTensor:
        """Return one with memory of its own, which ``load_state_dict()`` of the handle takes as well."""
        copied = memo[id(self)] = CheckpointTensor(self._whole, self.begin, self.part.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return CheckpointTensor, (tuple(self._whole), self.begin, self.part.clone())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.begin + self.part.numel()
        return f"CheckpointTensor(shape={tuple(self._whole)}, elements {self.begin} to {end} here)"

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one, _ in self._blocks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset is None:
            raise ValueError(f"{index.fqn}: got a part without its offset; expected one of {self!r}")
        return next(view for one, view in self._blocks if one.offsets == tuple(index.offset))


# So that torch.load(), which makes nothing else by default, makes them.
torch.serialization.add_safe_globals([CheckpointTensor])
