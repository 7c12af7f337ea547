"""Rows that are special to a call: sizes, dtypes, lists and splits that do not fit to one another.

A new row is an entry of :data:`SPECIAL`; it is tried on the first call and on the fast path, on every backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as c10d
from wrong_calls.kinds import TYPE, VALUE, Row
from wrong_calls.right import ones, tensors

import comm_orchestrator as dist

__all__ = ["SPECIAL"]


def overlapping(n: int = 4) -> list[torch.Tensor]:
    """Two tensors that share all but one element."""
    memory = ones(n + 1)
    return [memory[:n], memory[1:]]


def _itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def _deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


def _resized(size_bytes: int) -> torch.Tensor:
    tensor = ones()
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


#: Objects that cannot be sent.
OBJECT_VALUES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "object-in-itself": (_itself, VALUE, ("obj[0]: is obj again", "contains itself")),
    "deep-object": (_deep, VALUE, ("nested more than 100 deep",)),
    "function": (lambda: len, TYPE, ("obj: got a value of type builtins.builtin_function_or_method",)),
    "generator": (lambda: (one for one in ()), TYPE, ("obj: got a value of type builtins.generator",)),
    "tensor-on-meta": (lambda: ones().to("meta"), TYPE, ("obj: got a tensor on the device 'meta'", "no elements")),
    "tensor-of-empty-storage": (
        lambda: _resized(0),
        VALUE,
        ("obj: got a tensor whose storage has 0 bytes", "needs 16"),
    ),
    "tensor-of-short-storage": (lambda: _resized(12), VALUE, ("obj: got a tensor whose storage has 12 bytes",)),
    "tensor-in-a-list-of-short-storage": (
        lambda: {"weights": [ones(), _resized(4)]},
        VALUE,
        ("obj['weights'][1]: got a tensor whose storage has 4 bytes",),
    ),
    "sparse-tensor": (lambda: ones().to_sparse(), TYPE, ("obj: got a sparse tensor", "to_dense()")),
    "nested-tensor": (lambda: torch.nested.nested_tensor([ones()]), TYPE, ("obj: got a nested tensor", "unbind()")),
    "uninitialized-parameter": (
        torch.nn.UninitializedParameter,
        TYPE,
        ("obj: got a", "UninitializedParameter"),
    ),
    "tensor-larger-than-allowed": (
        lambda: ones(1).expand(1 << 40),
        VALUE,
        ("obj: the encoded object is larger than 1073741824 bytes", "objects.max_bytes"),
    ),
    "array-of-objects": (lambda: np.array([object()]), TYPE, ("obj: got a numpy array of Python objects",)),
    "process-group": (dist.get_world_group, TYPE, ("obj: got a value of type", "ProcessGroup")),
}

NOT_DIVISIBLE = ("does not divide by the world size of 2",)

SPECIAL: dict[str, Row] = {
    "all_gather_coalesced-same-output-twice": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8)] * 2},
        VALUE,
        ("output_tensors: got tensors that share memory", "one memory for each"),
    ),
    # memory
    "all_gather-same-output-twice": Row(
        "all_gather",
        lambda r, W: {"tensor_list": [ones()] * 2},
        VALUE,
        ("tensor_list: got tensors that share memory", "one memory for each"),
    ),
    "all_gather-outputs-that-overlap": Row(
        "all_gather",
        lambda r, W: {"tensor_list": overlapping()},
        VALUE,
        ("tensor_list: got tensors that share memory",),
    ),
    "all_gather-outputs-of-one-element": Row(
        "all_gather",
        lambda r, W: {"tensor_list": [ones(1).expand(4), ones()]},
        VALUE,
        ("tensor_list[0]: got a tensor of shape (4,) with strides (0,)",),
    ),
    "gather-outputs-that-overlap": Row(
        "gather",
        lambda r, W: {"gather_list": overlapping()},
        VALUE,
        ("gather_list: got tensors that share memory",),
        (0,),
    ),
    "all_to_all-outputs-that-overlap": Row(
        "all_to_all",
        lambda r, W: {"output_tensor_list": overlapping()},
        VALUE,
        ("output_tensor_list: got tensors that share memory",),
    ),
    "all_gather_coalesced-outputs-that-overlap": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": overlapping(8)},
        VALUE,
        ("output_tensors: got tensors that share memory",),
    ),
    "all_gather_coalesced-parts-that-overlap": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8), overlapping()]},
        VALUE,
        ("output_tensors[1]: got tensors that share memory",),
    ),
    "all_reduce_coalesced-two-dtypes-in-one-memory": Row(
        "all_reduce_coalesced",
        lambda r, W: {"tensors": [(one := ones()), one.view(torch.int32)]},
        VALUE,
        ("tensors: got tensors of different dtypes that share memory",),
    ),
    "all_reduce_coalesced-bytes-within-a-tensor": Row(
        "all_reduce_coalesced",
        lambda r, W: {"tensors": [(one := ones()), one.view(torch.uint8)[6:9]]},
        VALUE,
        ("tensors: got tensors of different dtypes that share memory",),
    ),
    # sizes that do not divide by the world size
    "reduce_scatter-odd-input": Row(
        "reduce_scatter",
        lambda r, W: {"input_list": ones(9)},
        VALUE,
        ("input: got 9 elements (shape (9,))", *NOT_DIVISIBLE, "list of 2 tensors"),
    ),
    "reduce_scatter_tensor-odd-input": Row(
        "reduce_scatter_tensor", lambda r, W: {"input": ones(9)}, VALUE, ("input: got 9 elements", *NOT_DIVISIBLE)
    ),
    "all_to_all_single-odd-input": Row(
        "all_to_all_single",
        lambda r, W: {"input": ones(9)},
        VALUE,
        ("input: got 9 rows", *NOT_DIVISIBLE, "input_split_sizes"),
    ),
    "all_to_all_single-odd-output": Row(
        "all_to_all_single",
        lambda r, W: {"output": ones(9)},
        VALUE,
        ("output: got 9 rows", *NOT_DIVISIBLE, "output_split_sizes"),
    ),
    # output of the wrong size
    "all_gather-small-list": Row(
        "all_gather",
        lambda r, W: {"tensor_list": tensors(W, 3)},
        VALUE,
        ("tensor_list[", "got 3 elements (shape (3,))", "expected 4"),
    ),
    "all_gather_into_tensor-small-output": Row(
        "all_gather_into_tensor",
        lambda r, W: {"output_tensor": ones(7)},
        VALUE,
        ("output_tensor: got 7 elements (shape (7,))", "expected 8", "4 elements of input_tensor from each of 2 ranks"),
    ),
    "gather-small-list": Row(
        "gather",
        lambda r, W: {"gather_list": [ones(), ones(3)]},
        VALUE,
        ("gather_list[1]: got 3 elements", "expected 4"),
        (0,),
    ),
    "scatter-large-list": Row(
        "scatter",
        lambda r, W: {"scatter_list": [ones(), ones(5)]},
        VALUE,
        ("scatter_list[1]: got 5 elements", "expected 4"),
        (0,),
    ),
    "reduce_scatter-large-output": Row(
        "reduce_scatter", lambda r, W: {"output": ones(5)}, VALUE, ("input_list[", "got 4 elements", "expected 5")
    ),
    "reduce_scatter-one-tensor-large-output": Row(
        "reduce_scatter",
        lambda r, W: {"output": ones(5), "input_list": ones(8)},
        VALUE,
        ("output: got 5 elements", "expected 4", "world size of 2"),
    ),
    "reduce_scatter_tensor-small-output": Row(
        "reduce_scatter_tensor", lambda r, W: {"output": ones(2)}, VALUE, ("output: got 2 elements", "expected 4")
    ),
    "all_to_all-own-part": Row(
        "all_to_all",
        lambda r, W: {"output_tensor_list": tensors(W, 3)},
        VALUE,
        ("output_tensor_list[", "got 3 elements", "expected 4", "this rank"),
    ),
    "all_to_all_single-trailing-dimensions": Row(
        "all_to_all_single",
        lambda r, W: {"output": torch.ones(4, 2), "input": torch.ones(4, 3)},
        VALUE,
        ("output: got shape (4, 2)", "expected (rows, 3)", "(4, 3)"),
    ),
    "all_gather_coalesced-small-output": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8), ones(7)]},
        VALUE,
        ("output_tensors[1]: got 7 elements", "expected 8"),
    ),
    "all_gather_coalesced-small-part": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8), [ones(), ones(3)]]},
        VALUE,
        ("output_tensors[1][1]: got 3 elements", "expected 4"),
    ),
    # output of the wrong dtype
    "all_gather-dtype": Row(
        "all_gather",
        lambda r, W: {"tensor_list": tensors(W, 4, torch.int32)},
        VALUE,
        ("tensor_list[0]: got dtype torch.int32", "expected torch.float32"),
    ),
    "all_gather_into_tensor-dtype": Row(
        "all_gather_into_tensor",
        lambda r, W: {"output_tensor": ones(8, torch.float64)},
        VALUE,
        ("output_tensor: got dtype torch.float64", "expected torch.float32"),
    ),
    "gather-dtype": Row(
        "gather",
        lambda r, W: {"gather_list": tensors(W, 4, torch.float16)},
        VALUE,
        ("gather_list[0]: got dtype torch.float16", "expected torch.float32"),
        (0,),
    ),
    "scatter-dtype": Row(
        "scatter",
        lambda r, W: {"scatter_list": tensors(W, 4, torch.float16)},
        VALUE,
        ("scatter_list[0]: got dtype torch.float16", "expected torch.float32"),
        (0,),
    ),
    "reduce_scatter-dtype": Row(
        "reduce_scatter",
        lambda r, W: {"input_list": [ones(), ones(4, torch.int64)]},
        VALUE,
        ("input_list[1]: got dtype torch.int64", "expected torch.float32"),
    ),
    "reduce_scatter-one-tensor-dtype": Row(
        "reduce_scatter",
        lambda r, W: {"input_list": ones(8, torch.int64)},
        VALUE,
        ("got dtype torch.float32", "expected torch.int64"),
    ),
    "reduce_scatter_tensor-dtype": Row(
        "reduce_scatter_tensor",
        lambda r, W: {"output": ones(4, torch.int64)},
        VALUE,
        ("output: got dtype torch.int64", "expected torch.float32"),
    ),
    "all_to_all-output-dtype": Row(
        "all_to_all",
        lambda r, W: {"output_tensor_list": tensors(W, 4, torch.int8)},
        VALUE,
        ("output_tensor_list[0]: got dtype torch.int8", "expected torch.float32"),
    ),
    "all_to_all-input-dtype": Row(
        "all_to_all",
        lambda r, W: {"input_tensor_list": [ones(), ones(4, torch.int8)]},
        VALUE,
        ("input_tensor_list[1]: got dtype torch.int8", "expected torch.float32"),
    ),
    "all_to_all_single-dtype": Row(
        "all_to_all_single",
        lambda r, W: {"output": ones(8, torch.bool)},
        VALUE,
        ("output: got dtype torch.bool", "expected torch.float32"),
    ),
    "all_gather_coalesced-dtype": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8), ones(8, torch.int64)]},
        VALUE,
        ("output_tensors[1]: got dtype torch.int64", "expected torch.float32"),
    ),
    # lists of the wrong length, or no lists
    "all_gather-short-list": Row(
        "all_gather",
        lambda r, W: {"tensor_list": tensors(1)},
        VALUE,
        ("tensor_list: got a list of 1", "expected 2 tensors", "one for each rank"),
    ),
    "all_gather-two-tensors": Row(
        "all_gather", lambda r, W: {"tensor_list": ones(8)}, TYPE, ("tensor_list: got", "expected a list of 2 tensors")
    ),
    "gather-long-list": Row(
        "gather",
        lambda r, W: {"gather_list": tensors(3)},
        VALUE,
        ("gather_list: got a list of 3", "expected 2 tensors"),
        (0,),
    ),
    "gather-no-list": Row(
        "gather",
        lambda r, W: {"gather_list": None},
        TYPE,
        ("gather_list: got None", "expected a list of 2 tensors"),
        (0,),
    ),
    "gather-list-elsewhere": Row(
        "gather", lambda r, W: {"gather_list": tensors(W)}, VALUE, ("gather_list: got a list", "not dst"), (1,)
    ),
    "gather-tensor-elsewhere": Row(
        "gather", lambda r, W: {"gather_list": ones(8)}, TYPE, ("gather_list: got a tensor", "expected a list"), (1,)
    ),
    "scatter-short-list": Row(
        "scatter",
        lambda r, W: {"scatter_list": tensors(1)},
        VALUE,
        ("scatter_list: got a list of 1", "expected 2 tensors"),
        (0,),
    ),
    "scatter-no-list": Row(
        "scatter",
        lambda r, W: {"scatter_list": None},
        TYPE,
        ("scatter_list: got None", "expected a list of 2 tensors"),
        (0,),
    ),
    "scatter-list-elsewhere": Row(
        "scatter", lambda r, W: {"scatter_list": tensors(W)}, VALUE, ("scatter_list: got a list", "not src"), (1,)
    ),
    "scatter-tensor-elsewhere": Row(
        "scatter", lambda r, W: {"scatter_list": ones(8)}, TYPE, ("scatter_list: got a tensor", "expected a list"), (1,)
    ),
    "reduce_scatter-long-list": Row(
        "reduce_scatter",
        lambda r, W: {"input_list": tensors(3)},
        VALUE,
        ("input_list: got a list of 3", "expected 2 tensors"),
    ),
    "reduce_scatter-no-list": Row(
        "reduce_scatter", lambda r, W: {"input_list": None}, TYPE, ("input_list: got None", "expected a list of 2")
    ),
    "all_to_all-short-input": Row(
        "all_to_all",
        lambda r, W: {"input_tensor_list": tensors(1)},
        VALUE,
        ("input_tensor_list: got a list of 1", "expected 2 tensors"),
    ),
    "all_to_all-long-output": Row(
        "all_to_all",
        lambda r, W: {"output_tensor_list": tensors(3)},
        VALUE,
        ("output_tensor_list: got a list of 3", "expected 2 tensors"),
    ),
    "all_to_all-no-list": Row(
        "all_to_all", lambda r, W: {"input_tensor_list": ones(8)}, TYPE, ("input_tensor_list: got", "expected a list")
    ),
    "all_reduce_coalesced-no-list": Row(
        "all_reduce_coalesced", lambda r, W: {"tensors": ones()}, TYPE, ("tensors: got Tensor", "expected a list")
    ),
    "all_gather_coalesced-no-list": Row(
        "all_gather_coalesced", lambda r, W: {"input_tensors": ones()}, TYPE, ("input_tensors: got Tensor", "a list")
    ),
    "all_gather_coalesced-output-no-list": Row(
        "all_gather_coalesced", lambda r, W: {"output_tensors": None}, TYPE, ("output_tensors: got NoneType", "a list")
    ),
    "all_gather_coalesced-short-output": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": tensors(1, 8)},
        VALUE,
        ("output_tensors: got a list of 1", "expected 2"),
    ),
    "all_gather_coalesced-short-part": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8), tensors(1)]},
        VALUE,
        ("output_tensors[1]: got a list of 1", "expected 2 tensors"),
    ),
    "reduce_scatter_coalesced-no-list": Row(
        "reduce_scatter_coalesced", lambda r, W: {"tensors": "all"}, TYPE, ("tensors: got str", "expected a list")
    ),
    # split sizes
    "all_to_all_single-few-splits": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": [8]},
        VALUE,
        ("input_split_sizes: got 1 sizes", "expected 2"),
    ),
    "all_to_all_single-splits-that-do-not-add-up": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": [4, 3]},
        VALUE,
        ("output_split_sizes: got [4, 3]", "adds up to 7", "add up to 8"),
    ),
    "all_to_all_single-negative-split": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": [-1, 9]},
        VALUE,
        ("input_split_sizes: got [-1, 9]", "0 or more"),
    ),
    "all_to_all_single-split-of-no-integer": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": [4.0, 4.0]},
        TYPE,
        ("input_split_sizes: got 4.0 of type float", "expected an integer"),
    ),
    "all_to_all_single-splits-of-no-list": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": 4},
        TYPE,
        ("output_split_sizes: got 4 of type int", "expected a list of 2 integers"),
    ),
    "all_to_all_single-splits-as-text": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": "44"},
        TYPE,
        ("input_split_sizes: got '44' of type str", "expected a list of 2 integers"),
    ),
    "all_to_all_single-splits-as-bytes": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": b"\x04\x04"},
        TYPE,
        ("input_split_sizes: got b'\\x04\\x04' of type bytes", "expected a list of 2 integers"),
    ),
    "all_to_all_single-splits-of-a-generator": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": (4 for _ in range(W))},
        TYPE,
        ("output_split_sizes: got <generator", "expected a list of 2 integers"),
    ),
    "all_to_all_single-splits-of-a-dict": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": {0: 4, 1: 4}},
        TYPE,
        ("output_split_sizes: got {0: 4, 1: 4} of type dict", "expected a list of 2 integers"),
    ),
    "all_to_all_single-splits-of-an-array": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": np.array([4, 4])},
        TYPE,
        ("output_split_sizes: got array([4, 4]) of type ndarray", "expected a list of 2 integers"),
    ),
    "all_to_all_single-splits-in-no-dimension": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": torch.tensor(4)},
        TYPE,
        ("input_split_sizes: got tensor(4) of type Tensor", "expected a list of 2 integers"),
    ),
    "all_to_all_single-splits-in-two-dimensions": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": torch.tensor([[4, 0], [4, 0]])},
        TYPE,
        ("input_split_sizes: got tensor([4, 0]) of type Tensor", "expected an integer"),
    ),
    "all_to_all_single-splits-on-meta": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": torch.tensor([4, 4], device="meta")},
        TYPE,
        ("output_split_sizes: got tensor(...", "expected an integer"),
    ),
    "all_to_all_single-splits-of-floats": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": torch.tensor([4.0, 4.0])},
        TYPE,
        ("output_split_sizes: got tensor(4.) of type Tensor", "expected an integer"),
    ),
    "all_to_all_single-splits-of-bools": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": torch.tensor([True, True])},
        TYPE,
        ("output_split_sizes: got tensor(True) of type Tensor", "expected an integer"),
    ),
    "all_to_all_single-splits-of-none": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": [None, None]},
        TYPE,
        ("output_split_sizes: got None", "expected an integer"),
    ),
    "all_to_all_single-splits-of-lists": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": [[4], [4]]},
        TYPE,
        ("output_split_sizes: got a list of 1", "expected an integer"),
    ),
    "all_to_all_single-splits-beyond-64-bits": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": [2**70, 8 - 2**70]},
        VALUE,
        ("output_split_sizes: got [1180591620717411303424, ", "0 or more"),
    ),
    "all_to_all_single-splits-that-wrap-around": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": [2**63 + 4, 2**63 + 4]},
        VALUE,
        ("input_split_sizes: got [", "add up to 8"),
    ),
    "all_to_all_single-splits-of-nan": Row(
        "all_to_all_single",
        lambda r, W: {"input_split_sizes": [float("nan"), 8]},
        TYPE,
        ("input_split_sizes: got nan of type float", "expected an integer"),
    ),
    "barrier-devices-as-text": Row(
        "barrier", lambda r, W: {"device_ids": "0"}, TYPE, ("device_ids: got '0'", "a list of device indices")
    ),
    "barrier-device-of-no-list": Row(
        "barrier", lambda r, W: {"device_ids": 0}, TYPE, ("device_ids: got 0", "a list of device indices")
    ),
    "barrier-device-of-no-integer": Row(
        "barrier", lambda r, W: {"device_ids": [0.5]}, TYPE, ("device_ids: got 0.5 of type float", "an integer")
    ),
    "barrier-device-that-is-a-bool": Row(
        "barrier", lambda r, W: {"device_ids": [True]}, TYPE, ("device_ids: got True of type bool", "an integer")
    ),
    "barrier-negative-device": Row(
        "barrier", lambda r, W: {"device_ids": [-1]}, VALUE, ("device_ids: got [-1]", "indices of 0 to 127")
    ),
    "barrier-huge-device": Row(
        "barrier", lambda r, W: {"device_ids": [2**70]}, VALUE, (f"device_ids: got [{2**70}]", "indices of 0 to 127")
    ),
    "all_to_all_single-own-part": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": [3, 5], "input_split_sizes": [5, 3]},
        VALUE,
        ("output_split_sizes: got", "this rank", "expected the same number in both"),
    ),
    # objects
    **{
        f"all_gather_object-{label}": Row("all_gather_object", lambda r, W, make=make: {"obj": make()}, error, texts)
        for label, (make, error, texts) in OBJECT_VALUES.items()
    },
    **{
        f"all_gather_object-{label}-where-all-pickle": Row(
            "all_gather_object", lambda r, W, make=make: {"obj": make(), "allow_pickle": True}, VALUE, texts
        )
        for label, (make, _, texts) in OBJECT_VALUES.items()
        if "storage" in label
    },
    "all_gather_object-pickle-of-what-cannot-be": Row(
        "all_gather_object",
        lambda r, W: {"obj": (lambda: 0), "allow_pickle": True},
        TYPE,
        ("obj: has no encoding and cannot be pickled either",),
    ),
    "all_gather_object-policy-as-text": Row(
        "all_gather_object",
        lambda r, W: {"allow_pickle": "no"},
        TYPE,
        ("allow_pickle: got 'no'", "True, False or None"),
    ),
    "all_gather_object-policy-as-array": Row(
        "all_gather_object", lambda r, W: {"allow_pickle": np.ones(2)}, TYPE, ("allow_pickle: got array([1., 1.])",)
    ),
    "all_gather_object-tuple": Row(
        "all_gather_object",
        lambda r, W: {"object_list": (1, 2)},
        TYPE,
        ("object_list: got (1, 2)", "a list of 2"),
    ),
    "all_gather_object-tensor": Row(
        "all_gather_object", lambda r, W: {"object_list": ones(2)}, TYPE, ("object_list: got tensor", "a list of 2")
    ),
    "broadcast_object_list-device-as-text": Row(
        "broadcast_object_list", lambda r, W: {"device": "nonsense"}, TYPE, ("device: got 'nonsense'", "torch.device")
    ),
    "broadcast_object_list-device-of-no-kind": Row(
        "broadcast_object_list", lambda r, W: {"device": 1.5}, TYPE, ("device: got 1.5", "torch.device")
    ),
    "broadcast_object_list-device-that-is-not-here": Row(
        "broadcast_object_list", lambda r, W: {"device": "cuda"}, VALUE, ("device: got cuda", "serves cpu here")
    ),
    "broadcast_object_list-device-meta": Row(
        "broadcast_object_list", lambda r, W: {"device": "meta"}, VALUE, ("device: got meta", "serves cpu here")
    ),
    "broadcast_object_list-deque": Row(
        "broadcast_object_list",
        lambda r, W: {"object_list": deque([1])},
        TYPE,
        ("object_list: got deque([1])", "a list"),
    ),
    "scatter_object_list-generator": Row(
        "scatter_object_list",
        lambda r, W: {"scatter_object_input_list": (one for one in (1, 2))},
        TYPE,
        ("scatter_object_input_list: got <generator", "expected a list of 2 entries"),
        (0,),
    ),
    "reduce_object-class-as-op": Row(
        "reduce_object", lambda r, W: {"op": dist.ReduceOp}, TYPE, ("op: got <enum 'ReduceOp'>", "expected a ReduceOp")
    ),
    "reduce_object-class-of-torch-as-op": Row(
        "reduce_object", lambda r, W: {"op": c10d.ReduceOp}, TYPE, ("op: got <class", "expected a ReduceOp")
    ),
    # lists of objects
    "all_gather_object-short-list": Row(
        "all_gather_object",
        lambda r, W: {"object_list": [None]},
        VALUE,
        ("object_list: got a list of 1", "expected 2 entries"),
    ),
    "all_gather_object-no-list": Row(
        "all_gather_object", lambda r, W: {"object_list": None}, TYPE, ("object_list: got None", "expected a list of 2")
    ),
    "broadcast_object_list-no-list": Row(
        "broadcast_object_list", lambda r, W: {"object_list": (1,)}, TYPE, ("object_list: got", "expected a list")
    ),
    "gather_object-short-list": Row(
        "gather_object",
        lambda r, W: {"object_gather_list": []},
        VALUE,
        ("object_gather_list: got a list of 0", "expected 2 entries"),
        (0,),
    ),
    "gather_object-list-elsewhere": Row(
        "gather_object",
        lambda r, W: {"object_gather_list": [None, None]},
        VALUE,
        ("object_gather_list: got a list", "not dst"),
        (1,),
    ),
    "scatter_object_list-empty-output": Row(
        "scatter_object_list",
        lambda r, W: {"scatter_object_output_list": []},
        VALUE,
        ("scatter_object_output_list: got an empty list", "expected one entry"),
    ),
    "scatter_object_list-long-input": Row(
        "scatter_object_list",
        lambda r, W: {"scatter_object_input_list": [1, 2, 3]},
        VALUE,
        ("scatter_object_input_list: got a list of 3", "expected 2 entries"),
        (0,),
    ),
    "send_object_list-no-list": Row(
        "send_object_list", lambda r, W: {"object_list": None}, TYPE, ("object_list: got", "expected a list"), (0,)
    ),
    "recv_object_list-no-list": Row(
        "recv_object_list", lambda r, W: {"object_list": "two"}, TYPE, ("object_list: got", "expected a list"), (0,)
    ),
}
