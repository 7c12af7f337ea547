"""Compare what came of a cell with what the issue asks for: a list of what falls short, empty where nothing does."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from comm_utils.testing import patience
from faults.cells import Cell
from faults.expected import MISMATCH_S, RIGHT, Expected
from faults.record import Record, Told

__all__ = ["shortfalls"]

_DESTROY_S = 3.0
# A busy machine gets so much more for every limit.
_SLACK_S = 1.0
# oneCCL cannot be set up again in a process in which it has failed, and says so.
_ONECCL_FAILED = "oneCCL failed earlier in this process"


def shortfalls(cell: Cell, record: Record, expected: Expected | None = None) -> list[str]:
    """Return one sentence for each way in which a cell falls short.

    Args:
        cell: what was run.
        record: what came of it.
        expected: another bar than the row's.
    """
    return list(_Judge(cell, record, expected or cell.row.expects(cell.moment)).all())


class _Judge:
    def __init__(self, cell: Cell, record: Record, expected: Expected) -> None:
        self._cell, self._record, self._expected = cell, record, expected
        self._culprit = cell.row.culprit
        aborted = [told for told in record.ranks if told.exit_code == -signal.SIGABRT]
        self._aborted = {told.rank for told in aborted}

    def all(self) -> Iterator[str]:
        yield from self._came_to_pass()
        yield from self._job()
        for told in self._record.ranks:
            if told.rank == self._culprit and self._cell.row.dies:
                continue
            if told.rank in self._aborted:
                continue
            yield from (f"rank {told.rank}: {problem}" for problem in self._rank(told))

    def _came_to_pass(self) -> Iterator[str]:
        if not self._record.fault_at:
            yield "the fault did not happen"
        for told in self._record.ranks:
            for lost in told.of("lost"):
                yield f"rank {told.rank} waited in vain for {lost['waited_for']}"
            for ring in told.of("ring"):
                if not ring["path"]:
                    yield f"rank {told.rank} has no ring"

    def _job(self) -> Iterator[str]:
        record = self._record
        if record.hung:
            yield f"ranks {record.hung} hang"
        if record.processes:
            yield f"processes are left: {record.processes}"
        if record.files:
            yield f"files are left: {', '.join(record.files)}"
        if record.rings and record.is_clean:
            yield f"rings are left although nothing failed: {', '.join(record.rings)}"
        if record.listening:
            yield f"sockets still listen at ports {record.listening}"
        if self._aborted and (self._cell.prevents or not self._cell.row.mismatch):
            yield f"ranks {sorted(self._aborted)} were aborted"
        elif self._aborted and not re.search(rf"\brank {self._culprit}\b", record.postmortem):
            yield f"ranks {sorted(self._aborted)} were aborted, and commctl postmortem names no rank {self._culprit}"
        if self._expected.warning and not any(
            re.search(self._expected.warning, told.output, re.IGNORECASE) for told in record.ranks
        ):
            yield f"nobody warned of {self._expected.warning!r}"
        yield from self._wrong_results()

    def _wrong_results(self) -> Iterator[str]:
        """A wrong result has to be followed by an error on every rank within a second, or must not be at all."""
        wrong = [one["t"] for told in self._record.ranks for one in told.of("returned") if not one["right"]]
        if not wrong:
            return
        if self._cell.prevents or not self._cell.row.mismatch:
            yield "a wrong result was returned"
            return
        for told in self._record.ranks:
            error = told.error
            if told.rank not in self._aborted and (error is None or error["t"] > wrong[0] + MISMATCH_S + _slack_s()):
                yield f"rank {told.rank} got no error within a second after a wrong result"

    def _rank(self, told: Told) -> Iterator[str]:
        yield from self._error(told)
        for child in told.of("child"):
            if not set(child["kinds"]) & set(self._expected.child):
                yield f"its forked child got {child['kinds'][:1]}: {child['message']}"
        if self._expected.child and told.rank == self._culprit and not told.of("child"):
            yield "its forked child hangs"
        for destroyed in told.of("destroyed"):
            if destroyed["problem"]:
                yield f"destroy_process_group raised {destroyed['problem']}"
            elif destroyed["seconds"] > _DESTROY_S * patience():
                yield f"destroy_process_group took {destroyed['seconds']:.1f} s"
        if not told.of("destroyed"):
            yield "destroy_process_group did not return"
        elif self._expected.again:
            why = told.of("again")[0]["problem"] if told.of("again") else "it does not return"
            if why and not (self._cell.backend == "oneccl" and _ONECCL_FAILED in why):
                yield f"init_distributed does not work again: {why}"
        if told.exit_code:
            yield f"its exit status is {told.exit_code}"

    def _error(self, told: Told) -> Iterator[str]:
        expected, error = self._expected, told.error
        of_culprit = told.rank == self._culprit
        if error is None:
            asked = not of_culprit or expected.culprit
            if expected.errors and RIGHT not in expected.errors and asked:
                yield f"no error, expected {' or '.join(expected.errors)}"
            return
        kind, message = error["kinds"][0], error["message"]
        said = f"{kind} in {error['call']}: {message[:300]}"
        if not expected.errors:
            yield f"expected no error, got {said}"
            return
        if of_culprit and not expected.culprit:
            return
        if not set(error["kinds"]) & set(expected.errors) or "CommError" not in error["kinds"]:
            yield f"expected {' or '.join(expected.errors)}, got {said}"
        facts = {"pid": self._record.ranks[self._culprit].pid, "port": _second_port(self._record)}
        patterns = expected.culprit_names if of_culprit else expected.names
        missing = [
            pattern
            for pattern in (one.format(**facts) for one in patterns)
            if not re.search(pattern, message, re.IGNORECASE | re.DOTALL)
        ]
        if missing:
            yield f"names no {', '.join(missing)}: {said}"
        seconds = self._record.seconds_of(told)
        if seconds is not None and seconds > expected.latest_s + _slack_s():
            yield f"the error came after {seconds:.1f} s, expected {expected.latest_s:g} s: {said}"


def _slack_s() -> float:
    return min(patience() - 1, _SLACK_S)


def _second_port(record: Record) -> int:
    found = [one["second_port"] for told in record.ranks for one in told.of("process")]
    return int(found[0]) if found else 0
