"""Choice of the backend: found through entry points, chosen by device, agreed between ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import cast

from comm_config.errors import closest
from comm_utils.backend import ENTRY_POINT_GROUP, Availability, Backend, BackendProvider, Setup, without_spaces
from comm_utils.errors import BackendUnavailableError
from comm_utils.log import logger
from comm_utils.plugins import by_name, entry_points, let_signals_through, load, said_twice
from comm_utils.world_agreement import leave_world

__all__ = [
    "COMMON_BACKENDS",
    "Choice",
    "activate",
    "adopt",
    "agree",
    "available_backends",
    "choose",
    "known_backends",
    "likely_backend",
    "unavailable_reasons",
    "warn_of_fall_back",
    "within_host",
]

# What a kind of device prefers, best first. "cpu:gloo,cuda:nccl" serves CPU tensors beside the accelerator's.
_PREFERRED = {
    "cuda": ("cpu:gloo,cuda:nccl", "gloo"),
    "xpu": ("cpu:gloo,xpu:xccl", "cpu:gloo,xpu:oneccl_bindings_for_pytorch", "gloo"),
    "cpu": ("ccl", "gloo"),
}
# Intel's discontinued bindings: nothing requires them, and on CPUs they are used by name only.
_BINDINGS = "oneccl_bindings_for_pytorch"
_REMEDIES = {
    _BINDINGS: "Intel has discontinued it, and nothing requires it",
    "ccl": "install it with: pip install 'comm-orchestrator[ccl]'",
    "mpi": "it needs a torch built from source beside an MPI",
}
#: Names that exist whatever is installed.
COMMON_BACKENDS = {
    *_REMEDIES,
    *(one.rpartition(":")[2] for names in _PREFERRED.values() for name in names for one in name.split(",")),
}


# Of the members that a backend does not have.
_MOST_SHOWN = 5
_FUNCTIONS = ("availability", "initialize", "adopts", "adopt")


@dataclass(frozen=True)
class Choice:
    """A backend, why it was taken, and what kept the ranks from better ones."""

    backend: str
    reason: str
    fall_back_reason: str = ""


def _providers() -> dict[str, BackendProvider]:
    """Return every installed package that offers backends, torch's own last so that a closer match is asked first."""
    found = by_name(entry_points(ENTRY_POINT_GROUP))
    return {name: _provider(name, found[name]) for name in sorted(found, key=lambda name: name == "torch")}


def _provider(name: str, entries: Sequence[EntryPoint]) -> BackendProvider:
    loaded = [_load(entry) for entry in entries]
    return loaded[0] if len(loaded) == 1 else _Contradicting(name, loaded, said_twice(entries), "uninstall all but one")


def _load(entry: EntryPoint) -> BackendProvider:
    try:
        found = load(entry)
    except Exception as error:  # whatever a package does at import, the others stay usable
        let_signals_through(error)
        why = f"{entry.value} cannot be imported ({type(error).__name__}: {error})"
        return _Unusable(entry.name, why, "reinstall the package, or what it misses")
    missing = [name for name in _FUNCTIONS if not callable(getattr(found, name, None))]
    if missing:
        why = f"{entry.value} has no {' and no '.join(missing)}; expected the functions of a BackendProvider"
        return _Unusable(entry.name, why, "correct or update the package")
    return cast(BackendProvider, found)


def _availability(name: str, provider: BackendProvider) -> Mapping[str, Availability]:
    """Return what ``provider``, of the entry point ``name``, offers; whatever it does, the others stay usable."""
    try:
        found = dict(provider.availability())
    except (Exception, SystemExit) as error:
        let_signals_through(error)
        why = f"its package raised {type(error).__name__} in availability(): {error}"
    else:
        wrong = next((one for one in found.values() if not isinstance(one, Availability)), None)
        capital = next((one for one in map(str, found) if one != one.lower()), None)
        if wrong is not None:
            why = (
                f"its package returned {type(wrong).__name__} in availability(); expected an Availability for each name"
            )
        elif capital is not None:
            why = f"its package names a backend {capital!r} in availability(); expected lower case"
        else:
            return found
    return {name: _OfPackage(False, why, "correct, update or uninstall the package")}


@dataclass(frozen=True)
class _OfPackage(Availability):
    """Stands for the backends of a package, whose names are not known as it cannot be used."""


