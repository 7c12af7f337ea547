"""The loss of a pipeline: checks of its function before the start, and of each loss before its backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["check_loss", "check_loss_function"]


def check_loss_function(call: str, function: Any, targets: Sequence[Sequence[Any]] | None, has_backward: bool) -> None:
    """Check that ``function`` takes an output and the targets of a micro-batch.

    Functions whose signature Python does not know, such as ``torch.mean``, are not called, so they pass.

    Args:
        call: the user's call, for messages.
        function: the loss function; None where the last stage returns the loss.
        targets: of each micro-batch; None where there are none.
        has_backward: of the schedule.

    Raises:
        ArgumentError: targets are missing, or there are targets for a backward pass without a loss function.
        ArgumentTypeError: ``function`` is no function.
    """
    if function is None:
        if has_backward and targets is not None:
            raise ArgumentError(
                f"{call}: loss_function: got None with targets; expected a function of the last stage's output and the "
                "targets, such as torch.nn.functional.cross_entropy"
            )
        return
    if not callable(function):
        raise ArgumentTypeError(f"{call}: loss_function: got {shown(function)}; expected a function, or None")
    extra = () if targets is None else targets[0]
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, *extra)
    except TypeError as error:
        given = "no targets" if targets is None else f"{len(extra)} tensors for each micro-batch"
        name = getattr(function, "__name__", type(function).__name__)
        raise ArgumentError(
            f"{call}: targets: got {given}, but {name}(output, ...) does not take these ({error}); expected the "
            f"arguments of {name} behind the output"
        ) from None


def check_loss(call: str, loss: Any, has_function: bool, has_backward: bool, microbatch: int) -> None:
    """Check that ``loss`` is a tensor, and of one element where a backward pass begins with it.

    Raises:
        ArgumentError: it has more elements, or none.
        ArgumentTypeError: it is no tensor.
    """
    origin = "loss_function" if has_function else "the last stage, without a loss_function,"
    if not isinstance(loss, torch.Tensor):
        raise ArgumentTypeError(
            f"{call}: {origin} returned {shown(loss)} for micro-batch {microbatch}; expected a tensor"
        )
    if has_backward and loss.numel() != 1:
        remedy = "reduce it, such as with mean()" if has_function else "pass a loss_function"
        raise ArgumentError(
            f"{call}: {origin} returned a loss of shape {tuple(loss.shape)} for micro-batch {microbatch}; expected a "
            f"scalar: {remedy}"
        )
