"""The table: one row for each public operation."""

from __future__ import annotations

from comm_utils.operations import patterns
from comm_utils.operations.types import Argument, Direction, Form, OperationSpec, Pattern, Role

__all__ = ["PRIMITIVES", "ROWS"]

_IN, _OUT, _IN_OUT = Direction.INPUT, Direction.OUTPUT, Direction.IN_OUT
_FLAT, _PER_RANK, _SEVERAL = Form.FLAT, Form.PER_RANK, Form.SEVERAL


def _tensor(
    name: str,
    direction: Direction,
    form: Form = Form.SINGLE,
    aliases: tuple[str, ...] = (),
    at_root: bool = False,
) -> Argument:
    return Argument(name, Role.TENSOR, direction, form, aliases, at_root)


_TENSOR = _tensor("tensor", _IN_OUT)
_OP = Argument("op", Role.OP)
_SRC, _GROUP_SRC = Argument("src", Role.ROOT), Argument("group_src", Role.GROUP_ROOT)
_DST, _GROUP_DST = Argument("dst", Role.ROOT), Argument("group_dst", Role.GROUP_ROOT)
_TAG = Argument("tag", Role.TAG)
_GROUP = Argument("group", Role.GROUP)
_ASYNC = Argument("async_op", Role.ASYNC_OP)
_TIMEOUT = Argument("timeout", Role.TIMEOUT)
_COMPRESSION = Argument("compression", Role.COMPRESSION)
_USUAL = (_GROUP, _ASYNC)


def _option(name: str) -> Argument:
    return Argument(name, Role.OPTION)


def _objects(name: str, direction: Direction, form: Form = Form.SINGLE, at_root: bool = False) -> Argument:
    return Argument(name, Role.OBJECT, direction, form, (), at_root)


_PICKLE = (_option("allow_pickle"), _TIMEOUT)

_REDUCING = (
    OperationSpec(
        "all_reduce",
        patterns.ALL_REDUCE,
        (_TENSOR, _OP, *_USUAL, _TIMEOUT, _COMPRESSION),
        primitive=True,
        benchmarked=True,
        native_code=0,
    ),
    OperationSpec(
        "inference_all_reduce",
        patterns.ALL_REDUCE,
        (_TENSOR, _OP, *_USUAL, _TIMEOUT, _COMPRESSION),
        measured_as="all_reduce",
        travels_as=("all_reduce",),
    ),
    OperationSpec(
        "all_reduce_coalesced",
        patterns.ALL_REDUCE,
        (_tensor("tensors", _IN_OUT, _SEVERAL), _OP, *_USUAL, _TIMEOUT),
        measured_as="all_reduce",
        travels_as=("all_reduce",),
    ),
    OperationSpec(
        "reduce",
        patterns.REDUCE,
        (_TENSOR, _DST, _OP, *_USUAL, _GROUP_DST, _TIMEOUT),
        primitive=True,
        benchmarked=True,
        native_code=1,
    ),
)

_BROADCAST = (
    OperationSpec(
        "broadcast",
        patterns.BROADCAST,
        (_TENSOR, _SRC, *_USUAL, _GROUP_SRC, _TIMEOUT),
        primitive=True,
        benchmarked=True,
        native_code=2,
    ),
)

_ALL_GATHER = (
    OperationSpec(
        "all_gather_into_tensor",
        patterns.ALL_GATHER,
        (
            _tensor("output_tensor", _OUT, _FLAT, ("output",)),
            _tensor("input_tensor", _IN, aliases=("input", "tensor")),
            *_USUAL,
            _TIMEOUT,
            _COMPRESSION,
        ),
        torch_names=("all_gather_single", "all_gather_into_tensor"),
        deepspeed_names=("allgather_fn",),
        travels_as=("all_gather_into_tensor", "all_gather"),
        primitive=True,
        benchmarked=True,
        overlapping=True,
        native_code=3,
    ),
    OperationSpec(
        "all_gather",
        patterns.ALL_GATHER,
        (_tensor("tensor_list", _OUT, _PER_RANK), _tensor("tensor", _IN), *_USUAL, _TIMEOUT, _COMPRESSION),
        measured_as="all_gather_into_tensor",
        travels_as=("all_gather", "all_gather_into_tensor"),
        primitive=True,
    ),
    OperationSpec(
        "all_gather_coalesced",
        patterns.ALL_GATHER,
        (
            _tensor("output_tensors", _OUT, _SEVERAL, ("outputs", "output_tensor_lists")),
            _tensor("input_tensors", _IN, _SEVERAL, ("inputs", "input_tensor_list")),
            *_USUAL,
            _TIMEOUT,
        ),
        measured_as="all_gather_into_tensor",
        travels_as=("all_gather", "all_gather_into_tensor"),
    ),
)

