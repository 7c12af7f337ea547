"""Run a target once, on ranks of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comm_utils.testing.gang import CallResult, Gang, check_world_size
from comm_utils.testing.locate import Target, locate
from comm_utils.testing.outcome import RankOutcome
from comm_utils.testing.payload import encode_arguments

__all__ = ["run_ranks", "run_ranks_outcomes"]


def run_ranks(
    target: Target,
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = 2.0,
    env: Mapping[str, Any] | None = None,
    launcher_env: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Run ``target(*args, **kwargs)`` on every rank, each a fresh process, and return their values in rank order.

    Nothing that a rank started outlives the call, however it ends, but for a process that left both the rank's session
    and its environment, as ``env -i setsid`` does.

    Args:
        target: a function at the top level of a module, ``"package.module:function"``, or the path of a script. A
            script runs as ``__main__`` with ``args`` as its arguments; its value is what it printed to stdout.
        world_size: number of ranks, at least 1.
        *args: for the target; what is wrapped by :func:`per_rank` differs per rank.
        timeout_s: seconds for everything, start and end of the processes included.
        grace_s: seconds that the other ranks get, after the first has failed, to report errors of their own.
        env: variables to set in every rank; None removes one; values may be wrapped by :func:`per_rank`.
        launcher_env: give the ranks what torchrun would (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
            ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``) and ``OMP_NUM_THREADS=1``.
            The runner's own launcher variables are never passed on.
        **kwargs: for the target.

    Raises:
        RankFailure: a rank raised, died, ended with an exit code other than 0, or was not done in time.
        TypeError: ranks could not find the target, or an argument cannot be pickled.
        ValueError: ``world_size`` is below 1 or a per-rank argument has another length.
    """
    __tracebackhide__ = True
    result = _run(target, world_size, args, kwargs, timeout_s, grace_s, env, launcher_env)
    failure = result.failure("the target")
    if failure is not None:
        raise failure
    return [outcome.value for outcome in result.outcomes]


def run_ranks_outcomes(
    target: Target,
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float | None = None,
    env: Mapping[str, Any] | None = None,
    launcher_env: bool = True,
    **kwargs: Any,
) -> list[RankOutcome]:
    """Like :func:`run_ranks`, for tests in which ranks are meant to fail: says what became of each and never raises.

    Args:
        target: as in :func:`run_ranks`.
        world_size: likewise.
        *args: likewise.
        timeout_s: likewise; ranks that are not done by then have the status ``killed``.
        grace_s: seconds that the other ranks get after the first has failed; None: all the time until the deadline.
        env: as in :func:`run_ranks`.
        launcher_env: likewise.
        **kwargs: likewise.

    Raises:
        TypeError: as in :func:`run_ranks`.
        ValueError: likewise.
    """
    return _run(target, world_size, args, kwargs, timeout_s, grace_s, env, launcher_env).outcomes


def _run(
    target: Target,
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float,
    grace_s: float | None,
    env: Mapping[str, Any] | None,
    launcher_env: bool,
) -> CallResult:
    found = locate(target)
    if found.is_script and kwargs:
        raise TypeError(f"the script {found} takes positional arguments only, got {', '.join(kwargs)}")
    check_world_size(world_size)
    payloads = encode_arguments(args, kwargs, world_size)
    gang = Gang(world_size, env, launcher_env)
    try:
        return gang.call(found, payloads, timeout_s=timeout_s, grace_s=grace_s, last=True)
    finally:
        gang.close()
