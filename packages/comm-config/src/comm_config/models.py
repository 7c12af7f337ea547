"""The configuration and its sections. Every field has a default, so that a part of a document is valid too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, WithJsonSchema, model_validator

from comm_config.compression import CompressionSetting, DataType, compression_options
from comm_config.fields import Positive, Seconds, Section, Text, lower_case, not_a_flag
from comm_config.network import NetworkConfig

__all__ = [
    "ChecksConfig",
    "CommConfig",
    "CommsLoggerConfig",
    "FlightRecorderConfig",
    "HierarchicalConfig",
    "LaunchConfig",
    "ObjectsConfig",
    "ProcessGroupConfig",
    "ReductionsConfig",
    "TimeoutsConfig",
    "TrainingConfig",
    "without_auto",
]

_NAME = "[a-z][a-z0-9_]*"
_BACKEND = f"^({_NAME}|{_NAME}:{_NAME}(,{_NAME}:{_NAME})*)$"
_URL = "^[a-z][a-z0-9+.-]*://"


def without_auto(document: object, keys: Mapping[str, Any]) -> object:
    """Return ``document`` without those of ``keys`` whose value is ``"auto"``.

    Hugging Face writes it into DeepSpeed's documents for "to be filled in later".
    """
    if not isinstance(document, Mapping):
        return document
    return {key: value for key, value in document.items() if not (key in keys and value == "auto")}


def _backend_name(value: str) -> str:
    name = value.replace(" ", "").lower()
    if not re.fullmatch(_BACKEND, name):
        raise ValueError("expected a backend such as 'gloo', or one for each device such as 'cpu:gloo,cuda:nccl'")
    return name


def _auto_is_none(value: object) -> object:
    return None if lower_case(value) == "auto" else value


def _init_method(value: str) -> str:
    if not re.search(_URL, value):
        raise ValueError("expected a URL such as 'env://', 'tcp://host:29500' or 'file:///shared/path'")
    return value


_Backend = Annotated[str, AfterValidator(_backend_name), WithJsonSchema({"type": "string", "pattern": _BACKEND})]


def _style(value: object) -> object:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and len(value) == 2:
        name, parts = value
        if isinstance(name, str) and type(parts) is int and parts > 0:
            return name, parts
    raise ValueError("expected a style such as 'column', or one with a number of parts such as ['column', 3]")


_InitMethod = Annotated[Text, AfterValidator(_init_method), WithJsonSchema({"type": "string", "pattern": _URL})]
_Style = Annotated[str | tuple[str, Positive], BeforeValidator(_style)]


class ProcessGroupConfig(Section):
    """The default process group."""

    backend: Annotated[_Backend | None, BeforeValidator(_auto_is_none)] = Field(
        default=None,
        description="Backend, such as 'gloo', 'nccl', 'ccl' or 'cpu:gloo,cuda:nccl'; null or 'auto' chooses by device.",
    )
    init_method: _InitMethod | None = Field(
        default=None,
        description="Where ranks meet: 'env://', 'tcp://host:port', 'file:///path', or 'file://' for a private file of "
        "a job on one host; null for 'env://'.",
    )


class TimeoutsConfig(Section):
    """Timeouts, in seconds."""

    init_s: Seconds | None = Field(
        default=None, description="Start-up: how long ranks wait for each other; null: `collective_s`, else 30 minutes."
    )
    collective_s: Seconds | None = Field(
        default=None,
        description="A collective in any group, also groups made later; null for 30 minutes, 10 on `nccl` alone.",
    )


class LaunchConfig(Section):
    """Settings for rank, world size and master address that no launcher provides."""

    auto_mpi_discovery: bool = Field(
        default=True, description="Ask MPI, through mpi4py, what the variables of an MPI launcher leave open."
    )
    master_addr: Text | None = Field(
        default=None, description="Host name or address of rank 0; null for what the launcher says."
    )
    master_port: Annotated[int, Field(ge=0, le=65535), not_a_flag] = Field(
        default=29500, description="Port that rank 0 listens on; 0, a free one, is for a single process."
    )


class CommsLoggerConfig(Section):
    """The log of collectives, with DeepSpeed's keys. Off unless `enabled`, also where the section is present."""

    enabled: bool = Field(default=False, description="Record every collective.")
    verbose: bool = Field(default=False, description="Log a line for each call.")
    prof_all: bool = Field(default=True, description="Record all operations; off, those in prof_ops only.")
    debug: bool = Field(default=False, description="Record the calling function too.")
    prof_ops: list[Text] = Field(
        default_factory=list, description="Operations to record, such as 'all_reduce', where prof_all is off."
    )
    ranges: bool = Field(default=False, description="A range around each operation for torch.profiler and NVTX.")
    trace: Text | None = Field(
        default=None, description="Folder for a trace of every rank, which turns the log on; null for none."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_auto(cls, data: Any) -> Any:
        return without_auto(data, cls.model_fields)


class ObjectsConfig(Section):
    """Python objects sent between ranks."""

    allow_pickle: bool = Field(
        default=False, description="Unpickle what other ranks send: they can then run any code in this process."
    )
    max_bytes: Annotated[int, Field(ge=1, le=2**63 - 1), not_a_flag] = Field(
        default=2**30, description="Largest encoded object that is accepted, in bytes."
    )


class HierarchicalConfig(Section):
    """Collectives of groups that span hosts, in steps within hosts and steps between them."""

    enabled: bool = Field(default=True, description="Let collectives go in such steps.")
    min_size_bytes: Annotated[int, Field(ge=0), not_a_flag] | None = Field(
        default=None, description="Size from which on they do; null for that at which they are measured to be faster."
    )


class ReductionsConfig(Section):
    """Rules for the addition of float tensors."""

    deterministic: bool = Field(
        default=False, description="Add in an order that depends on neither size, split, timing nor library."
    )
    compensated: bool = Field(
        default=False, description="Add the rounding errors of float sums back; turns `deterministic` on."
    )


class FlightRecorderConfig(Section):
    """The flight recorder, which keeps each rank's last calls in a file that survives the process."""

    enabled: bool = Field(default=True, description="Record calls.")
    directory: Text | None = Field(
        default=None, description="Folder for the folders of jobs; null for `comm-flight-UID` in `/dev/shm`."
    )
    records: Annotated[int, Field(ge=16, le=2**20), not_a_flag] = Field(
        default=8192, description="Calls that each rank keeps; rounded up to a power of two."
    )
    keep: Annotated[int, Field(ge=0), not_a_flag] = Field(
        default=4, description="Folders of jobs that stay after a failure; the oldest go first."
    )
    keep_clean: bool = Field(default=False, description="Keep the files after a clean end, too.")


class ChecksConfig(Section):
    """The watch over the calls of all ranks."""

    enabled: bool = Field(default=True, description="Watch the ranks' calls in a thread.")
    mismatch: Annotated[Literal["auto", "off", "lazy", "strict"], BeforeValidator(lower_case)] = Field(
        default="auto",
        description="When calls that differ between ranks are found: never, soon after, or before data moves.",
    )
    warn_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False), not_a_flag] = Field(
        default=30.0, description="Seconds in one call after which missing ranks are named in a warning; 0 for never."
    )
    signals: bool = Field(default=True, description="Ctrl-C and SIGTERM print what the ranks do.")


