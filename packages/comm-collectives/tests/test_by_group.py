"""The world has one setting and one record, by whichever of its names it is given."""

from __future__ import annotations

import pytest
from torch.distributed import ProcessGroup, distributed_c10d

from comm_collectives.by_group import GroupRecords, GroupSettings


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    found = ProcessGroup(0, 1)
    monkeypatch.setattr(distributed_c10d._world, "default_pg", found)
    return found


def test_a_setting_of_the_world_serves_both_of_its_names_and_groups_without_their_own(world: ProcessGroup) -> None:
    settings, other, own = GroupSettings("initial"), ProcessGroup(0, 1), ProcessGroup(0, 1)
    settings.set("own", own)
    settings.set("set by its group", world)
    assert [settings.of(one) for one in (None, world, other, own)] == [*["set by its group"] * 3, "own"]
    settings.set("set by None", None)
    assert [settings.of(one) for one in (None, world, other, own)] == [*["set by None"] * 3, "own"]
    settings.forget()
    assert [settings.of(one) for one in (None, world, own)] == ["initial"] * 3


def test_a_record_of_the_world_has_both_of_its_names(world: ProcessGroup) -> None:
    records, other = GroupRecords[list[str]](list), ProcessGroup(0, 1)
    records.of(None).append("by None")
    records.of(world).append("by its group")
    records.of(other).append("other")
    assert [records.of(one) for one in (None, world, other)] == [*[["by None", "by its group"]] * 2, ["other"]]
    records.forget()
    assert [records.of(one) for one in (None, world, other)] == [[]] * 3
