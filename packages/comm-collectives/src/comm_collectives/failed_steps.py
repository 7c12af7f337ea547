"""A call in steps of which one failed on this rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from comm_utils.backend import Backend
from comm_utils.errors import BrokenGroupError, CollectiveMismatchError, CommError
from comm_utils.group_names import name_of
from comm_utils.torch_support.remedies import without_remedy
from comm_utils.watch.trouble import Trouble, error_class
from comm_utils.watch.watch import WATCH

__all__ = ["failed_step"]


def failed_step(
    call: str,
    backend: Backend,
    group: ProcessGroup | None,
    made: Sequence[ProcessGroup],
    error: Exception,
    names: Sequence[str] = (),
) -> CommError:
    """Return what to raise; the groups of the call are broken, and all ranks of ``group`` learn the cause.

    Ranks may disagree about how far the step has come, and most of them wait in steps with others than this one.

    Args:
        made: the groups of the steps, as far as they were made.
        names: under which the watch may know the cause as well.
    """
    for one in (group, *made):
        backend.mark_broken(one, f"{call}: {without_remedy(error)}")
    failure: CommError
    if isinstance(error, CommError):
        failure, what = error, str(error).partition(". The group cannot be used any more")[0]
    else:
        what = f"{call}: a step raised {type(error).__name__}: {error}"
        failure = BrokenGroupError(f"{what}. The group cannot be used any more, as other ranks may have gone on")
    known = (*map(name_of, made), *names)
    trouble = next((found for one in known if (found := WATCH.trouble(one)) is not None), None)
    if trouble is None and failure is error and error_class(type(failure).__name__) is not None:
        trouble = Trouble(type(failure), what)
    elif trouble is None:  # to the others, this rank's calls are no longer those that theirs belong to
        rank = backend.get_rank()
        trouble = Trouble(CollectiveMismatchError, f"rank {rank} gave up in {what}", (rank,))
    WATCH.tell(name_of(backend.get_world_group() if group is None else group), failure, trouble)
    return failure
