"""Messages with a tag on oneCCL, which travel through the store: an exception of a signal handler loses none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from comm_backend_ccl.store_messages import StoreMessages
from comm_backend_ccl.work import ANY_SOURCE

TAG = 7
# Of more than one piece.
ELEMENTS = 400_000


class Interrupt(Exception):
    """Raised by a signal handler."""


class InterruptedStore:
    """A store in whose call of one name, the n-th, a signal handler raises, before or after it has its effect."""

    def __init__(self, store: HashStore, name: str, calls: int, after: bool) -> None:
        self._store, self._name, self._left, self._after = store, name, calls, after
        self.interrupted = False

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)
        if name != self._name or self.interrupted:
            return function

        def call(*args: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self.interrupted = True
                if self._after:
                    function(*args)
                raise Interrupt
            return function(*args)

        return call


def message(number: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32) + number


@pytest.mark.parametrize("source", [0, ANY_SOURCE])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("name", "calls"), [("check", 1), ("get", 1), ("get", 2), ("delete_key", 1), ("delete_key", 2), ("add", 1)]
)
def test_an_interrupted_wait_loses_no_message(name: str, calls: int, after: bool, source: int) -> None:
    store = HashStore()
    interrupted = InterruptedStore(store, name, calls, after)
    sender, receiver = StoreMessages(store, 0, 2), StoreMessages(interrupted, 1, 2)  # type: ignore[arg-type]
    outputs = [torch.zeros(ELEMENTS) for _ in range(3)]
    receives = [receiver.receive(output, source, TAG) for output in outputs[:2]]
    for number in range(3):
        sender.send(message(number), 1, TAG)
    with pytest.raises(Interrupt):
        receiver.within(receives[0], 10.0)
    receives.append(receiver.receive(outputs[2], source, TAG))
    assert all(receiver.within(one, 10.0) for one in receives)
    for number, output in enumerate(outputs):
        assert torch.equal(output, message(number))
    assert [one.source for one in receives] == [0, 0, 0]
    # The messages have left the store, of which only the count of waiting bytes is there.
    receiver.within(receiver.receive(torch.zeros(1), 0, TAG), 0.0)
    assert store.num_keys() == 1


def test_dtypes_of_messages_are_compared() -> None:
    store = HashStore()
    sender, receiver = StoreMessages(store, 0, 2), StoreMessages(store, 1, 2)
    sender.send(torch.ones(2, dtype=torch.complex64), 1, TAG)
    receive = receiver.receive(torch.zeros(1, dtype=torch.complex128), 0, TAG)
    with pytest.raises(RuntimeError, match=r"16 bytes of torch\.complex64 .* expects 16 bytes of torch\.complex128"):
        receiver.within(receive, 10.0)
