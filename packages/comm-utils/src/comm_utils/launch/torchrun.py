"""torchrun, and everything else that sets the variables of torch's ``env://``.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.launch.facts import Facts
from comm_utils.launch.info import LaunchInfo

__all__ = ["discover", "set_alone"]

_FIELDS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
}
_TOGETHER = {"RANK": "WORLD_SIZE", "WORLD_SIZE": "RANK"}
_RUN_ID = "TORCHELASTIC_RUN_ID"
# The value that torchrun gives to every job whose user named none.
_NO_ID = "none"


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read ``RANK``, ``WORLD_SIZE`` and their companions; None where one of the two is not set.

    Raises:
        LaunchError: a value is not an integer.
    """
    if any(name not in environ for name in _TOGETHER):
        return None
    facts = Facts(environ)
    facts.master()
    for field, variable in _FIELDS.items():
        facts.number(field, variable)
    if environ.get(_RUN_ID, _NO_ID) != _NO_ID:
        facts.text("job_id", _RUN_ID)
    return facts.info("torchrun" if _RUN_ID in environ else "environment")


def set_alone(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the one of ``RANK`` and ``WORLD_SIZE`` that is set, and the one that is missing; else None."""
    return next(((name, other) for name, other in _TOGETHER.items() if name in environ and other not in environ), None)
