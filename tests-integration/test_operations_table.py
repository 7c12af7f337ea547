"""The table of operations agrees with the functions that programs call, with torch's and with DeepSpeed's."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_utils import operations
from comm_utils.operations import Argument, Direction, Form, OperationSpec, Role

ROOT = Path(__file__).resolve().parents[1]
ROWS = [pytest.param(row, id=row.name) for row in operations.rows()]
DEEPSPEED = json.loads((ROOT / "tools" / "deepspeed_comm.json").read_text())
#: DeepSpeed's labels for its comms logger, which every function takes besides.
LABELS = {"prof", "log_name", "debug"}


@pytest.mark.parametrize("row", ROWS)
def test_arguments_are_the_parameters_of_the_function(row: OperationSpec) -> None:
    function = operations.function_of(row, dist)
    parameters = [name for name in inspect.signature(function).parameters if name not in LABELS]
    assert parameters == [one.name for one in row.arguments]
    assert operations.function_of(row).__name__ == row.name


@pytest.mark.parametrize("row", [param for param in ROWS if param.values[0].recorded])
def test_torch_has_one_of_the_names(row: OperationSpec) -> None:
    missing = {"inference_all_reduce", "all_gather_coalesced", "reduce_scatter_coalesced"}  # deprecated, or DeepSpeed's
    assert any(hasattr(c10d, name) for name in row.torch_names) or row.name in missing


def test_deepspeed_has_its_names() -> None:
    text = json.dumps(DEEPSPEED)
    for row in operations.rows():
        for name in row.deepspeed_names:
            assert f'"{name}"' in text, name
            assert callable(getattr(dist, name))


def test_other_keywords_are_understood() -> None:
    for row in operations.rows():
        for alias, name in row.aliases.items():
            given = {alias if one.name == name else one.name: None for one in row.tensors}
            with pytest.raises(dist.NotInitializedError):  # so the names were understood
                getattr(dist, row.name)(**given)


def test_an_operation_in_place_has_no_other_memory() -> None:
    for row in operations.rows():
        directions = {one.direction for one in row.tensors}
        assert directions <= {Direction.IN_OUT} or Direction.IN_OUT not in directions, row.name
        assert not (row.overlapping and row.is_in_place)


def test_positional_arguments_leave_out_defaults() -> None:
    def tensor(one: Argument) -> object:
        return one.name

    row = operations.get("all_to_all_single")
    assert operations.positional(row, tensor, {}) == ("output", "input")
    assert operations.positional(row, tensor, {Role.GROUP: 7}) == ("output", "input", None, None, 7)
    row = operations.get("reduce")
    assert operations.positional(row, tensor, {Role.ROOT: 3, Role.OP: "sum"}) == ("tensor", 3)
    assert operations.positional(row, tensor, {Role.ROOT: 3, Role.OP: "max"}) == ("tensor", 3, "max")
    assert operations.positional(row, tensor, {Role.ROOT: 0, Role.ASYNC_OP: True}) == ("tensor", 0, "sum", None, True)
    assert operations.positional(operations.get("barrier"), tensor, {}) == ()


def test_tensors_by_role() -> None:
    own, parts = operations.get("gather").tensors
    assert (own.form, parts.form) == (Form.SINGLE, Form.PER_RANK)
    assert operations.tensor_for(own, "source", "target", list) == "source"
    assert operations.tensor_for(parts, "source", "to", list) == ["t", "o"]
    assert operations.tensor_for(parts, "source", "to", list, is_root=False) is None
