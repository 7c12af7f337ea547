"""A process that nobody launched together with others."""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.errors import LaunchError
from comm_utils.launch.info import LaunchInfo
from comm_utils.launch.torchrun import set_alone

__all__ = ["discover"]

_SOURCE = "default: no launcher was found"


def discover(environ: Mapping[str, str]) -> LaunchInfo:
    """Rank 0 of 1.

    Raises:
        LaunchError: one of ``RANK`` and ``WORLD_SIZE`` is set, so that this process is one of several.
    """
    alone = set_alone(environ)
    if alone is not None:
        present, missing = alone
        raise LaunchError(
            f"environment variable {present} is set to {environ[present]!r:.200} but {missing} is not set; set both "
            f"(torchrun does), or unset {present} to run as a single process"
        )
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")
    return LaunchInfo("none", 0, 1, 0, 1, 0, sources=dict.fromkeys(names, _SOURCE))
