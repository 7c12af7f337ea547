"""Other names of parameters, and DeepSpeed's labels, as the head of every collective understands them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import comm_collectives
from comm_collectives.argument_names import ALIASES, LABELS
from comm_collectives.collective import INLINE, collective
from comm_utils import ArgumentTypeError


def all_to_all_single(output: int, input: int) -> tuple[int, int]:
    return output, input


def test_aliases_become_the_parameters_they_stand_for() -> None:
    call: Any = collective(compiled=INLINE)(all_to_all_single)
    assert call(1, 2) == (1, 2)
    assert call(output_tensor=1, input_tensor=2) == (1, 2)
    assert call(1, input=2) == (1, 2)
    with pytest.raises(ArgumentTypeError, match="output_tensor: got it and another name of 'output'"):
        call(output=1, output_tensor=1, input=2)
    with pytest.raises(TypeError, match="no_such"):
        call(1, 2, no_such=3)


def test_a_wrong_name_is_explained() -> None:
    call: Any = collective(compiled=INLINE)(all_to_all_single)
    for slip, meant in (("inptu", "input"), ("input_tensr", "input_tensor"), ("log_nam", "log_name")):
        with pytest.raises(ArgumentTypeError, match=f"all_to_all_single: {slip}: got .*; did you mean '{meant}'?"):
            call(1, **{slip: 2})
    with pytest.raises(ArgumentTypeError, match="all_to_all_single: missing a required argument: 'input'; expected"):
        call(1)
    with pytest.raises(ArgumentTypeError, match="all_reduce: missing a required argument: 'tensor'"):
        comm_collectives.all_reduce()  # type: ignore[call-arg]


def test_what_deepspeed_tells_its_logger_is_accepted_by_name_and_by_position() -> None:
    call: Any = collective(compiled=INLINE)(all_to_all_single)
    assert LABELS == ("prof", "log_name", "debug")
    assert call(1, 2, prof=True, log_name="mine", debug="text") == (1, 2)
    assert call(1, 2, True, "mine", "text") == (1, 2)
    assert call(output=1, tensor=2, log_name=None) == (1, 2)
    with pytest.raises(ArgumentTypeError, match="all_to_all_single: log_name: got 3; expected a string"):
        call(1, 2, log_name=3)
    with pytest.raises(TypeError, match="positional"):
        call(1, 2, True, "mine", "text", "one too many")
    with pytest.raises(ArgumentTypeError, match="log_name: got it by position and by name"):
        call(1, 2, True, "mine", log_name="other")
    plain: Any = collective(compiled=INLINE, labels=False)(all_to_all_single)
    with pytest.raises(TypeError, match="prof"):
        plain(1, 2, prof=True)


def configure(config: int, debug: bool = False) -> tuple[int, bool]:
    return config, debug


def test_a_parameter_of_the_functions_own_is_no_label() -> None:
    call: Any = collective(compiled=INLINE, labels=False)(configure)
    assert call(deepspeed_config=1, debug=True) == (1, True)
    with pytest.raises(TypeError, match="prof"):
        call(deepspeed_config=1, prof=True)


def test_every_alias_names_a_parameter_of_its_function() -> None:
    functions = {name: value for name, value in vars(comm_collectives).items() if name in ALIASES}
    assert set(ALIASES) - set(functions) == {"configure"}  # the orchestrator's
    for name, function in functions.items():
        parameters = inspect.signature(function).parameters
        assert set(ALIASES[name].values()) <= set(parameters)
        assert not set(ALIASES[name]) & set(parameters)
