"""The reduction of gradients: sums or averages, what is divided before and after, and compression."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from comm_collectives.annotations import Compressing, Group
from comm_collectives.collectives import all_reduce
from comm_collectives.compression.defaults import default_of
from comm_collectives.compression.selection import DTYPES, choose
from comm_collectives.compression.settings import Compression, as_compression
from comm_collectives.groups import get_world_size
from comm_collectives.measured_choice import AUTO
from comm_collectives.reduce_scatter import reduce_scatter_tensor
from comm_collectives.reduction import Scaling
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown
from comm_utils.reduce_op import ReduceOp, parse_reduce_op

__all__ = ["GradientReduction"]

_CALL = "GradientReduction"


@dataclass(frozen=True)
class GradientReduction:
    """Settings of the reduction of gradients, and what applies them.

    With a group of *W* ranks and the default settings, gradients are averaged in one step, and 16-bit floats are added
    in float32. The other ways of averaging are those of DeepSpeed's engine (``allreduce_bucket``), for gradients whose
    sum is too large for their dtype.

    Attributes:
        op: ``"avg"`` or ``"sum"``.
        prescale: divide gradients by W before they are added; DeepSpeed's ``prescale_gradients``.
        predivide_factor: divide gradients by it before they are added, and an average by W / predivide_factor after;
            a sum is multiplied by it after. DeepSpeed's ``gradient_predivide_factor``.
        compression: a codec such as ``"int8"``, or a ``Compression``, for float32, float16 and bfloat16; None for what
            :func:`comm_collectives.set_compression` set for the group. Hooks give the error feedback of each bucket a
            name that begins with that of the ``Compression``, if it has one; then it can be saved. Models whose
            parameters have the same names need different names there.

    Raises:
        ArgumentError: another op; a factor that is not finite and above 0; prescale with a sum or a factor.
    """

    op: str = "avg"
    prescale: bool = False
    predivide_factor: float = 1.0
    compression: Compressing = None

    def __post_init__(self) -> None:
        op = parse_reduce_op(self.op, _CALL)
        if op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise ArgumentError(f"{_CALL}: op: got {shown(self.op)}; expected 'avg' or 'sum'")
        object.__setattr__(self, "op", op.name.lower())
        if not isinstance(self.prescale, bool):
            raise ArgumentTypeError(f"{_CALL}: prescale: got {shown(self.prescale)}; expected True or False")
        factor = self.predivide_factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise ArgumentTypeError(f"{_CALL}: predivide_factor: got {shown(factor)}; expected a number")
        if not (math.isfinite(factor) and factor > 0):
            raise ArgumentError(f"{_CALL}: predivide_factor: got {factor}; expected a finite number above 0")
        if self.prescale and op is ReduceOp.SUM:
            raise ArgumentError(f"{_CALL}: prescale: got True with op='sum'; expected op='avg', as it divides by W")
        if self.prescale and factor != 1:
            raise ArgumentError(
                f"{_CALL}: prescale: got True with predivide_factor={factor}; expected one of them: prescale divides "
                "by W before the sum, which leaves nothing to divide after it"
            )
        as_compression(_CALL, self.compression)

    def __repr__(self) -> str:
        """Return what ranks have to agree on."""
        given = self.compression
        compression = given.describe() if isinstance(given, Compression) else repr(given)
        return (
            f"{_CALL}(op={self.op!r}, prescale={self.prescale!r}, predivide_factor={self.predivide_factor!r}, "
            f"compression={compression})"
        )

    def scaling(self, group: Group = None) -> Scaling:
        """Return what turns a sum of gradients into the reduction."""
        before, after = 1.0 / self.predivide_factor, self.predivide_factor
        if self.op == "sum":
            return Scaling(before, after)
        W = get_world_size(group)
        return Scaling(1.0 / W) if self.prescale else Scaling(before, after / W)

    def of_bucket(self, bucket: str) -> GradientReduction:
        """Return the same reduction for one of several buckets, which has a state of its own.

        Args:
            bucket: added to the name of the compression; without such a name nothing changes, as a state then belongs
                to the memory of a bucket.
        """
        given = self.compression
        if not isinstance(given, Compression) or given.name is None:
            return self
        return replace(self, compression=given.of(f"{given.name}.{bucket}"))

    def claim(self, call: str, buckets: Iterable[str], user: object) -> Callable[[], None]:
        """Have ``user`` alone compress ``buckets`` with the states that have their names; return what ends this.

        Args:
            call: what the user called, for messages.
            buckets: as :meth:`of_bucket` takes them.
            user: any object; it has the states no longer than it exists.

        Raises:
            ArgumentError: another user has one of them.
        """
        self._check_unused(call, buckets, user)
        named = self._with_states()
        if named is None:
            return lambda: None
        users = named.users
        users.claim([f"{named.name}.{one}" for one in buckets], user)
        return lambda: users.release(user)

    def _with_states(self) -> Compression | None:
        """Return the compression, if its states have names."""
        given = self.compression
        if isinstance(given, Compression) and given.name is not None and given.error_feedback:
            return given
        return None

    def _check_unused(self, call: str, buckets: Iterable[str], user: object = None) -> None:
        named = self._with_states()
        if named is None:
            return
        names = [f"{named.name}.{one}" for one in buckets]
        if named.users.taken(names, user) is not None:
            gc.collect()  # a model that nothing refers to may be a part of a cycle
        taken = named.users.taken(names, user)
        if taken is not None:
            raise ArgumentError(
                f"{call}: reduction: the error feedback of {taken!r} is that of the hooks of another model; expected "
                f"one for each model: give Compression.of() another name than {named.name!r}, or remove() the other "
                "hooks before"
            )

    def check_compression(
        self, call: str, collective: Callable[..., Any], parameters: Mapping[str, torch.Tensor], group: Group = None
    ) -> None:
        """Check that gradients can be compressed as is asked for, before the first backward.

        Where a measurement is to decide which sizes are compressed, the backward checks it.

        Args:
            call: the user's call, for messages.
            collective: reduces the gradients.
            parameters: a bucket has at least as many bytes as one of them, and is named after the first one.
            group: this rank is a member; None is the world group.

        Raises:
            ArgumentError: reductions on the group are deterministic, or hooks of another model use the states that
                have these names.
        """
        self._check_unused(call, parameters)
        found = default_of(group) if self.compression is None else as_compression(_CALL, self.compression)
        if found is None or found.min_size_bytes == AUTO:
            return
        for one in parameters.values():
            if one.dtype not in DTYPES:
                continue
            try:
                choose(collective.__name__, self.compression, one, ReduceOp.SUM, group)
            except ArgumentError as error:
                raise ArgumentError(f"{call}: reduction: {error}") from None

    def compresses(self, dtype: torch.dtype, group: Group = None) -> bool:
        """Return whether tensors of ``dtype`` may be compressed, so that single elements of them are not exact."""
        if dtype not in DTYPES:
            return False
        if self.compression is None:
            return default_of(group) is not None
        return as_compression(_CALL, self.compression) is not None

    def start(self, flat: torch.Tensor, group: Group = None) -> Work:
        """Start the reduction of ``flat`` over the ranks of ``group``, in place.

        Args:
            flat: dense, of a float or complex dtype, the same shape and dtype on every rank; overwritten with the
                result. Not to be touched before ``wait()`` of the handle returns.
            group: this rank is a member; None is the world group.
        """
        op, scaling = self._native(group)
        scaling.prescale(flat)
        work = all_reduce(flat, op, group, async_op=True, compression=self._compression_of(flat.dtype))
        return scaling.finish(work, flat)

    def start_scatter(self, output: torch.Tensor, flat: torch.Tensor, group: Group = None) -> Work:
        """Start the reduction of ``flat`` into the parts of the ranks of ``group``.

        Args:
            output: (n,), overwritten with this rank's part of the result: rank r of the group gets elements r*n to
                (r+1)*n. It may be that part of ``flat``.
            flat: (W*n,), of a float or complex dtype, the same on every rank; its elements may be divided in place.
            group: this rank is a member; None is the world group.
        """
        op, scaling = self._native(group)
        scaling.prescale(flat)
        work = reduce_scatter_tensor(
            output, flat, op, group, async_op=True, compression=self._compression_of(flat.dtype)
        )
        return scaling.finish(work, output)

    def _native(self, group: Group) -> tuple[str, Scaling]:
        """Return the reduce op, and what is scaled beside it: nothing where the op averages by itself."""
        if not self.prescale and self.predivide_factor == 1:
            return self.op, Scaling()
        return "sum", self.scaling(group)

    def _compression_of(self, dtype: torch.dtype) -> Compressing:
        return self.compression if dtype in DTYPES else None
