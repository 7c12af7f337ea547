"""Saved error feedback on its way into a world of another size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comm_collectives.compression import Compression


@pytest.mark.parametrize("method", ["int4", "powersgd"])
def test_resharded_states_are_on_the_cpu_whatever_the_default_device(method: str) -> None:
    tensor = {"local": torch.ones(64), "other": torch.zeros(4, 4), "average": False}
    states: list[dict[str, Any]] = [{"compression": method, "tensors": {"a": tensor}}] * 2
    if method == "int4":
        tensor["other"] = torch.ones(32)
    with torch.device("meta"):
        moved = Compression.reshard(Compression.reshard(states, 3), 1)
    found = moved[0]["tensors"]["a"]
    assert {found[name].device.type for name in ("local", "other")} == {"cpu"}
    assert found["local"].sum() == (192 if method == "int4" else 128)
