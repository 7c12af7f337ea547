"""Types of the arguments that most public functions have.

A collective has three overloads: with ``async_op=True`` it returns a ``Work``, without it None, and for a ``bool`` that
a type checker does not know either of them. On a rank outside of the group every form returns None.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeAlias

import torch.distributed as c10d

from comm_collectives.compression.settings import Compression
from comm_utils.reduce_op import ReduceOp

__all__ = ["Compressing", "Group", "Op", "Timeout"]

#: A reduce op: a name such as ``"sum"``, this project's ``ReduceOp`` or torch's.
Op: TypeAlias = str | ReduceOp | c10d.ReduceOp | c10d.ReduceOp.RedOpType
#: A process group; None for the world group.
Group: TypeAlias = c10d.ProcessGroup | None
#: Seconds or a timedelta; None for the group's timeout.
Timeout: TypeAlias = float | timedelta | None
#: The name of a codec, a ``Compression``; None for the group's own, ``"none"`` for none.
Compressing: TypeAlias = str | Compression | None
