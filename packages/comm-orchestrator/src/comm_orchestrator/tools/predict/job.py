"""The prediction of a recorded job on other hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from comm_orchestrator.tools.predict.placement import Placement
from comm_orchestrator.tools.predict.simulation import Exchange, programs, simulate
from comm_utils.errors import ArgumentError
from comm_utils.observability.cost_model import Estimate, Estimator, NoFitError, Shape
from comm_utils.observability.traces import RankTrace
from comm_utils.sizes import encoded_size_bytes

__all__ = ["Interval", "Job", "Row", "predict"]


@dataclass(frozen=True)
class Interval:
    """A predicted time in seconds, and between which it is."""

    value_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0


@dataclass
class Row:
    """Exchanges that are alike.

    Attributes:
        codec: what compressed them; empty for nothing.
        recorded_s: what they took in the recorded job, without waiting for ranks that came later, or for earlier
            operations of the group.
        kept: the model has no fit: the recorded time stands in its place.
    """

    operation: str
    size_bytes: int
    recorded_shape: Shape
    shape: Shape
    estimate: Estimate
    kept: bool = False
    calls: int = 0
    recorded_s: float = 0.0
    codec: str = ""

    @property
    def predicted(self) -> Interval:
        """Return the time of all calls together."""
        if self.kept:
            return Interval(self.recorded_s, self.recorded_s, self.recorded_s)
        each = self.estimate
        return Interval(*(self.calls * us / 1e6 for us in (each.time_us, each.low_us, each.high_us)))


@dataclass
class Job:
    """A recorded job and its prediction.

    Attributes:
        recorded_wall_s: from the first call to the last end.
        wall: the same of the predicted job.
        without_communication_s: the same if every exchange took no time.
        lonely: exchanges of which some rank's record is missing.
    """

    placement: Placement
    rows: list[Row] = field(default_factory=list)
    recorded_wall_s: float = 0.0
    wall: Interval = Interval()
    without_communication_s: float = 0.0
    lonely: int = 0
    dropped: int = 0

    @property
    def communication(self) -> Interval:
        """Return all exchanges one after another, whether the program waited for them or not."""
        all_rows = [row.predicted for row in self.rows]
        return Interval(
            sum(one.value_s for one in all_rows),
            sum(one.low_s for one in all_rows),
            sum(one.high_s for one in all_rows),
        )

    @property
    def marks(self) -> list[str]:
        """Return why intervals are wider, over all rows."""
        return sorted({mark for row in self.rows for mark in row.estimate.marks})


def predict(
    traces: Sequence[RankTrace],
    estimator: Estimator,
    placement: Placement,
    *,
    keep_parts: bool = False,
    keep_recorded: bool = False,
) -> Job:
    """Return the recorded job with the communication that ``estimator`` predicts.

    Args:
        traces: of all ranks, aligned.
        keep_parts: in groups that grow, each rank's part of a gathered or scattered array stays, not the whole array.
        keep_recorded: what the model has no fit of takes what it took in the recorded job.

    Raises:
        ArgumentError: nothing was recorded; the groups do not fit; the model has no fit of an operation.
    """
    world = {trace.rank for trace in traces}
    for trace in traces:
        for operation in {event.operation for event in trace.events}:
            if not operation.ranks or not world.issuperset({*operation.ranks, operation.root} - {-1}):
                raise ArgumentError(
                    f"got a {operation.operation} of ranks {list(operation.ranks)} in a trace of {len(world)} ranks; "
                    "expected ranks of the job: the trace is damaged"
                )
    steps, exchanges = programs(traces)
    if not exchanges:
        raise ArgumentError("got a trace without communication; expected at least one operation")
    job = Job(placement, dropped=sum(trace.dropped for trace in traces))
    rows: dict[tuple[object, ...], Row] = {}
    of_exchange: dict[int, Row] = {}
    lacking: dict[str, str] = {}
    for exchange in exchanges:
        operation = exchange.operation
        key = (
            *(operation.operation, exchange.size_bytes, operation.ranks, exchange.queue, operation.dtype, operation.op),
            *(operation.codec, operation.wire_bytes),
        )
        row = rows.get(key)
        if row is None:
            try:
                row = _row(exchange, estimator, placement, keep_parts, keep_recorded)
            except NoFitError as error:
                lacking.setdefault(operation.operation, str(error))
                continue
            rows[key] = row
        row.calls += 1
        row.recorded_s += exchange.transfer_ns / 1e9
        of_exchange[id(exchange)] = row
    if lacking:
        raise NoFitError(
            f"{next(iter(lacking.values()))}"
            + (f" (and none of {', '.join(list(lacking)[1:])})" if len(lacking) > 1 else "")
            + "; or keep recorded times of what is not in the model with --keep-recorded"
        )
    job.rows = _merged(rows.values())
    events = [event for trace in traces for event in trace.events]
    job.recorded_wall_s = (max(e.end_ns for e in events) - min(e.begin_ns for e in events)) / 1e9

    def wall_s(which: str) -> float:
        run = simulate(
            steps,
            {
                id(one): one.transfer_ns
                if of_exchange[id(one)].kept
                else 1e3 * getattr(of_exchange[id(one)].estimate, which)
                for one in exchanges
            },
        )
        job.lonely = run.lonely
        return run.wall_ns / 1e9

    job.wall = Interval(wall_s("time_us"), wall_s("low_us"), wall_s("high_us"))
    job.without_communication_s = simulate(steps, dict.fromkeys(map(id, exchanges), 0.0)).wall_ns / 1e9
    return job


def _row(exchange: Exchange, estimator: Estimator, placement: Placement, keep_parts: bool, keep_recorded: bool) -> Row:
    operation = exchange.operation
    ranks = operation.ranks
    if operation.pattern.is_message:
        shape, recorded = _message(exchange, placement)
    else:
        shape = placement.shape(ranks)
        recorded = Shape(len(ranks), len({placement.hosts[rank] for rank in ranks}))
    size = exchange.size_bytes
    if keep_parts and operation.pattern.whole_array:
        size = size * shape.ranks // recorded.ranks
    encoded = 0.0
    if operation.codec and exchange.size_bytes:  # in groups of another size, a size shrinks as it did when recorded
        sent_as = encoded_size_bytes(operation.operation, operation.wire_bytes, recorded.ranks)
        encoded = size * sent_as / exchange.size_bytes
    try:
        estimate = estimator.estimate(
            operation.operation, size, shape, operation.dtype, operation.op, operation.codec, encoded
        )
    except NoFitError:
        if not keep_recorded:
            raise
        nothing = Estimate(0.0, 0.0, 0.0)
        return Row(operation.operation, size, recorded, shape, nothing, kept=True, codec=operation.codec)
    return Row(operation.operation, size, recorded, shape, estimate, codec=operation.codec)


def _message(exchange: Exchange, placement: Placement) -> tuple[Shape, Shape]:
    """Return the shapes of the two ends; as far apart as can be where one of them is not known."""
    pair = sorted({*exchange.ranks, exchange.operation.root} - {-1})
    if len(pair) != 2:
        return Shape(2, min(2, placement.nodes)), Shape(2, min(2, placement.recorded.nodes))
    # Both ends stay where their ranks are, also where these two are all there were.
    high = pair[-1]
    nodes = len({placement.hosts[rank] for rank in pair})
    if placement.as_recorded:
        return Shape(2, nodes), Shape(2, nodes)
    if high >= placement.world_size:
        raise ArgumentError(
            f"got {placement}; expected at least {high + 1}, because rank {high} of "
            "the recorded job sends or receives messages"
        )
    return Shape(2, len({rank // placement.per_node for rank in pair})), Shape(2, nodes)


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Rows of different groups of one shape together, the longest first."""
    merged: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (row.operation, row.size_bytes, row.recorded_shape, row.shape, row.estimate, row.kept, row.codec)
        if key in merged:
            merged[key].calls += row.calls
            merged[key].recorded_s += row.recorded_s
        else:
            merged[key] = row
    return sorted(merged.values(), key=lambda row: -row.predicted.value_s)
