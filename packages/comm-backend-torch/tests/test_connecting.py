"""Members that do not say whether they are connected."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from comm_utils.errors import CommTimeoutError
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.connecting import Connecting, Place


def test_a_member_that_says_nothing_is_named_with_the_call() -> None:
    store = BoundedStore(HashStore(), "rank 1", 10)
    places = {0: Place("a", "hostA"), 1: Place("b", "hostB")}
    attempt = Connecting(store, "attempt", "new_group on rank 1", 1, places, "gloo", 0.1)
    with pytest.raises(CommTimeoutError) as caught:
        attempt.run(lambda: None, lambda made: None, lambda: None)
    assert str(caught.value) == (
        "new_group on rank 1: rank 0 on hostA did not say within 0.1 s that gloo had connected them; "
        "rank 1 on hostB was connected"
    )
