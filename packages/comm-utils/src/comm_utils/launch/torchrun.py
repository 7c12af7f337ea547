"""torchrun, and everything else that sets the variables of torch's ``env://``.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.errors import LaunchError
from comm_utils.launch.facts import Facts
from comm_utils.launch.info import LaunchInfo

__all__ = ["discover"]

_FIELDS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
}
_TOGETHER = ("RANK", "WORLD_SIZE")
_RUN_ID = "TORCHELASTIC_RUN_ID"
# The value that torchrun gives to every job whose user named none.
_NO_ID = "none"


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read ``RANK``, ``WORLD_SIZE`` and their companions; None where neither of the two is set.

    Raises:
        LaunchError: only one of the two is set, or a value is not an integer.
    """
    present = [name for name in _TOGETHER if name in environ]
    if not present:
        return None
    missing = [name for name in _TOGETHER if name not in environ]
    if missing:
        raise LaunchError(
            f"environment variable {present[0]} is set to {environ[present[0]]!r:.200} but {missing[0]} is not set; "
            f"set both (torchrun does), or unset {present[0]} to run as a single process"
        )
    facts = Facts(environ)
    facts.master()
    for field, variable in _FIELDS.items():
        facts.number(field, variable)
    if environ.get(_RUN_ID, _NO_ID) != _NO_ID:
        facts.text("job_id", _RUN_ID)
    return facts.info("torchrun" if _RUN_ID in environ else "environment")
