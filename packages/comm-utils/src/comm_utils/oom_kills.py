"""Processes that the kernel has killed for lack of memory: they leave no message, and nobody else says so."""

from __future__ import annotations

from pathlib import Path

__all__ = ["OOM_KILLS", "OomKills"]

_VMSTAT = Path("/proc/vmstat")


class OomKills:
    """Counts them since the start, on the whole host: the kernel counts those of containers' limits there as well."""

    def __init__(self, path: Path = _VMSTAT) -> None:
        self._path = path
        self._before: int | None = None

    def begin(self) -> None:
        """Note how many there were before a world began."""
        self._before = self._count()

    def since_begin(self) -> int:
        """Return how many there were since then; 0 where that is not known."""
        now = self._count()
        return 0 if self._before is None or now is None else max(0, now - self._before)

    def _count(self) -> int | None:
        try:
            lines = self._path.read_text().splitlines()
        except (OSError, ValueError):
            return None
        found = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        return int(found[0]) if found and found[0].isdigit() else None


#: Those since the world of this process began.
OOM_KILLS = OomKills()
