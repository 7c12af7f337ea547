"""Comparison of a run with an earlier one.

A result is slower where its time exceeds the old one by more than the tolerance, and the rounds of the two runs do not
overlap: its fastest round took longer than the slowest of the old run. Faster is the same the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from comm_utils.observability.bench_results import BenchFile, BenchResult
from comm_utils.sizes import format_size

__all__ = ["Comparison", "Pair", "compare", "rendered"]

Key = tuple[str, str, str, str, str, str, str, int, int, int, int]


def _key(one: BenchResult) -> Key:
    return (
        *(one.operation, one.library, one.backend, one.codec, one.way, one.dtype, one.op),
        *(one.root, one.world_size, one.groups, one.size_bytes),
    )


@dataclass(frozen=True)
class Pair:
    """The same measurement, before and now; ``verdict`` is empty, ``slower`` or ``faster``."""

    old: BenchResult
    new: BenchResult
    verdict: str

    @property
    def ratio(self) -> float:
        """Return the new time by the old one."""
        return self.new.time_us / self.old.time_us if self.old.time_us else float("inf")


@dataclass
class Comparison:
    """The common and the different results of two runs; ``differences`` of the systems, in words."""

    pairs: list[Pair] = field(default_factory=list)
    only_old: list[BenchResult] = field(default_factory=list)
    only_new: list[BenchResult] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Something is slower, or nothing could be compared."""
        return not self.pairs or any(one.verdict == "slower" for one in self.pairs)


def compare(old: BenchFile, new: BenchFile, tolerance: float) -> Comparison:
    """``tolerance``: the share of the old time by which a result may be slower."""
    before = {_key(one): one for one in old.results}
    found = Comparison(differences=_differences(old, new))
    for one in new.results:
        earlier = before.pop(_key(one), None)
        if earlier is None:
            found.only_new.append(one)
        else:
            found.pairs.append(Pair(earlier, one, _verdict(earlier, one, tolerance)))
    found.only_old = list(before.values())
    return found


def _verdict(old: BenchResult, new: BenchResult, tolerance: float) -> str:
    if new.time_us > old.time_us * (1 + tolerance) and min(new.rounds_us) > max(old.rounds_us):
        return "slower"
    if old.time_us > new.time_us * (1 + tolerance) and min(old.rounds_us) > max(new.rounds_us):
        return "faster"
    return ""


_FACTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ranks": lambda system: system.get("ranks"),
    "hosts": lambda system: len(system.get("hosts") or ()),
    "cpu": lambda system: system.get("cpu"),
    "devices": lambda system: ", ".join(system.get("devices") or ()) or "none",
    "torch": lambda system: system.get("torch"),
    "comm-orchestrator": lambda system: (system.get("packages") or {}).get("comm-orchestrator"),
}


def _differences(old: BenchFile, new: BenchFile) -> list[str]:
    found = []
    for name, fact in _FACTS.items():
        before, now = fact(old.system), fact(new.system)
        if before != now:
            found.append(f"{name}: {before} before, {now} now")
    for name in ("iters", "warmup_iters", "average"):
        before, now = old.options.get(name), new.options.get(name)
        if before != now:
            found.append(f"--{name}: {before} before, {now} now")
    return found


def rendered(found: Comparison, path: str, tolerance: float) -> list[str]:
    """Return lines for people; comments as in the table above them."""
    lines = ["#", f"# Compared with {path}, tolerance {tolerance:.3g}"]
    lines += [f"# different: {one}" for one in found.differences]
    if not found.pairs:
        lines.append("# FAILED: the two runs have no result in common")
    else:
        lines += _table(found.pairs)
    for what, results in (("only before", found.only_old), ("only now", found.only_new)):
        sizes: dict[str, list[str]] = {}
        for one in results:
            sizes.setdefault(_named(one), []).append(format_size(one.size_bytes))
        lines += [f"# {what}: {name}: {', '.join(of)}" for name, of in sizes.items()]
    slower, faster = (sum(one.verdict == verdict for one in found.pairs) for verdict in ("slower", "faster"))
    if found.pairs:
        state = "FAILED" if slower else "OK"
        lines.append(f"# {len(found.pairs)} compared, {slower} slower, {faster} faster : {state}")
    return lines


def _table(pairs: Sequence[Pair]) -> list[str]:
    width = max(len(_named(one.new)) for one in pairs)
    header = f"{'result':<{width}}  {'size':>12}  {'old':>10}  {'new':>10}  {'new/old':>7}"
    units = f"{'':<{width}}  {'(B)':>12}  {'(us)':>10}  {'(us)':>10}"
    lines = [f"# {header}", f"# {units}"]
    for one in pairs:
        times = f"{one.old.time_us:>10.2f}  {one.new.time_us:>10.2f}  {one.ratio:>7.3f}  {one.verdict}"
        lines.append(f"  {_named(one.new):<{width}}  {one.new.size_bytes:>12}  {times}".rstrip())
    return lines


def _named(one: BenchResult) -> str:
    parts = [f"{one.library}/{one.backend}", one.codec, one.operation, "" if one.is_empty else one.way]
    parts += [one.dtype, one.op, f"root {one.root}" if one.root >= 0 else "", f"{one.world_size} ranks"]
    return " ".join(part for part in parts if part)
