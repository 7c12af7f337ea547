"""A postmortem for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from comm_orchestrator.rendezvous.records import format_ranks
from comm_orchestrator.tools.output import printable
from comm_orchestrator.tools.postmortem.evidence import Evidence
from comm_orchestrator.tools.postmortem.verdict import Found, in_words
from comm_orchestrator.tools.rings import JobRings, seconds, state_in_words
from comm_utils.flight_recorder import Call
from comm_utils.flight_recorder.snapshot import RankSnapshot

__all__ = ["as_json", "as_text"]

_MOST_RANKS = 64
_STACK_LINES = 12


def as_text(job: JobRings, evidence: Evidence, found: Sequence[Found], calls: int) -> str:
    """Return the verdict, what else is wrong, and what each rank did last.

    Args:
        calls: so many of the last calls of each rank.
    """
    lines = [f"verdict: {in_words(found)}"]
    lines += [f"also {one}" for one in found[1:] if one.kind != "failure"]
    lines += ["", *_job(job, evidence)]
    culprits = set(found[0].ranks) if found else set()
    shown = sorted(sorted(evidence.ranks, key=lambda rank: (rank not in culprits, rank))[:_MOST_RANKS])
    for rank in shown:
        lines += ["", *_rank(evidence, rank, calls)]
    if len(shown) < len(evidence.ranks):
        lines += ["", f"{len(evidence.ranks) - len(shown)} more ranks: --json has all"]
    return printable("\n".join(lines), lines=True) + "\n"


def _job(job: JobRings, evidence: Evidence) -> Iterator[str]:
    at = datetime.fromtimestamp(evidence.now_ns / 1e9).isoformat(sep=" ", timespec="seconds")
    when = f"at {at}" if evidence.is_live else f"has ended; times are before its last sign, {at}"
    yield f"job {job.name} of {job.world_size} rank{'s' if job.world_size != 1 else ''}, {when}"
    for one in job.damaged:
        yield f"damaged: {one}"
    if job.absent:
        damaged = "damaged, " if job.damaged else ""
        yield f"no ring: {format_ranks(job.absent)} ({damaged}of another host, or removed at a clean end)"
    if job.other_jobs:
        yield f"other jobs in {job.folder}: {', '.join(job.other_jobs[-8:])}"


def _rank(evidence: Evidence, rank: int, calls: int) -> Iterator[str]:
    one = evidence.ranks[rank]
    header = one.header
    yield f"rank {rank}: {state_in_words(one)}, pid {header.pid} on {header.host or 'an unknown host'}"
    last = _last_by_group(one)
    if not last:
        yield "  no calls"
    for call in last:
        number = f"message {call.in_series}" if call.is_message else f"call {call.in_series}"
        where = f", {call.caller}" if call.caller else ""
        yield f"  {number} on {call.group}: {call} {_progress(evidence, rank, call)}{where}"
    for failure in one.failures[-4:]:
        cause = f": {failure.text}" if failure.text else ""
        yield f"  raised {failure.error} {seconds(evidence.since(rank, failure.at_ns))} ago{cause}"
    if one.stack is not None:
        age = seconds(evidence.since(rank, one.stack.at_ns))
        for at, text in enumerate(one.stack.by_thread):
            yield f"  stack{' of another thread' if at else ''}, {age} ago:"
            yield from (f"    {line}" for line in text.rstrip().splitlines()[-_STACK_LINES:])
    if calls:
        yield f"  last {min(calls, len(one.calls))} calls:"
        for call in one.calls[-calls:]:
            where = f", {call.caller}" if call.caller else ""
            yield f"    {call.number}: {call} on {call.group} {_progress(evidence, rank, call)}{where}"


def _last_by_group(snapshot: RankSnapshot) -> list[Call]:
    """Return the last call of each group, the latest first."""
    found: dict[str, Call] = {}
    for call in snapshot.calls:
        found[call.group.name] = call
    return sorted(found.values(), key=lambda call: -call.begin_ns)


def _progress(evidence: Evidence, rank: int, call: Call) -> str:
    if call.is_open:
        background = "" if call.is_waited_for else " in the background"
        return f"under way{background} for {seconds(evidence.since(rank, call.begin_ns))}"
    took = seconds(call.end_ns - call.begin_ns)
    return f"{'failed' if call.failed else 'ended'} {seconds(evidence.since(rank, call.end_ns))} ago, after {took}"


def as_json(job: JobRings, evidence: Evidence, found: Sequence[Found], calls: int) -> dict[str, Any]:
    """Return what is found, for programs; ages are seconds."""
    first = found[0] if found else None
    return {
        "verdict": {
            "kind": "nothing wrong" if first is None else first.kind,
            "ranks": [] if first is None else list(first.ranks),
            "text": "" if first is None else first.text,
        },
        "findings": [{"kind": one.kind, "ranks": list(one.ranks), "text": one.text} for one in found],
        "job": job.name,
        "folder": str(job.folder),
        "world_size": job.world_size,
        "is_live": evidence.is_live,
        "time_s": evidence.now_ns / 1e9,
        "ranks": [_rank_json(evidence, rank, calls) for rank in evidence.ranks],
        "absent": list(evidence.absent),
        "damaged": job.damaged,
    }


def _rank_json(evidence: Evidence, rank: int, calls: int) -> dict[str, Any]:
    one = evidence.ranks[rank]
    return {
        "rank": rank,
        "host": one.header.host,
        "pid": one.header.pid,
        "state": state_in_words(one),
        "program": one.header.program,
        "groups": [_call_json(evidence, rank, call) for call in _last_by_group(one)],
        "calls": [_call_json(evidence, rank, call) for call in (one.calls[-calls:] if calls else ())],
        "failures": [
            {
                "error": failure.error,
                "text": failure.text,
                "group": failure.group,
                "ranks": list(failure.ranks),
                "age_s": evidence.since(rank, failure.at_ns) / 1e9,
            }
            for failure in one.failures
        ],
        "stack": None if one.stack is None else "".join(one.stack.by_thread[:1]),
        "stacks_of_other_threads": [] if one.stack is None else list(one.stack.by_thread[1:]),
        "stack_age_s": None if one.stack is None else evidence.since(rank, one.stack.at_ns) / 1e9,
    }


def _call_json(evidence: Evidence, rank: int, call: Call) -> dict[str, Any]:
    group = call.group
    return {
        "group": {"name": group.name, "ranks": list(group.ranks), "description": group.description},
        "number": call.in_series,
        "call": call.name,
        "operation": call.operation,
        "text": str(call),
        "dtype": call.dtype,
        "op": call.op,
        "root": call.root,
        "peer": call.peer,
        "tag": call.tag,
        "elements": call.elements,
        "state": "under way" if call.is_open else "failed" if call.failed else "ended",
        "age_s": evidence.since(rank, call.begin_ns) / 1e9,
        "duration_s": None if call.is_open else (call.end_ns - call.begin_ns) / 1e9,
        "caller": call.caller,
    }
