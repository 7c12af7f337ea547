"""Rows that are special to a call: sizes, dtypes, lists and splits that do not fit to one another.

A new row is an entry of :data:`SPECIAL`; it is tried on the first call and on the fast path, on every backend.
"""

from __future__ import annotations

import torch
from wrong_calls.kinds import TYPE, VALUE, Row
from wrong_calls.right import ones, tensors

__all__ = ["SPECIAL"]

NOT_DIVISIBLE = ("does not divide by the world size of 2",)

SPECIAL: dict[str, Row] = {
    "all_gather_coalesced-same-output-twice": Row(
        "all_gather_coalesced",
        lambda r, W: {"output_tensors": [ones(8)] * 2},
        VALUE,
        ("output_tensors: got tensors that share memory", "one memory for each"),
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
    "all_to_all_single-own-part": Row(
        "all_to_all_single",
        lambda r, W: {"output_split_sizes": [3, 5], "input_split_sizes": [5, 3]},
        VALUE,
        ("output_split_sizes: got", "this rank", "expected the same number in both"),
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
        "send_object_list", lambda r, W: {"object_list": None}, TYPE, ("object_list: got", "expected a list")
    ),
    "recv_object_list-no-list": Row(
        "recv_object_list", lambda r, W: {"object_list": "two"}, TYPE, ("object_list: got", "expected a list")
    ),
}
