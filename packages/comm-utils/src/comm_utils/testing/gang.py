"""All ranks of a run: started together, called together, ended together."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

from comm_utils.flight_recorder.directory import remove_rings_of
from comm_utils.flight_recorder.recorder import own_identity
from comm_utils.testing.environment import PortReservation, new_token, rank_environment
from comm_utils.testing.machine import patience
from comm_utils.testing.messages import Call, Raised, Returned, TargetRef
from comm_utils.testing.outcome import RankFailure, RankOutcome
from comm_utils.testing.process import RankProcess, dump_stacks, kill_strays

__all__ = ["CallResult", "Gang", "check_world_size"]

_TICK_S = 0.05
_CLOSING_TICK_S = 0.002


@dataclass(frozen=True)
class CallResult:
    """The result of one call.

    Attributes:
        target: what was called.
        outcomes: one per rank.
        first_failed: the rank that was seen to fail first.
        timed_out: whether the deadline passed.
        timeout_s: what the deadline was.
    """

    target: TargetRef
    outcomes: list[RankOutcome]
    first_failed: int | None
    timed_out: bool
    timeout_s: float

    def failure(self, what: str) -> RankFailure | None:
        """Return the error to raise, or None when every rank returned."""
        failed = [outcome.rank for outcome in self.outcomes if not outcome.ok]
        if not failed:
            return None
        ranks = ", ".join(map(str, failed))
        reasons = []
        if self.first_failed is not None:
            reasons.append(f"rank {self.first_failed} first")
        if self.timed_out:
            reasons.append(f"the deadline of {self.timeout_s:g} s passed")
        return RankFailure(
            f"{what} {self.target} failed on {len(failed)} of {len(self.outcomes)} ranks "
            f"(rank {ranks}; {', '.join(reasons)})",
            self.outcomes,
            timed_out=self.timed_out,
            first=self.first_failed,
        )


def check_world_size(world_size: int) -> None:
    """Refuse a number of ranks that cannot be.

    Raises:
        ValueError: it is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")


class Gang:
    """``world_size`` fresh processes."""

    def __init__(self, world_size: int, env: Mapping[str, Any] | None, launcher_env: bool) -> None:
        self._ranks: list[RankProcess] = []
        self._token, token = new_token()
        self._port = PortReservation() if launcher_env else None
        try:
            port = self._port.port if self._port else None
            for rank in range(world_size):
                self._ranks.append(RankProcess(rank, rank_environment(rank, world_size, port, token, env)))
        except BaseException:
            self.close()
            raise

    def call(
        self,
        target: TargetRef,
        payloads: Sequence[bytes],
        *,
        timeout_s: float,
        grace_s: float | None,
        last: bool,
    ) -> CallResult:
        """Run a target on every rank and wait for all.

        Args:
            target: what to run.
            payloads: the encoded arguments of each rank.
            timeout_s: seconds until ranks that are not finished are killed.
            grace_s: seconds that the others get after the first failure; None: until the deadline.
            last: the ranks end after this call, and count as finished when they have.
        """
        started = time.monotonic()
        deadline = stop_at = started + timeout_s
        factor = patience()
        for rank, payload in zip(self._ranks, payloads, strict=True):
            rank.begin(Call(target, payload, last, factor), deadline)
        pending = list(self._ranks)
        first_failed: int | None = None
        while pending and (now := time.monotonic()) < stop_at:
            _wait_for_messages(pending, stop_at - now)
            for rank in pending:
                if first_failed is None and _has_failed(rank):
                    first_failed = rank.rank
                    if grace_s is not None:
                        stop_at = min(deadline, time.monotonic() + grace_s)
            pending = [rank for rank in pending if not (rank.ended() or (rank.reply and not last))]
        timed_out = bool(pending) and time.monotonic() >= deadline
        if pending:
            dump_stacks(pending)
            for rank in pending:
                rank.kill()
        outcomes = [_outcome(rank, target, rank in pending, started) for rank in self._ranks]
        return CallResult(target, outcomes, first_failed, timed_out, timeout_s)

    def leave(self, timeout_s: float) -> list[RankOutcome]:
        """End every rank as a program ends; returns the outcomes of those that did not end well.

        Args:
            timeout_s: seconds until those still there are killed.
        """
        started = time.monotonic()
        for rank in self._ranks:
            rank.reply = None
            rank.leave()
        pending = list(self._ranks)
        while pending and (now := time.monotonic()) < started + timeout_s:
            _wait_for_messages(pending, started + timeout_s - now)
            pending = [rank for rank in pending if not rank.ended()]
        dump_stacks(pending)
        for rank in pending:
            rank.kill()
        return [_lost(rank, rank in pending, started) for rank in self._ranks if rank.exit_code != 0]

    def lost(self) -> list[RankOutcome]:
        """Return the ranks that ended by themselves since they answered the last call."""
        return [_lost(rank, False, rank.ended_at or 0.0) for rank in self._ranks if rank.ended()]

    def close(self) -> None:
        """Kill whatever is left of the run, and release its port."""
        ranks, self._ranks = self._ranks, []
        try:
            for rank in ranks:
                rank.close()
        finally:
            kill_strays(self._token)
            remove_rings_of({rank.pid for rank in ranks}, own_identity())
            if self._port is not None:
                self._port.close()


