"""The environment variables of a rank, and a port for its rendezvous."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comm_utils.testing.payload import value_for

__all__ = ["RUN_TOKEN", "PortReservation", "new_token", "rank_environment", "template_environment"]

RUN_TOKEN = "_COMM_UTILS_TESTING_RUN"
"""Variable that every process of a run inherits, so that strays can be found by it."""

_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)
_LAUNCHER_PREFIXES = (
    *("TORCHELASTIC_", "PET_", "SLURM_", "SRUN_", "SBATCH_", "SALLOC_", "OMPI_COMM_WORLD_", "PRTE_LAUNCHED", "PMIX_"),
    *("PMI_", "I_MPI_HYDRA_", "HYDRA_", "HYDI_", "MV2_COMM_WORLD_", "PALS_", "AZ_BATCH", "AZUREML_", "SM_"),
)

_ATTEMPTS = 1000
_TOKEN_BYTES = 16


def new_token() -> tuple[str, str]:
    """Return a token that no other run has, and the value of :data:`RUN_TOKEN` for its ranks.

    A run inside a rank keeps the outer token in front, so that the outer run finds its strays too.
    """
    token = os.urandom(_TOKEN_BYTES).hex()
    return token, _after_outer_token(token)


def _after_outer_token(token: str) -> str:
    inherited = os.environ.get(RUN_TOKEN)
    return f"{inherited}:{token}" if inherited else token


def template_environment() -> dict[str, str]:
    """Return the environment of a process from which ranks are forked: a rank's without what differs between runs."""
    placeholder = "0" * 2 * _TOKEN_BYTES
    environ = rank_environment(0, 1, 1, _after_outer_token(placeholder), None)
    return {name: value for name, value in environ.items() if name not in _LAUNCHER_VARIABLES}


def rank_environment(
    rank: int, world_size: int, port: int | None, token: str, extra: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return the environment of one rank: the runner's own, without launcher variables it may have; then torchrun's.

    Args:
        rank: which rank.
        world_size: number of ranks.
        port: rendezvous port on 127.0.0.1; None for an environment without any launcher variable.
        token: value of :data:`RUN_TOKEN`.
        extra: variables to set last; None as a value removes one, and a value may be per rank.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    environ[RUN_TOKEN] = token
    if port is not None:
        environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(world_size),
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
    for name, value in (extra or {}).items():
        chosen = value_for(value, rank, world_size)
        if chosen is None:
            environ.pop(name, None)
        else:
            environ[name] = str(chosen)
    return environ


class PortReservation:
    """A TCP port that no other run takes and that nothing is given by chance, until :meth:`close`.

    The port is left unbound for rank 0, so binding it cannot reserve it. Instead it lies outside the range from
    which the kernel serves outgoing connections, and an abstract Unix socket of its number, which vanishes with
    its process, keeps other runs off it.
    """

    def __init__(self) -> None:
        self._claim: socket.socket | None = None
        candidates = _candidates()
        for _ in range(_ATTEMPTS):
            port = candidates[int.from_bytes(os.urandom(4), "big") % len(candidates)]
            claim = _claim(port)
            if claim is None:
                continue
            if _is_free(port):
                self._claim, self.port = claim, port
                return
            claim.close()
        raise RuntimeError(f"no free TCP port found between {candidates[0]} and {candidates[-1]}")

    def close(self) -> None:
        """Let others have the port."""
        if self._claim is not None:
            self._claim.close()


def _candidates() -> range:
    first, last = 32768, 60999
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    below, above = range(10000, first), range(last + 1, 65536)
    largest = max(below, above, key=len)
    return largest if len(largest) >= 100 else range(10000, 65536)


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            claim.bind(f"\0comm-utils-testing-port-{port}")
        except OSError:
            claim.close()
            return None
    return claim


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family)
        except OSError:  # no such protocol on this host
            continue
        with probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if family == socket.AF_INET6 and error.errno != errno.EADDRINUSE:  # compiled in, yet switched off
                    continue
                return False
    return True
