"""The tests that every backend passes. Needs torch and pytest; import it from here, not from ``comm_utils.testing``."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest

from comm_utils.backend import Availability, Backend
from comm_utils.testing.conformance_provider import load_provider
from comm_utils.testing.ranks import run_ranks, run_ranks_outcomes

__all__ = ["BackendConformance"]

_RANKS = "comm_utils.testing.conformance_ranks"
_COLLECTIVES = "comm_utils.testing.conformance_collectives"
_MESSAGES = "comm_utils.testing.conformance_messages"
_CALLS = "comm_utils.testing.conformance_calls"
_FAST_PATH = "comm_utils.testing.conformance_fast_path"


def _operations() -> dict[str, Any]:
    return {
        name: value for name, value in vars(Backend).items() if inspect.isfunction(value) and not name.startswith("_")
    }


class BackendConformance:
    """Subclass it as ``TestSomething(BackendConformance)`` and say what is tested.

    Attributes:
        provider: of the backend, as its entry point names it: ``"package.module"`` or ``"package.module:attribute"``.
        backend_class: the class that the provider's ``initialize`` returns.
        backend: the name that ``Setup.backend`` gets.
        device: the kind of device on which tensors live.
        world_sizes: numbers of ranks to test with.
        env: environment of the ranks, beside this process's.
        fast_paths: operations that are to have a fast path; others may go without.
        differences: operations whose parameters differ from the contract's on purpose, with the reason.
    """

    provider: ClassVar[str]
    backend_class: ClassVar[type]
    backend: ClassVar[str]
    device: ClassVar[str] = "cpu"
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
    env: ClassVar[dict[str, Any]] = {}
    fast_paths: ClassVar[frozenset[str]] = frozenset()
    differences: ClassVar[dict[str, str]] = {}

    def environment(self, world_size: int) -> dict[str, Any]:
        """Return the environment of so many ranks."""
        return self.env

    def _run(self, target: str, world_size: int, module: str = _RANKS, *args: object) -> None:
        if world_size not in self.world_sizes:
            pytest.skip(f"{self.backend} is tested with {self.world_sizes} ranks")
        run_ranks(
            f"{module}:{target}",
            world_size,
            self.provider,
            self.backend,
            self.device,
            *args,
            timeout_s=120,
            env=self.environment(world_size),
        )

    @pytest.mark.parametrize("operation", sorted(_operations()))
    def test_parameters_are_those_of_the_contract(self, operation: str) -> None:
        expected = inspect.signature(_operations()[operation])
        found = inspect.signature(getattr(self.backend_class, operation))
        same = [(p.name, p.default) for p in expected.parameters.values()] == [
            (p.name, p.default) for p in found.parameters.values()
        ]
        assert same != (operation in self.differences), f"contract: {expected}; backend: {found}"

    def test_availability_is_stated_with_a_reason(self) -> None:
        found = load_provider(self.provider).availability()
        assert self.backend.rpartition(":")[2] in found
        for availability in found.values():
            assert isinstance(availability, Availability)
            assert availability.reason
            assert availability.usable or availability.remedy

    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    def test_native_reductions(self, world_size: int) -> None:
        self._run("reductions", world_size, _COLLECTIVES, self.fast_paths)

    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    def test_native_movements(self, world_size: int) -> None:
        self._run("movements", world_size, _COLLECTIVES)

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_fast_path(self, world_size: int) -> None:
        self._run("fast_path", world_size, _FAST_PATH, self.fast_paths)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_course_of_a_call(self, world_size: int) -> None:
        self._run("during", world_size, _CALLS)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_asynchronous_handles(self, world_size: int) -> None:
        self._run("asynchronous", world_size)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_messages(self, world_size: int) -> None:
        self._run("messages", world_size, _MESSAGES)

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_groups(self, world_size: int) -> None:
        self._run("groups", world_size)

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_state(self, world_size: int) -> None:
        self._run("state", world_size)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_calls_that_differ(self, world_size: int) -> None:
        self._run_to_the_end("differing_calls", world_size)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_lost_peer(self, world_size: int) -> None:
        self._run_to_the_end("lost_peer", world_size)

    def _run_to_the_end(self, target: str, world_size: int) -> None:
        """Run ranks that end without a result, as their world cannot be taken down in good order."""
        if world_size not in self.world_sizes:
            pytest.skip(f"{self.backend} is tested with {self.world_sizes} ranks")
        args = (self.provider, self.backend, self.device)
        env = self.environment(world_size)
        outcomes = run_ranks_outcomes(f"{_RANKS}:{target}", world_size, *args, timeout_s=60, env=env)
        for outcome in outcomes:
            assert outcome.exit_code == 0, outcome
