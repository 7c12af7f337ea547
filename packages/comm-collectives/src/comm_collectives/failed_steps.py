"""A call of several exchanges that this rank leaves between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import ProcessGroup

from comm_utils import operations
from comm_utils.backend import Backend
from comm_utils.errors import BackendUnavailableError, BrokenGroupError, CollectiveMismatchError, CommError
from comm_utils.group_names import group_text, name_of
from comm_utils.rank_processes import PROCESSES, named_ranks
from comm_utils.torch_support.failures import is_interruption
from comm_utils.torch_support.remedies import without_remedy
from comm_utils.watch.trouble import Trouble, error_class
from comm_utils.watch.watch import WATCH

__all__ = ["breaking"]


@contextmanager
def breaking(
    call: str,
    backend: Backend,
    group: ProcessGroup | None,
    made: Sequence[ProcessGroup] = (),
    names: Sequence[str] = (),
    what: str = "a step",
) -> Iterator[None]:
    """Break the groups of a call that an exception ends here, as other ranks may have gone on; they learn the cause.

    Ctrl-C, and what a signal handler raised, stay as they are. A ``CommError`` of a call with one group alone has
    broken that, or left it as it was.

    Args:
        made: the groups of the steps, as far as they were made.
        names: under which the watch may know the cause as well.
        what: raised an exception that is no ``CommError``.
    """
    try:
        yield
    except BaseException as error:
        if is_interruption(error):
            _interrupted(call, backend, group, made, error)
            raise
        if isinstance(error, CommError) and not (made or names):
            raise
        failure = _failed(call, backend, group, made, error, names, what)
        if failure is error:
            raise
        raise failure from error


def _interrupted(
    call: str, backend: Backend, group: ProcessGroup | None, made: Sequence[ProcessGroup], error: BaseException
) -> None:
    rank, by = backend.get_rank(), "SIGINT" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    text = f"{named_ranks([rank], PROCESSES)} was interrupted ({by}) in {call}"
    for one in (group, *made):
        backend.mark_broken(one, text)
    WATCH.tell(_name(backend, group), BrokenGroupError(text), Trouble(BrokenGroupError, text, (rank,)))


def _failed(
    call: str,
    backend: Backend,
    group: ProcessGroup | None,
    made: Sequence[ProcessGroup],
    error: BaseException,
    names: Sequence[str],
    what: str,
) -> CommError:
    """Return what to raise.

    Ranks may disagree about how far the step has come, and most of them wait in steps with others than this one.
    """
    failure: CommError
    if isinstance(error, CommError):
        failure, text = error, str(error).partition(". The group cannot be used any more")[0]
        gave_up, reason = text, f"{call}: {without_remedy(error)}"
        if made and not names:  # the user knows the group of the call alone
            named = str(error).partition(" ")[0]  # the program's call, of which this one may be a part
            whole = f"{named if operations.find(named) else call} on {_text(backend, group)} failed in a step: "
            error.args = (f"{whole}{str(error).removeprefix(whole)}",)  # steps that are measured are in a call, too
    else:
        text = f"{what} raised {type(error).__name__}: {error}"
        gave_up, reason = f"{call}, as {text}", f"{call}: {text}"
        failure = BrokenGroupError(f"{reason}. The group cannot be used any more, as other ranks may have gone on")
    for one in (group, *made):
        backend.mark_broken(one, reason)
    known = (*map(name_of, made), *names)
    rank = backend.get_rank()
    trouble = next((found for one in known if (found := WATCH.trouble(one)) is not None), None)
    if trouble is None and failure is error and error_class(type(failure).__name__) is not None:
        trouble = Trouble(type(failure), text)
        if isinstance(failure, BackendUnavailableError):  # whose text may name no rank
            trouble = Trouble(type(failure), f"rank {rank} gave up in {call}: {text}", (rank,))
    elif trouble is None:  # to the others, this rank's calls are no longer those that theirs belong to
        trouble = Trouble(CollectiveMismatchError, f"rank {rank} gave up in {gave_up}", (rank,))
    WATCH.tell(_name(backend, group), failure, trouble)
    return failure


def _text(backend: Backend, group: ProcessGroup | None) -> str:
    whole = backend.get_world_group() if group is None else group
    return group_text(backend.get_process_group_ranks(whole), getattr(whole, "group_desc", ""))


def _name(backend: Backend, group: ProcessGroup | None) -> str:
    return name_of(backend.get_world_group() if group is None else group)