def _wait_for_messages(pending: list[RankProcess], limit_s: float) -> None:
    connected = {rank.connection: rank for rank in pending if rank.connected}
    # A closed connection says that the process is about to end; nothing else will announce the moment.
    tick_s = _TICK_S if len(connected) == len(pending) else _CLOSING_TICK_S
    if not connected:
        time.sleep(min(tick_s, limit_s))
    for connection in wait(list(connected), min(tick_s, limit_s)):
        connected[connection].receive()  # type: ignore[index]


def _has_failed(rank: RankProcess) -> bool:
    if isinstance(rank.reply, Raised):
        return True
    return rank.ended() and (rank.reply is None or rank.exit_code != 0)


def _outcome(rank: RankProcess, target: TargetRef | None, killed: bool, started: float) -> RankOutcome:
    reply = rank.reply
    common: dict[str, Any] = {
        "rank": rank.rank,
        "exit_code": rank.exit_code,
        "duration_s": reply.duration_s if reply else (rank.ended_at or time.monotonic()) - started,
        "stdout": rank.stdout,
        "stderr": rank.stderr,
        "stacks": rank.stacks,
    }
    if isinstance(reply, Raised):
        exception = _load_exception(reply)
        return RankOutcome(
            status="raised",
            exception_type=reply.type_name,
            message=reply.message,
            traceback=reply.traceback,
            exception=exception,
            **common,
        )
    if reply is None or rank.exit_code:
        where = "before the target returned" if reply is None else "after the target had returned"
        return RankOutcome(status="killed" if killed else "died", message=where, **common)
    return _returned(reply, target, common)


def _lost(rank: RankProcess, killed: bool, started: float) -> RankOutcome:
    rank.reply = None
    return replace(_outcome(rank, None, killed, started), message="after its last call")


def _returned(reply: Returned, target: TargetRef | None, common: dict[str, Any]) -> RankOutcome:
    if target is not None and target.is_script:
        return RankOutcome(status="returned", value=common["stdout"], **common)
    try:
        return RankOutcome(status="returned", value=pickle.loads(reply.payload), **common)
    except Exception as error:
        message = f"the target returned, but its value cannot be unpickled here: {error}"
        return RankOutcome(status="raised", exception_type=type(error).__qualname__, message=message, **common)


def _load_exception(reply: Raised) -> BaseException | None:
    if reply.exception is None:
        return None
    try:
        exception = pickle.loads(reply.exception)
    except Exception:  # classes whose constructors take other arguments than they keep cannot be rebuilt
        return None
    return exception if isinstance(exception, BaseException) else None