class TrainingConfig(Section):
    """Settings of the hooks of training, with DeepSpeed's keys; without effect where none are registered."""

    prescale_gradients: bool = Field(
        default=False, description="Divide gradients by the group size before they are added, not after."
    )
    gradient_predivide_factor: Annotated[float, Field(gt=0, allow_inf_nan=False), not_a_flag] = Field(
        default=1.0, description="Divide gradients by it before they are added, and the rest after."
    )
    sparse_gradients: bool = Field(
        default=True, description="Exchange the gradients of sparse embeddings by rows; off, they become dense."
    )
    stage: Annotated[int, Field(ge=0, le=3), not_a_flag] = Field(
        default=0,
        description="Stage of sharding: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.",
    )
    reduce_bucket_size: Positive | None = Field(
        default=None, description="Elements of 4 bytes in a bucket of gradients; null for 25 MiB."
    )
    allgather_bucket_size: Positive | None = Field(
        default=None, description="The same of parameters that are gathered; read where `reduce_bucket_size` is null."
    )
    overlap_comm: bool = Field(default=True, description="Reduce gradients while the backward runs.")
    model_parallel_plan: dict[str, _Style] = Field(
        default_factory=dict, description="Styles of tensor-parallel layers by pattern of module names."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_auto(cls, data: Any) -> Any:
        return without_auto(data, cls.model_fields)


class CommConfig(Section):
    """Settings of distributed communication."""

    process_group: ProcessGroupConfig = Field(
        default_factory=ProcessGroupConfig, description="The default process group."
    )
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig, description="How long to wait, in seconds.")
    launch: LaunchConfig = Field(
        default_factory=LaunchConfig, description="How rank, world size and the master are found."
    )
    comms_logger: CommsLoggerConfig = Field(
        default_factory=CommsLoggerConfig, description="The log of collectives, with DeepSpeed's keys."
    )
    network: NetworkConfig = Field(
        default_factory=NetworkConfig, description="Interfaces, and the variables of NCCL, gloo and oneCCL."
    )
    objects: ObjectsConfig = Field(default_factory=ObjectsConfig, description="Python objects sent between ranks.")
    hierarchical: HierarchicalConfig = Field(
        default_factory=HierarchicalConfig, description="Collectives in steps within hosts and between them."
    )
    reductions: ReductionsConfig = Field(
        default_factory=ReductionsConfig, description="Rules for the addition of float tensors."
    )
    flight_recorder: FlightRecorderConfig = Field(
        default_factory=FlightRecorderConfig, description="The last calls of each rank, in a file."
    )
    checks: ChecksConfig = Field(default_factory=ChecksConfig, description="The watch over the calls of all ranks.")
    training: TrainingConfig = Field(
        default_factory=TrainingConfig, description="Settings of the hooks of training, with DeepSpeed's keys."
    )
    communication_data_type: DataType | None = Field(
        default=None,
        description="Data type in which float tensors travel; 'fp32' or null for their own.",
    )
    compress_communication: CompressionSetting = Field(
        default=False, description="Compress what float tensors send; true is `communication_data_type`, else fp16."
    )

    seq_parallel_communication_data_type: DataType | None = Field(
        default=None,
        description="Data type in which sequence-parallel ranks send float tensors; 'fp32' or null for their own.",
    )

    # Where each setting was read, by dotted key; None in a configuration that load_config did not make.
    _sources: dict[str, str] | None = PrivateAttr(default=None)

    def compression(self) -> dict[str, Any] | None:
        """Return the arguments of `comm_collectives.Compression` that these settings stand for; None for none."""
        return compression_options(self.communication_data_type, self.compress_communication)

    def seq_parallel_compression(self) -> dict[str, Any] | None:
        """Return the same for calls that ask for the compression "seq_parallel"."""
        return compression_options(self.seq_parallel_communication_data_type, False)

    @model_validator(mode="before")
    @classmethod
    def _without_auto(cls, data: Any) -> Any:
        return without_auto(data, {key: None for key in cls.model_fields if "compress" in key or "_data_type" in key})

    def __eq__(self, other: object) -> bool:
        """Return whether all settings are equal, wherever they were read."""
        if not isinstance(other, CommConfig):
            return NotImplemented
        return all(getattr(self, key) == getattr(other, key) for key in type(self).model_fields)

    # Lists and dicts inside make it as unhashable as they are.
    __hash__ = None  # type: ignore[assignment]
