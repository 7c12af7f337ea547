"""Ranks that stay for many calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from comm_utils.testing.gang import CallResult, Gang, check_world_size
from comm_utils.testing.locate import Target, locate
from comm_utils.testing.outcome import RankFailure, RankOutcome
from comm_utils.testing.payload import encode_arguments

__all__ = ["RankPool"]

_LEAVE_TIMEOUT_S = 20.0


class RankPool:
    """Ranks for property tests: started once, called often, replaced after a failure.

    A context manager; its ranks start at the first call and end with the block. Not for use by several threads at once.

    Args:
        world_size: number of ranks, at least 1.
        timeout_s: seconds for each call, and for starting the ranks with their set-up.
        env: as in :func:`run_ranks`.
        launcher_env: as in :func:`run_ranks`.
        setup: target that every rank runs when it starts, such as one that initialises the process group. What must
            be undone at the end, it registers with :mod:`atexit`.
        setup_args: positional arguments of ``setup``.
        grace_s: as in :func:`run_ranks`.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, Any] | None = None,
        launcher_env: bool = True,
        setup: Target | None = None,
        setup_args: Sequence[Any] = (),
        grace_s: float = 2.0,
    ) -> None:
        check_world_size(world_size)
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._env = env
        self._launcher_env = launcher_env
        self._setup = setup
        self._setup_args = tuple(setup_args)
        self._grace_s = grace_s
        self._gang: Gang | None = None
        self._open = False

    def __enter__(self) -> RankPool:
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        gang, self._gang = self._gang, None
        if gang is None:
            return
        try:
            bad = gang.leave(min(self._timeout_s, _LEAVE_TIMEOUT_S)) if kind is None else []
        finally:
            gang.close()
        if bad:
            raise RankFailure("ranks of a pool did not end well after their last call", bad)

    @property
    def is_running(self) -> bool:
        """Return whether ranks run: a call has started them, and none has failed since."""
        return self._gang is not None

    def run(self, target: Target, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Run ``target(*args, **kwargs)`` on every rank and return their values in rank order.

        Args:
            target: a function at the top level of a module or ``"package.module:function"``.
            *args: for the target; what is wrapped by :func:`per_rank` differs per rank.
            timeout_s: seconds for this call; the pool's by default.
            **kwargs: for the target.

        Raises:
            RankFailure: a rank raised, died or was not done in time, in the target or in the set-up, or has died since
                its last call. All ranks have been killed; the next call starts new ones.
            TypeError: ranks could not find the target, or an argument cannot be pickled.
            ValueError: a per-rank argument has another length.
        """
        __tracebackhide__ = True
        result = self._call(target, args, kwargs, timeout_s, self._grace_s)
        failure = result.failure("the target")
        if failure is not None:
            self._discard()
            raise failure
        return [outcome.value for outcome in result.outcomes]

    def run_outcomes(
        self, target: Target, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> list[RankOutcome]:
        """Like :meth:`run`, but says what became of each rank and does not raise for the target.

        The ranks stay when each of them returned or raised; when one died or hung, the next call starts new ones.

        Args:
            target: as in :meth:`run`.
            *args: likewise.
            timeout_s: likewise.
            **kwargs: likewise.

        Raises:
            RankFailure: the set-up failed.
            TypeError: as in :meth:`run`.
            ValueError: likewise.
        """
        __tracebackhide__ = True
        result = self._call(target, args, kwargs, timeout_s, None)
        if any(outcome.exit_code is not None for outcome in result.outcomes):
            self._discard()
        return result.outcomes

    def _call(
        self,
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        grace_s: float | None,
    ) -> CallResult:
        __tracebackhide__ = True
        found = locate(target)
        if found.is_script:
            raise TypeError(f"a pool runs functions; for the script {found} use run_ranks()")
        payloads = encode_arguments(args, kwargs, self.world_size)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return self._started().call(found, payloads, timeout_s=limit_s, grace_s=grace_s, last=False)
        except BaseException:
            self._discard()
            raise

    def _started(self) -> Gang:
        __tracebackhide__ = True
        if not self._open:
            raise RuntimeError("the pool is not open; use it as `with RankPool(...) as pool:`")
        if self._gang is not None:
            lost = self._gang.lost()
            if lost:
                raise RankFailure("ranks of a pool ended by themselves after a call; the next starts new ones", lost)
            return self._gang
        self._gang = Gang(self.world_size, self._env, self._launcher_env)
        if self._setup is not None:
            payloads = encode_arguments(self._setup_args, {}, self.world_size)
            result = self._gang.call(
                locate(self._setup), payloads, timeout_s=self._timeout_s, grace_s=self._grace_s, last=False
            )
            failure = result.failure("the set-up")
            if failure is not None:
                raise failure
        return self._gang

    def _discard(self) -> None:
        gang, self._gang = self._gang, None
        if gang is not None:
            gang.close()