class _Unusable:
    """Stands in for a package that cannot be used, and says so."""

    def __init__(self, name: str, why: str, remedy: str) -> None:
        self._name, self._why, self._remedy = name, why, remedy

    def availability(self) -> Mapping[str, Availability]:
        return {self._name: _OfPackage(False, self._why, self._remedy)}

    def initialize(self, setup: Setup) -> Backend:
        raise BackendUnavailableError(f"backend {setup.backend!r} cannot be used: {self._why}")

    def adopts(self, backend: str) -> bool:
        return False

    def adopt(self) -> Backend:
        raise BackendUnavailableError(self._why)


class _Contradicting(_Unusable):
    """Stands in for packages of one name, of which ranks could take different ones."""

    def __init__(self, name: str, providers: Sequence[BackendProvider], why: str, remedy: str) -> None:
        super().__init__(name, why, remedy)
        self._providers = providers

    def availability(self) -> Mapping[str, Availability]:
        names = {self._name, *(name for one in self._providers for name in _availability(self._name, one))}
        return {name: Availability(False, self._why, self._remedy) for name in sorted(names)}

    def adopts(self, backend: str) -> bool:
        return any(one.adopts(backend) for one in self._providers)

    def adopt(self) -> Backend:
        raise BackendUnavailableError(f"the backend of {self._name!r} cannot be used: {self._why}; {self._remedy}")


def available_backends() -> dict[str, Availability]:
    """Return every library that an installed package can activate, and whether and why it can be used here."""
    result: dict[str, Availability] = {}
    for provider_name, provider in _providers().items():
        for name, availability in _availability(provider_name, provider).items():
            result.setdefault(name, availability)
    return result


def known_backends() -> set[str]:
    """Return the names of all backends that exist, whether or not they are installed here."""
    return {*available_backends(), *COMMON_BACKENDS}


def likely_backend(name: str, known: Iterable[str]) -> str | None:
    """Return the backend of which ``name`` is most likely a misspelling."""
    return closest(name, known, cutoff=0.6)


def choose(backend: str, device_type: str = "cpu") -> Choice:
    """Return the backend that somebody named.

    ``"ccl"`` stands for Intel's bindings where they are installed and comm-backend-ccl cannot be used.

    Args:
        device_type: the device that this process computes on.

    Raises:
        BackendUnavailableError: it cannot be had; names the package or variable that is missing.
    """
    name = without_spaces(backend).lower()
    available = available_backends()
    if _BINDINGS in available:
        name = _with_bindings(name, device_type, "ccl" in available and available["ccl"].usable)
    problem = _problem(name, available) or _wrong_device(name)
    if problem is not None:
        raise BackendUnavailableError(problem)
    return Choice(name, "named")


def _wrong_device(backend: str) -> str | None:
    import torch  # this module loads without torch

    for device in [part.rpartition(":")[0] for part in backend.split(",") if ":" in part]:
        try:
            torch.device(device)
        except RuntimeError:
            return (
                f"backend {backend!r} names the device {device!r}, which torch does not have; expected a form such as "
                "'cpu:gloo,cuda:nccl'"
            )
    return None


def _with_bindings(backend: str, device_type: str, has_ccl: bool) -> str:
    """Return ``backend`` with the bindings by their own name, and with the devices that they are to serve."""
    if backend == _BINDINGS or (backend == "ccl" and not has_ccl):
        return f"cpu:gloo,xpu:{_BINDINGS}" if device_type == "xpu" else f"cpu:{_BINDINGS}"
    parts = [part.rpartition(":") for part in backend.split(",")]
    theirs = [name == "ccl" and (device == "xpu" or not has_ccl) for device, _, name in parts]
    return ",".join(
        f"{device}{colon}{_BINDINGS if is_theirs else name}"
        for (device, colon, name), is_theirs in zip(parts, theirs, strict=True)
    )


def _problem(backend: str, available: Mapping[str, Availability]) -> str | None:
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        found = available.get(name)
        if found is None:
            usable = ", ".join(sorted(name for name, one in available.items() if one.usable))
            guess = likely_backend(name, {*available, *COMMON_BACKENDS})
            hint = f" (did you mean {guess!r}?)" if guess else ""
            remedy = _REMEDIES.get(name, f"check the spelling{hint}, or install the package that provides it")
            broken = [f"{one.reason}; {one.remedy}" for one in available.values() if isinstance(one, _OfPackage)]
            why = f", or its package cannot be used: {'; '.join(broken)}; else" if broken else ";"
            return f"backend {name!r} is not installed (usable here: {usable}){why} {remedy}"
        if not found.usable:
            return f"backend {name!r} cannot be used: {found.reason}" + (f"; {found.remedy}" if found.remedy else "")
    return None


