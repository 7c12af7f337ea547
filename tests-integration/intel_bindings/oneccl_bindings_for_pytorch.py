"""Stands in for Intel's bindings, which are not on PyPI: registers a process group for ``ccl`` at import, as they do.

The process group is torch's own of gloo, so collectives are real.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as c10d

#: Sizes of the groups that were created.
created: list[int] = []


def _create(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> c10d.ProcessGroupGloo:
    created.append(size)
    return c10d.ProcessGroupGloo(store, rank, size, timeout)


c10d.Backend.register_backend("ccl", _create, devices=["cpu", "xpu"])
