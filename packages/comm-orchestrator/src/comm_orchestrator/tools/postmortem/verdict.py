"""Decide what is wrong with a job: pure functions of the evidence in its rings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from comm_orchestrator.rendezvous.records import format_ranks
from comm_orchestrator.tools.postmortem.evidence import Evidence
from comm_orchestrator.tools.rings import seconds
from comm_utils.flight_recorder import Call
from comm_utils.flight_recorder.diagnosis import diagnose
from comm_utils.flight_recorder.findings import Finding, FindingKind, describe_rank
from comm_utils.flight_recorder.snapshot import RankSnapshot

__all__ = ["Found", "in_words", "judge"]

#: Words for the kinds of findings; causes come before their effects.
_WORDS = {
    FindingKind.MISMATCH: "first divergence",
    FindingKind.LOST: "dead",
    FindingKind.STOPPED: "stopped",
    FindingKind.ORDER: "deadlock",
    FindingKind.MISSING: "missing",
}
# In a job that runs, or ran until it was killed, ranks may wait for each other for so long.
_PATIENCE_NS = 10**9
_SLOW_NS = 10 * 10**9
# Of ranks that were all killed, one that was silent for so long before the others had not gone on until then.
_SILENT_NS = 10**9


@dataclass(frozen=True)
class Found:
    """One thing that is wrong.

    Attributes:
        kind: ``"first divergence"``, ``"dead"``, ``"stopped"``, ``"deadlock"``, ``"missing"``, ``"failure"``,
            ``"slow"`` or ``"killed"``.
        ranks: those that are the cause, as far as that is known.
        text: a sentence without a full stop.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def judge(evidence: Evidence) -> list[Found]:
    """Return what is wrong, causes first; nothing where nothing is."""
    dead, silent_ns, killed = _first_dead(evidence)
    # The others that were killed did what they did until then; of silent ones, nobody knows.
    ranks = {
        rank: replace(one, process="unknown" if rank in silent_ns else "running")
        if (one.is_lost or one.header.signal) and rank not in dead
        else one
        for rank, one in evidence.ranks.items()
    }
    ran = evidence.is_live or killed is not None
    findings = [one for one in diagnose(list(ranks.values())) if _counts(evidence, one, ran)]
    missing = [one for one in findings if one.kind is FindingKind.MISSING]
    found = [_found(one) for one in findings if one not in missing]
    found += [_silent(ranks[rank], for_ns) for rank, for_ns in silent_ns.items()]
    found += [_found(one) for one in missing if not silent_ns.keys() >= set(one.ranks)]
    found += _failures(evidence)
    # Where nothing explains why a call does not end, it is said that it does not.
    least_ns = _SLOW_NS if evidence.is_live else _PATIENCE_NS if ran else -1
    found += [] if found else _slow(evidence, least_ns)
    return [*found, killed] if killed is not None else found


def _found(finding: Finding) -> Found:
    return Found(_WORDS[finding.kind], finding.ranks, finding.text)


def _silent(one: RankSnapshot, for_ns: int) -> Found:
    silent = f"gave no sign for {seconds(for_ns)} before all were killed: hung, stopped or dead"
    return Found(
        "missing", (one.rank,), f"rank {one.rank} ({one.where}) {silent}; at its last sign, it {describe_rank(one)}"
    )