_REDUCE_SCATTER = (
    OperationSpec(
        "reduce_scatter_tensor",
        patterns.REDUCE_SCATTER,
        (
            _tensor("output", _OUT, aliases=("output_tensor",)),
            _tensor("input", _IN, _FLAT, ("input_tensor", "tensor")),
            _OP,
            *_USUAL,
            _TIMEOUT,
            _COMPRESSION,
        ),
        torch_names=("reduce_scatter_single", "reduce_scatter_tensor"),
        deepspeed_names=("reduce_scatter_fn",),
        travels_as=("reduce_scatter_tensor", "all_to_all_single"),
        primitive=True,
        benchmarked=True,
        overlapping=True,
        native_code=4,
    ),
    OperationSpec(
        "reduce_scatter",
        patterns.REDUCE_SCATTER,
        (
            _tensor("output", _OUT, aliases=("output_tensor",)),
            _tensor("input_list", _IN, _PER_RANK, ("input", "input_tensor")),
            _OP,
            *_USUAL,
            _TIMEOUT,
            _COMPRESSION,
        ),
        measured_as="reduce_scatter_tensor",
        travels_as=("reduce_scatter_tensor", "all_to_all_single"),
    ),
    OperationSpec(
        "reduce_scatter_coalesced",
        patterns.REDUCE_SCATTER,
        (_tensor("tensors", _IN, _SEVERAL), _GROUP, _OP, _ASYNC, _TIMEOUT),
        measured_as="reduce_scatter_tensor",
        travels_as=("reduce_scatter_tensor", "all_to_all_single"),
    ),
)

_ALL_TO_ALL = (
    OperationSpec(
        "all_to_all_single",
        patterns.ALL_TO_ALL,
        (
            _tensor("output", _OUT, aliases=("output_tensor",)),
            _tensor("input", _IN, aliases=("input_tensor", "tensor")),
            Argument("output_split_sizes", Role.OUTPUT_SPLITS),
            Argument("input_split_sizes", Role.INPUT_SPLITS),
            *_USUAL,
            _TIMEOUT,
            _COMPRESSION,
        ),
        primitive=True,
        benchmarked=True,
        nccl_tests_name="alltoall",
        native_code=5,
    ),
    OperationSpec(
        "all_to_all",
        patterns.ALL_TO_ALL,
        (
            _tensor("output_tensor_list", _OUT, _PER_RANK, ("output_list",)),
            _tensor("input_tensor_list", _IN, _PER_RANK, ("input_list",)),
            *_USUAL,
            _TIMEOUT,
            _COMPRESSION,
        ),
        measured_as="all_to_all_single",
        travels_as=("all_to_all_single",),
    ),
)

_PARTS_OF_ROOT = (
    OperationSpec(
        "gather",
        patterns.GATHER,
        (
            _tensor("tensor", _IN),
            _tensor("gather_list", _OUT, _PER_RANK, at_root=True),
            _DST,
            *_USUAL,
            _GROUP_DST,
            _TIMEOUT,
        ),
        primitive=True,
        benchmarked=True,
        overlapping=True,
        native_code=9,
    ),
    OperationSpec(
        "scatter",
        patterns.SCATTER,
        (
            _tensor("tensor", _OUT),
            _tensor("scatter_list", _IN, _PER_RANK, at_root=True),
            _SRC,
            *_USUAL,
            _GROUP_SRC,
            _TIMEOUT,
        ),
        primitive=True,
        benchmarked=True,
        overlapping=True,
        native_code=10,
    ),
)

