"""Arguments of ``init_distributed`` that are wrong by themselves: one process, before anything starts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import comm_orchestrator as dist


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"timeout": 0}, "init_distributed: timeout: got 0, expected"),
        ({"timeout": timedelta(0)}, "init_distributed: timeout: got 0.0, expected"),
        ({"distributed_port": 70000}, "init_distributed: distributed_port: got 70000, expected"),
        ({"dist_backend": 5}, "init_distributed: dist_backend: got 5, expected"),
        ({"init_method": 5}, "init_distributed: init_method: got 5, expected"),
        ({"auto_mpi_discovery": "perhaps"}, "init_distributed: auto_mpi_discovery: got 'perhaps', expected"),
    ],
)
def test_a_wrong_argument_has_the_name_that_the_program_gave(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(dist.ConfigurationError) as found:
        dist.init_distributed(**arguments, verbose=False)
    assert str(found.value).startswith(text)


def test_a_backend_that_cannot_be_had_is_named_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMM_PROCESS_GROUP__BACKEND", "glooo")
    start = "^environment variable COMM_PROCESS_GROUP__BACKEND: process_group.backend: backend 'glooo' is not installed"
    with pytest.raises(dist.BackendUnavailableError, match=start):
        dist.init_distributed(verbose=False)
    with pytest.raises(dist.BackendUnavailableError, match=r"^init_distributed: dist_backend: backend 'glo' is"):
        dist.init_distributed("glo", verbose=False)