def _first_dead(evidence: Evidence) -> tuple[set[int], dict[int, int], Found | None]:
    """Return the ranks whose death is a cause; and what is to be said where a launcher or the system killed all.

    Of all that were killed, those that had given no sign for a while are returned as well, with the nanoseconds.

    A rank that noted a failure, or was there after another had noted one, was killed because of it. So was one that
    had time to note a signal, which launchers send to the others, unless nobody else failed or they name it.
    """
    asked = {rank for rank, one in evidence.ranks.items() if one.header.signal and one.is_gone}
    if len(asked) == len(evidence.ranks):
        were, first = ("were", "the first") if len(asked) > 1 else ("was", "it")
        text = f"{format_ranks(asked)} {were} ended from outside: {first} {evidence.ranks[min(asked)].end}"
        return set(), {}, Found("killed", tuple(sorted(asked)), text)
    lost = {rank for rank, one in evidence.ranks.items() if one.is_lost and not one.failures}
    failures = [at for at, _ in _noted(evidence)]
    lost = {rank for rank in lost if not failures or evidence.last_sign_ns[rank] <= min(failures)}
    if not lost:
        noted = [failure for one in evidence.ranks.values() for failure in one.failures]
        return {rank for rank in asked if all(rank in failure.ranks for failure in noted)}, {}, None
    if lost != set(evidence.ranks) or len(lost) < 2:
        return lost, {}, None
    signs = sorted((evidence.last_sign_ns[rank], rank) for rank in lost)
    latest = signs[-1][0]
    silent_ns = {rank: latest - at for at, rank in signs if latest - at > _SILENT_NS}
    span = seconds(latest - min(at for at, rank in signs if rank not in silent_ns))
    text = (
        f"all {len(lost)} ranks have ended without a clean end or an error, as if killed from outside; the last "
        f"signs of {format_ranks(lost - silent_ns.keys())} are within {span}"
    )
    return set(), silent_ns, Found("killed", tuple(sorted(lost - silent_ns.keys())), text)


def _counts(evidence: Evidence, finding: Finding, ran: bool) -> bool:
    if finding.kind is FindingKind.LOST:  # who has left with an error of a call names the cause there
        return not any(failure.group for rank in finding.ranks for failure in evidence.ranks[rank].failures)
    if finding.kind not in (FindingKind.ORDER, FindingKind.MISSING):
        return True
    if finding.kind is FindingKind.MISSING and not set(finding.ranks) <= evidence.ranks.keys():
        return False  # without its ring, nobody knows
    return not ran or _waiting_ns(evidence, finding) > _PATIENCE_NS


def _waiting_ns(evidence: Evidence, finding: Finding) -> int:
    ages = [
        evidence.since(rank, call.begin_ns)
        for rank, one in evidence.ranks.items()
        for call in one.waiting_calls()
        if call.group.name == finding.group.name
    ]
    return max(ages, default=0)


def _failures(evidence: Evidence) -> list[Found]:
    """Return the errors that ranks noted, in the order of time."""
    return [found for _, found in _noted(evidence)]


def _noted(evidence: Evidence) -> list[tuple[int, Found]]:
    noted = []
    for rank, one in evidence.ranks.items():
        for failure in one.failures:
            at = one.header.wall_ns + failure.at_ns - one.header.monotonic_ns
            who = f"rank {rank}" if failure.group else f"the program of rank {rank}"
            cause = f": {failure.text}" if failure.text else ""
            noted.append((at, Found("failure", failure.ranks or (rank,), f"{who} raised {failure.error}{cause}")))
    return sorted(noted, key=lambda one: one[0])


def _slow(evidence: Evidence, least_ns: int) -> list[Found]:
    """Return the calls that have not ended for so long, though all ranks that can be seen are in them."""
    by_call: dict[tuple[str, str, int], list[tuple[int, Call]]] = defaultdict(list)
    for rank, one in evidence.ranks.items():
        for call in one.waiting_calls():
            if evidence.since(rank, call.begin_ns) > least_ns:
                by_call[call.group.name, call.name, call.in_series].append((rank, call))
    found = []
    for calls in by_call.values():
        ranks, call = tuple(rank for rank, _ in calls), calls[0][1]
        age = seconds(max(evidence.since(rank, one.begin_ns) for rank, one in calls))
        absent = [rank for rank in call.group.ranks if rank in evidence.absent]
        unseen = f"; the ring of {format_ranks(absent)} is not here" if absent else ""
        where = f" ({call.caller})" if call.caller else ""
        text = f"{call} on {call.group}{where} has been under way for {age} on {format_ranks(ranks)}{unseen}"
        found.append(Found("slow", ranks, text))
    return found


def in_words(found: Iterable[Found]) -> str:
    """Return the verdict in one line: the first thing that was found."""
    first = next(iter(found), None)
    return "nothing wrong" if first is None else " ".join(str(first).split())