_BARRIERS = (
    OperationSpec(
        "barrier",
        patterns.BARRIER,
        (*_USUAL, _option("device_ids"), _TIMEOUT),
        primitive=True,
        benchmarked=True,
        native_code=11,
    ),
    OperationSpec(
        "monitored_barrier",
        patterns.BARRIER,
        (_GROUP, _TIMEOUT, _option("wait_all_ranks")),
        measured_as="barrier",
        recorded=False,
    ),
)

_MESSAGES = (
    OperationSpec(
        "send",
        patterns.SEND,
        (_tensor("tensor", _IN), _DST, _GROUP, _TAG, _GROUP_DST, _ASYNC, _TIMEOUT),
        primitive=True,
        benchmarked=True,
        nccl_tests_name="sendrecv",
        native_code=7,
    ),
    OperationSpec(
        "recv",
        patterns.RECV,
        (_tensor("tensor", _OUT), _SRC, _GROUP, _TAG, _GROUP_SRC, _ASYNC, _TIMEOUT),
        measured_as="send",
        primitive=True,
        native_code=8,
    ),
    OperationSpec(
        "isend",
        patterns.SEND,
        (_tensor("tensor", _IN), _DST, _GROUP, _TAG, _GROUP_DST, _TIMEOUT),
        measured_as="send",
    ),
    OperationSpec(
        "irecv",
        patterns.RECV,
        (_tensor("tensor", _OUT), _SRC, _GROUP, _TAG, _GROUP_SRC, _TIMEOUT),
        measured_as="send",
    ),
)


def _of_objects(name: str, pattern: Pattern, *arguments: Argument) -> OperationSpec:
    """Return the row of a call with Python objects, which are recorded as the operations that carry them."""
    return OperationSpec(
        name, pattern, (*arguments, *_PICKLE), recorded=False, function=f"comm_collectives.objects:{name}"
    )


_DEVICE, _BATCH = _option("device"), _option("use_batch")
_LIST = _objects("object_list", _IN_OUT, _SEVERAL)

_OBJECTS = (
    _of_objects(
        "all_gather_object",
        patterns.ALL_GATHER,
        _objects("object_list", _OUT, _PER_RANK),
        _objects("obj", _IN),
        _GROUP,
    ),
    _of_objects("allgather_object", patterns.ALL_GATHER, _objects("obj", _IN), _GROUP),
    _of_objects("broadcast_object", patterns.BROADCAST, _objects("obj", _IN), _SRC, _GROUP),
    _of_objects("broadcast_object_list", patterns.BROADCAST, _LIST, _SRC, _GROUP, _DEVICE, _GROUP_SRC),
    _of_objects(
        "gather_object",
        patterns.GATHER,
        _objects("obj", _IN),
        _objects("object_gather_list", _OUT, _PER_RANK, at_root=True),
        _DST,
        _GROUP,
        _GROUP_DST,
    ),
    _of_objects("reduce_object", patterns.REDUCE, _objects("obj", _IN), _DST, _OP, _GROUP),
    _of_objects(
        "scatter_object_list",
        patterns.SCATTER,
        _objects("scatter_object_output_list", _OUT, _SEVERAL),
        _objects("scatter_object_input_list", _IN, _PER_RANK, at_root=True),
        _SRC,
        _GROUP,
        _GROUP_SRC,
    ),
    _of_objects("send_object_list", patterns.SEND, _LIST, _DST, _GROUP, _DEVICE, _GROUP_DST, _BATCH),
    _of_objects("recv_object_list", patterns.RECV, _LIST, _SRC, _GROUP, _DEVICE, _GROUP_SRC, _BATCH),
)

#: In the order in which benchmarks measure them; a list of names is in this order.
ROWS: tuple[OperationSpec, ...] = (
    *_REDUCING,
    *_BROADCAST,
    *_ALL_GATHER,
    *_REDUCE_SCATTER,
    *_ALL_TO_ALL,
    *_PARTS_OF_ROOT,
    *_BARRIERS,
    *_MESSAGES,
    *_OBJECTS,
)

#: Names of the operations that every backend of this project serves; the others are composed of these.
PRIMITIVES = frozenset(row.name for row in ROWS if row.primitive)
