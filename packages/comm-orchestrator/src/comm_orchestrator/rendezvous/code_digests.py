"""Digests of the code that every rank of a job needs alike: a clone that is older keeps its version's number."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from comm_utils.errors import LaunchError

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["code_digests"]

# Without comm-backend-ccl: hosts may lack it, which the choice of a library knows.
_PACKAGES = ("comm_utils", "comm_config", "comm_backend_torch", "comm_collectives", "comm_orchestrator")


@cache
def code_digests() -> dict[str, str]:
    """Return "the code of PACKAGE" -> a digest of its Python files, as this process first found them.

    Raises:
        LaunchError: they cannot be read.
    """
    try:
        return {f"the code of {name.replace('_', '-')}": _digest(files(name)) for name in _PACKAGES}
    except OSError as error:
        raise LaunchError(
            f"init_distributed: the code of these packages cannot be read, which the ranks compare: {error}"
        ) from error


def _digest(package: Traversable) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for name, file in sorted(_python_files(package, "")):
        content = file.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _python_files(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        stem = entry.name.removesuffix(".py")
        # Python imports no other names, such as .#models.py, the dangling link by which an editor locks a file.
        if not stem.isidentifier() or stem == "__pycache__":
            continue
        if stem != entry.name:
            found.append((name, entry))
        elif entry.is_dir():
            found += _python_files(entry, f"{name}/")
    return found
