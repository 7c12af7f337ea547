"""Compressed communication under the names and with the signatures that DeepSpeed has or had for it.

``comm_orchestrator.deepspeed.replace_comm()`` puts it into DeepSpeed's modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives import get_rank, get_world_group, get_world_size, reduce_scatter_coalesced
from comm_collectives.one_bit_adam import compressed_allreduce
from comm_collectives.zero_plus_plus import all_to_all_quant_reduce, dequantize_weights, quantize_weights

__all__ = [
    "AMENDED",
    "COMPRESSED",
    "ON_OTHER_DEVICES",
    "CompressedBackend",
    "HcclBackend",
    "MpiBackend",
    "NcclBackend",
    "WeightQuantizer",
    "all_to_all_quant_reduce",
]


class CompressedBackend:
    """The compressed all_reduce of DeepSpeed's 1-bit optimizers, on the backend of this API and on any device.

    Args:
        mpu: an object whose ``get_data_parallel_group()`` is the group; None for the world group.

    Attributes:
        world_group: the group.
        rank, size: this rank's in it, and its number of ranks.
    """

    def __init__(self, mpu: Any = None) -> None:
        self.world_group: ProcessGroup = get_world_group() if mpu is None else mpu.get_data_parallel_group()
        self.rank, self.size = get_rank(self.world_group), get_world_size(self.world_group)

    def compressed_allreduce(
        self, buffer_m: torch.Tensor, worker_error: torch.Tensor, server_error: torch.Tensor, local_rank: Any = None
    ) -> torch.Tensor:
        """Average ``buffer_m``, as :func:`comm_collectives.one_bit_adam.compressed_allreduce`.

        Args:
            buffer_m: its ``tensor``; overwritten and returned.
            worker_error, server_error: as there; overwritten.
            local_rank: of no effect: the device is that of the tensors.
        """
        return compressed_allreduce(buffer_m, worker_error, server_error, self.world_group)


class NcclBackend(CompressedBackend):
    """:class:`CompressedBackend` by the name for ``"comm_backend_name": "nccl"``, DeepSpeed's default."""


class HcclBackend(CompressedBackend):
    """:class:`CompressedBackend` by the name for ``"comm_backend_name": "hccl"``."""


class MpiBackend(CompressedBackend):
    """:class:`CompressedBackend` by the name for ``"comm_backend_name": "mpi"``.

    Args:
        cuda_aware: of no effect.
    """

    def __init__(self, cuda_aware: bool = False) -> None:
        super().__init__()


class WeightQuantizer:
    """``CUDAQuantizer`` of ZeRO++ on any device: weights as int8 in groups, as ZeRO-3 gathers them."""

    def quantize(self, param: torch.Tensor, groups: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 elements and float32 scales, as :func:`comm_collectives.zero_plus_plus.quantize_weights`."""
        return quantize_weights(param, groups)

    def dequantize(
        self, quantized_param: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the weights, as :func:`comm_collectives.zero_plus_plus.dequantize_weights`."""
        return dequantize_weights(quantized_param, scale, dtype)


#: modules of the 1-bit optimizers that are ours from then on, where the release has them, and what each one holds
COMPRESSED: Mapping[str, type] = {
    "deepspeed.runtime.comm.compressed": CompressedBackend,
    "deepspeed.runtime.comm.hccl": HcclBackend,
    "deepspeed.runtime.comm.mpi": MpiBackend,
    "deepspeed.runtime.comm.nccl": NcclBackend,
}
#: modules of ZeRO that stay DeepSpeed's own but for these names
AMENDED: Mapping[str, Mapping[str, Any]] = {
    "deepspeed.runtime.comm.coalesced_collectives": {
        "all_to_all_quant_reduce": all_to_all_quant_reduce,
        "reduce_scatter_coalesced": reduce_scatter_coalesced,
    },
    "deepspeed.runtime.zero.partition_parameters": {"CUDAQuantizer": WeightQuantizer},
}
#: of these names, those that stay on CUDA, for which DeepSpeed has faster kernels
ON_OTHER_DEVICES = ("CUDAQuantizer",)