def unavailable_reasons(device_type: str) -> dict[str, str | None]:
    """Return why this rank cannot use each backend for ``device_type``, best backend first.

    None where nothing does.
    """
    available = available_backends()
    return {backend: _problem(backend, available) for backend in _PREFERRED[device_type]}


def within_host(device_type: str) -> dict[str, str]:
    """Backends for ``device_type`` that this rank can use with ranks of its own host alone, and why."""
    available = available_backends()
    return {name: available[name].within_host for name in _PREFERRED[device_type] if _is_within_host(available, name)}


def _is_within_host(available: Mapping[str, Availability], name: str) -> bool:
    return name in available and available[name].usable and bool(available[name].within_host)


def agree(device_type: str, answers: Sequence[Mapping[str, str | None]]) -> Choice:
    """Return the best backend for ``device_type`` that every rank can use.

    Args:
        answers: of :func:`unavailable_reasons`, one a rank.

    Raises:
        BackendUnavailableError: there is none; names a rank and the missing part for each.
    """
    reasons: list[str] = []
    missed: list[str] = []
    for backend in _PREFERRED[device_type]:
        problems = {rank: answer.get(backend) for rank, answer in enumerate(answers) if answer.get(backend)}
        if not problems and all(backend in answer for answer in answers):
            why = (
                f"the best on {device_type} without {' and '.join(missed)}" if missed else f"preferred on {device_type}"
            )
            return Choice(backend, why, "; ".join(reasons))
        rank, problem = next(iter(problems.items()), (0, f"not every rank computes on {device_type}"))
        missed.append(backend.rpartition(":")[2])
        reasons.append(f"rank {rank}: {problem}")
    raise BackendUnavailableError(
        f"no backend for {device_type} tensors can be used by every rank: {'; '.join(reasons)}"
    )


def warn_of_fall_back(choice: Choice, device_type: str) -> None:
    """Say why it is not the preferred one, at level INFO where that was never installed, which is no fault."""
    preferred = _PREFERRED[device_type][0]
    if choice.fall_back_reason:
        level = logging.WARNING if preferred.rpartition(":")[2] in available_backends() else logging.INFO
        logger.log(level, "%s is used instead of %s: %s", choice.backend, preferred, choice.fall_back_reason)


def activate(setup: Setup) -> Backend:
    """Bring up the backend of ``setup`` through the package that provides it."""
    first = setup.backend.split(",")[0].rpartition(":")[2]
    for name, provider in _providers().items():
        if first in _availability(name, provider):
            return _started(provider, setup, name)
    raise BackendUnavailableError(f"no installed package provides backend {setup.backend!r}")


def _started(provider: BackendProvider, setup: Setup, name: str) -> Backend:
    import torch.distributed as c10d  # this module loads without torch

    existed = c10d.is_initialized()
    try:
        return _checked(provider.initialize(setup), name)
    except BaseException as error:
        leave_world(setup, error)
        if c10d.is_initialized() and not existed:  # a later call would adopt it
            c10d.destroy_process_group()
        raise


def _checked(backend: Backend, name: str) -> Backend:
    """Return a backend that has all that calls ask of one; a world without it would fail in its first calls."""
    members = {*vars(Backend), *Backend.__annotations__}
    missing = sorted(member for member in members if not member.startswith("_") and not hasattr(backend, member))
    if not missing:
        return backend
    shown = ", ".join(missing[:_MOST_SHOWN]) + (", ..." if len(missing) > _MOST_SHOWN else "")
    raise BackendUnavailableError(
        f"the package of backend {name!r} returned {type(backend).__name__}, which lacks {len(missing)} of the members "
        f"of comm_utils.backend.Backend: {shown}; correct or update the package"
    )


def adopt(backend: str) -> Backend:
    """Serve a ``torch.distributed`` that was initialised elsewhere with ``backend``."""
    for name, provider in _providers().items():
        try:
            serves = provider.adopts(backend)
        except Exception as error:
            let_signals_through(error)
            logger.warning("backend %s is left out: its adopts() raised %s: %s", name, type(error).__name__, error)
            continue
        if serves:
            return _checked(provider.adopt(), name)
    raise BackendUnavailableError(
        f"torch.distributed runs on {backend!r} and no installed package can adopt it; install comm-backend-torch"
    )
