"""Run schedules on real processes, and compare what each rank got at each step with the model."""

from __future__ import annotations

from collections.abc import Iterator

from comm_utils.testing import patience
from faults.cells import BACKENDS
from faults.expected import LIMIT_S
from faults.host import Host
from faults.job import STRICT, run_job
from faults.model import RIGHT, predict
from faults.record import Record, Told
from faults.scene import Spec
from faults.schedule import Schedule, make_schedule

__all__ = ["differences", "run_schedule"]


def run_schedule(seed: int, host: Host) -> tuple[int, list[str]]:
    """Run one, print how it ended, and return its seed and how it differs from the model."""
    schedule = make_schedule(seed)
    _, backend, environ = BACKENDS[schedule.backend]
    spec = Spec(
        scene="scheduled:play",
        moment="",
        backend=backend,
        rank=0,
        world_size=schedule.world_size,
        culprit=schedule.culprit,
        survivors=[rank for rank in schedule.groups[0] if not (schedule.dies and rank == schedule.culprit)],
        folder="",
        ports=[],
        seed=seed,
    )
    # What differs is found before data moves, so that the step at which it is found can be told.
    strict = STRICT if schedule.fault == "differs" else {}
    record = run_job(spec, {**environ, **strict}, [host])
    problems = list(differences(schedule, record))
    what = f"rank {schedule.culprit} {schedule.fault} at step {schedule.at} on {schedule.backend}"
    print(f"{'as the model says' if not problems else 'NOT'}: seed {seed}, {what} ({record.seconds:.1f} s)", flush=True)
    for problem in problems:
        print(f"    {problem}", flush=True)
    return seed, problems


def differences(schedule: Schedule, record: Record) -> Iterator[str]:
    """Yield a sentence for each step that ended otherwise than predicted, and for what was left behind."""
    predicted = predict(schedule)
    if record.hung:
        yield f"ranks {record.hung} hang"
    for name, left in (("processes", record.processes), ("files", record.files), ("listening", record.listening)):
        if left:
            yield f"{name}: {left} left"
    for told in record.ranks:
        yield from (f"rank {told.rank}, {problem}" for problem in _of_rank(schedule, told, predicted[told.rank]))


def _of_rank(schedule: Schedule, told: Told, predicted: dict[int, frozenset[str]]) -> Iterator[str]:
    ended = {int(one["call"]): one for one in (*told.of("returned"), *told.of("raised")) if one["call"].isdigit()}
    begun = {one["call"]: one["t"] for one in told.of("begin")}
    for number, allowed in predicted.items():
        step = f"step {number} ({schedule.steps[number].operation} of {schedule.groups[schedule.steps[number].group]})"
        if number not in ended:
            yield f"{step}: did not end, predicted {sorted(allowed)}"
            return
        one = ended[number]
        got = (RIGHT if one["right"] else "a wrong result") if one["event"] == "returned" else one["kinds"][0]
        if got not in allowed and not set(one.get("kinds", ())) & allowed:
            yield f"{step}: got {got}, predicted {' or '.join(sorted(allowed))} {one.get('message', '')[:200]}"
        seconds = one["t"] - begun[str(number)]
        if seconds > LIMIT_S + patience():
            yield f"{step}: ended after {seconds:.1f} s"
    for number in ended.keys() - predicted.keys():
        yield f"step {number}: was not to be made"
    dies = schedule.dies and told.rank == schedule.culprit
    if not dies and (told.exit_code != 0 or not told.of("destroyed")):
        yield f"exit status {told.exit_code}"
