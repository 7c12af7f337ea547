"""Compare ``comm_orchestrator`` with ``torch.distributed`` and ``deepspeed.comm``.

    python tools/compatibility.py --check | --write

Compares signatures and writes docs/compatibility.md. Every difference has its reason in one of the tables below; one
that has none, and a reason without a difference, are errors. torch's functions are those of the installed torch, which
has to be the release in constraints.txt; DeepSpeed's are in deepspeed_comm.json, which nox -s ecosystem keeps true.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
SNAPSHOT = Path(__file__).parent / "deepspeed_comm.json"
TORCH, DEEPSPEED = "torch.distributed", "deepspeed.comm"
SIDES = (TORCH, DEEPSPEED)

_AFTER_TORCHS = "prof is at another position; log_name is at another position; debug is at another position"
_GROUP_RANK = "torch's `group_src` or `group_dst` has this position: give `prof`, `log_name` by name"

#: (side, function) -> a difference that signatures do not show.
BEHAVIOUR = {(TORCH, "is_initialized"): "a world of other code counts once it is adopted"}

#: (side, function) -> how a call that is right there is not the same here, and why. All intended differences.
DIFFERENCES: dict[tuple[str, str], tuple[str, str]] = {
    (TORCH, "init_process_group"): (
        "pg_options is refused",
        "`pg_options` must be None (initialise torch with them, and ours adopts it)",
    ),
    (TORCH, "is_initialized"): (
        BEHAVIOUR[TORCH, "is_initialized"],
        "False until `init_distributed()` was called, also where other code, such as Lightning, has initialised "
        "`torch.distributed`",
    ),
    **{
        (DEEPSPEED, name): (_AFTER_TORCHS, _GROUP_RANK)
        for name in ("broadcast", "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")
    },
    (DEEPSPEED, "barrier"): (
        _AFTER_TORCHS,
        "torch's `timeout` has this position: give `prof`, `log_name` by name",
    ),
    (DEEPSPEED, "reduce_scatter_fn"): (
        "debug is at another position",
        "it has no `log_name` there: give `debug` by name",
    ),
    (DEEPSPEED, "allgather_fn"): (
        "debug is at another position",
        "it has neither `prof` nor `log_name` there: give `debug` by name",
    ),
    (DEEPSPEED, "init_distributed"): (
        "timeout is None by default, not datetime.timedelta(seconds=600)",
        "the default timeout is the library's own, 30 minutes (10 on `nccl` alone); `DEEPSPEED_TIMEOUT` is honoured",
    ),
}

_PICKLE = "objects that need pickle, unless you allow it"
_SPARSE = "sparse tensors; torch's `PREMUL_SUM`"
#: function -> what is refused here by name, in whichever way it is called.
REFUSED: dict[str, str] = {
    "all_gather_object": _PICKLE,
    "all_reduce": _SPARSE,
    "all_reduce_coalesced": _SPARSE,
    "all_gather": "outputs with gaps in memory, or that share memory, such as `[buffer] * W` (which "
    "`deepspeed.comm.all_gather` takes after `replace_comm()`)",
    "broadcast_object_list": _PICKLE,
    "gather_object": _PICKLE,
    "get_process_group_ranks": "a group that this rank is not in",
    "recv_object_list": _PICKLE,
    "reduce": _SPARSE,
    "reduce_scatter": _SPARSE,
    "reduce_scatter_tensor": _SPARSE,
    "scatter_object_list": _PICKLE,
    "send_object_list": _PICKLE,
}

_LOGGER = "`configure()` turns the comms logger on and off, and `log_rows()` returns what it recorded"
#: (side, name) -> why it is not there, or what is in its place.
NOT_PROVIDED: dict[tuple[str, str], str] = {
    **{
        (DEEPSPEED, name): "inside of DeepSpeed's implementation"
        for name in (
            "CCLBackend",
            "TorchBackend",
            "ccl_backend",
            "hccl_backend",
            "init_deepspeed_backend",
            "mpi_backend",
            "nccl_backend",
            "timed_op",
            "timer_summary",
        )
    },
    **{
        (DEEPSPEED, name): "a function of `deepspeed.comm.utils`, which `replace_comm()` leaves as it is"
        for name in (
            "get_caller_func",
            "get_debug_log_name",
            "get_default_args",
            "get_msg_size_from_args",
            "get_tensor_kwarg",
            "get_tensor_position",
        )
    },
    (DEEPSPEED, "cdb"): "`is_initialized()` says whether there is a world, and `init_distributed()` keeps one that is "
    "there",
    (DEEPSPEED, "CommsLogger"): _LOGGER,
    (DEEPSPEED, "comms_logger"): _LOGGER,
    (DEEPSPEED, "timers"): "`log_rows()` has the durations, once `configure(enabled=True)` was called",
    (DEEPSPEED, "TYPE_CHECKING"): "Python's, from `typing`",
    (DEEPSPEED, "TORCH_DISTRIBUTED_DEFAULT_PORT"): "DeepSpeed's, from `deepspeed.constants`",
}
#: DeepSpeed's configuration keys and their defaults.
CONSTANTS = "a constant of `deepspeed.comm.constants`, which `replace_comm()` leaves as it is"

_OBJECTS = "sent without pickle; a refusal reaches every rank at once"
#: function -> what a caller gets here and not there.
BETTER: dict[str, str] = {
    "all_gather": "one-tensor form that returns the list; tensors of different sizes",
    "all_gather_coalesced": "for any mix of dtypes, with torch's lists or DeepSpeed's flat outputs, on gloo too",
    "all_gather_object": _OBJECTS,
    "all_gather_single": "on every supported torch",
    "all_reduce": "`avg`, small integers and `bool` on every backend; strided tensors are refused instead of garbled",
    "all_reduce_coalesced": "any mix of dtypes and shapes",
    "all_to_all": "works on gloo",
    "barrier": "`device_ids` is not dropped",
    "broadcast_object_list": _OBJECTS,
    "configure": "times do not stop asynchronous operations; memory does not grow with their number",
    "gather_object": _OBJECTS,
    "inference_all_reduce": "`op` and `async_op` are not dropped",
    "init_distributed": "any launcher, ranks check each other, names what is wrong",
    "init_process_group": "as `init_distributed`; the backend is chosen and agreed where none is named",
    "irecv": "returns at once",
    "isend": "returns at once",
    "log_summary": "waits only with `show_straggler`; algbw and busbw as nccl-tests define them; medians and minima",
    "monitored_barrier": "on every backend; the group stays usable",
    "mpi_discovery": "without mpi4py a message that says what to install",
    "new_group": "by all ranks or by the members alone; the timeout of the start is inherited",
    "new_subgroups": "called by the members alone too",
    "patch_aws_sm_env_for_torch_nccl_backend": "sets `MASTER_ADDR` too",
    "recv_object_list": _OBJECTS,
    "reduce": "the tensors of the other ranks stay as they were",
    "reduce_scatter": "one tensor instead of a list; parts of different sizes",
    "reduce_scatter_single": "on every supported torch",
    "reduce_scatter_tensor": "right on gloo for every op",
    "scatter_object_list": _OBJECTS,
    "send": "`async_op=True`",
    "recv": "`async_op=True`",
    "send_object_list": _OBJECTS,
    "split_group": "with every backend",
}
#: class or function -> what is not as it looks.
TYPES: dict[str, str] = {
    "get_backend": "one library for all devices: `gloo` after `init_process_group('cpu:gloo')`",
    "new_subgroups_by_enumeration": "a rank that is in none of the groups gets `GroupMember.NON_GROUP_MEMBER`, with "
    "which calls do nothing; torch returns None, which its calls take for the world",
    "P2POp": "ours and torch's are accepted, with `isend` and `irecv` of either; torch's `batch_isend_irecv` takes "
    "only its own",
    "ProcessGroup": "torch's; DeepSpeed's is an empty shell of its own",
    "ReduceOp": "an enum with DeepSpeed's values; torch's members are accepted too, these not by torch's functions and "
    "options; the two do not compare equal",
    "Work": "what every handle can: `wait(timeout)`, `is_completed()`, `exception()`, `result()`, `get_future()`, "
    "`is_success()`, `synchronize()`; of a receive, `source_rank()`. `result()` is a tensor where the call has one, a "
    "list with gloo's own handles. No subclass of `torch.distributed.Work`",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function; ``default`` is None where it is required, else its text."""

    name: str
    default: str | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="fail where the page is out of date")
    action.add_argument("--write", action="store_true", help="write the page")
    options = parser.parse_args()
    problems = unexplained()
    if problems:
        sys.exit("\n".join(problems))
    text = page()
    if options.write:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: run python tools/compatibility.py --write")


def unexplained() -> list[str]:
    """Differences without a reason, and reasons without a difference."""
    found = {(side, name): text for side in SIDES for name in names(side) if (text := difference(side, name))}
    missing = {(side, name) for side in SIDES for name in names(side) if status(side, name) == "missing"}
    return [
        *(
            f"{side}.{name}: {text}: not in DIFFERENCES"
            for (side, name), text in found.items()
            if DIFFERENCES.get((side, name), ("",))[0] != text
        ),
        *(f"{side}.{name}: not here, and not in NOT_PROVIDED" for side, name in sorted(missing)),
        *(f"DIFFERENCES: {side}.{name} does not differ" for side, name in DIFFERENCES.keys() - found.keys()),
        *(f"NOT_PROVIDED: {side}.{name} is here, or nowhere" for side, name in NOT_PROVIDED if _is_stale(side, name)),
        *(f"there is no {name}" for table in (BETTER, REFUSED, TYPES) for name in table if name not in ours()),
    ]


def _is_stale(side: str, name: str) -> bool:
    return name in ours() or name not in names(side)


def ours() -> dict[str, Any]:
    """Return the public names of ``comm_orchestrator``."""
    import comm_orchestrator

    return {name: getattr(comm_orchestrator, name) for name in comm_orchestrator.__all__}


def names(side: str) -> dict[str, Any]:
    """Public name -> its parameters where it is a function, else anything else."""
    if side == DEEPSPEED:
        snapshot: dict[str, Any] = json.loads(SNAPSHOT.read_text())["names"]
        return {
            name: [Parameter(one[0], one[1] if len(one) > 1 else None) for one in value]
            if isinstance(value, list)
            else value
            for name, value in snapshot.items()
        }
    import torch.distributed as c10d

    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in dir(c10d):
            value = getattr(c10d, name)
            home = str(getattr(value, "__module__", "torch"))
            if name.startswith("_") or inspect.ismodule(value) or not home.startswith("torch"):
                continue
            found[name] = parameters(value) if inspect.isfunction(value) else "value"
    return found


def parameters(function: Callable[..., Any]) -> list[Parameter]:
    """In their order; keyword-only ones with a star."""
    return [
        Parameter(
            p.name + ("*" if p.kind is p.KEYWORD_ONLY else ""), None if p.default is p.empty else _text(p.default)
        )
        for p in inspect.signature(function).parameters.values()
        if p.kind is not p.VAR_KEYWORD and not p.name.startswith("_")
    ]


def _text(default: Any) -> str:
    return repr(default)


def status(side: str, name: str) -> str:
    """Return ``same``, ``differs``, ``refused in part``, ``handed on``, ``missing``.

    Empty if ``side`` has no such name.
    """
    if name not in names(side):
        return ""
    if name in ours():
        if (side, name) in DIFFERENCES or name in TYPES:
            return "differs"
        return "refused in part" if name in REFUSED else "same"
    if (side, name) in NOT_PROVIDED or names(side)[name] == "constant":
        return "not provided"
    return "handed on" if side == TORCH or name in names(TORCH) else "missing"


def difference(side: str, name: str) -> str:
    """Return how a call that is right for ``side`` may be wrong here; empty where it is not."""
    theirs, mine = names(side)[name], ours().get(name)
    if mine is None or not isinstance(theirs, list) or not inspect.isfunction(mine):
        return ""
    unseen = [BEHAVIOUR[side, name]] if (side, name) in BEHAVIOUR else []
    return "; ".join([*_differences(name, theirs, mine), *unseen])


def _differences(name: str, theirs: list[Parameter], function: Callable[..., Any]) -> Iterable[str]:
    from comm_collectives.argument_names import ALIASES, LABELS

    known = parameters(function)
    positional = [one for one in known if not one.name.endswith("*")]
    by_name = {one.name.rstrip("*"): one for one in known}
    passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    labelled = getattr(function, "takes_labels", False)
    order = [one.name for one in positional] + (list(LABELS) if labelled else [])
    for position, parameter in enumerate(theirs):
        bare = parameter.name.rstrip("*")
        canonical = ALIASES.get(name, {}).get(bare, bare)
        if canonical not in by_name and passes_on:
            continue
        if canonical not in by_name and not (labelled and canonical in LABELS):
            yield f"no parameter {bare}"
            continue
        if not parameter.name.endswith("*") and (position >= len(order) or order[position] != canonical):
            yield f"{bare} is at another position"
        own = by_name.get(canonical)
        if own is not None and parameter.default is not None:
            if own.default is None:
                yield f"{bare} is required"
            elif not _same_default(own.default, parameter.default):
                yield f"{bare} is {own.default} by default, not {parameter.default}"
    if name == "init_process_group":
        yield "pg_options is refused"


def _same_default(own: str, other: str) -> bool:
    sums = re.compile(r"'sum'|<?(ReduceOp|RedOpType)\.SUM.*")
    if sums.fullmatch(own) and sums.fullmatch(other):
        return True
    # torch's root of None or 0 is ours of None: global rank 0.
    return own == other or (own, other) in {("None", "0"), ("''", "None")}


def page() -> str:
    """docs/compatibility.md."""
    import torch

    release = torch.__version__.partition("+")[0]
    deepspeed = json.loads(SNAPSHOT.read_text())["version"]
    everything = sorted({*names(TORCH), *names(DEEPSPEED), *ours()}, key=lambda name: (name.lower(), name))
    functions = [name for name in everything if name in ours() and inspect.isroutine(ours()[name])]
    types = [name for name in everything if name in ours() and name not in functions]
    handed = [name for name in everything if status(TORCH, name) == "handed on"]
    refused = [name for name in everything if "not provided" in (status(TORCH, name), status(DEEPSPEED, name))]
    lines = [
        "# Compatibility",
        "",
        "<!-- Made by tools/compatibility.py from the code; do not edit. -->",
        "",
        f"Every public name of `torch.distributed` (of torch {release}) and of `deepspeed.comm` (of DeepSpeed",
        f"{deepspeed}), and what `import comm_orchestrator as dist` makes of it. *Same*: every call that is right",
        "there is right here, by position and by name. How to come from either is in [migrating](migrating.md).",
        "",
        "What holds for all calls: wrong arguments are errors before anything is sent; `op` may be a name such as",
        '`"sum"`; `timeout=` limits one call; DeepSpeed\'s `prof`, `log_name` and `debug` are accepted; where names of',
        "parameters differ, both are.",
        "",
        "## Functions",
        "",
        "| name | torch.distributed | deepspeed.comm | here |",
        "|---|---|---|---|",
        *(_row(name) for name in functions),
        "",
        "## Types and values",
        "",
        "| name | torch.distributed | deepspeed.comm | here |",
        "|---|---|---|---|",
        *(_row(name) for name in types),
        "",
        "## Handed on from torch.distributed as they are",
        "",
        "Groups are `torch.distributed`'s own, so these work beside everything else: `dist.NAME` is",
        "`torch.distributed.NAME`. So is any public name of a newer torch that this page does not know. Private names",
        "are not handed on; the error names what to use.",
        "",
        *_wrapped(handed),
        "",
        "## Not provided",
        "",
        "| name | why, or what to use |",
        "|---|---|",
        *(f"| `deepspeed.comm.{name}` | {NOT_PROVIDED.get((DEEPSPEED, name), CONSTANTS)} |" for name in refused),
        "",
    ]
    return "\n".join(lines)


def _row(name: str) -> str:
    reasons = [DIFFERENCES[side, name][1] for side in SIDES if (side, name) in DIFFERENCES]
    refused = [f"**refused**: {REFUSED[name]}"] if name in REFUSED else []
    here = "; ".join([*(table[name] for table in (BETTER, TYPES) if name in table), *reasons, *refused])
    return f"| `{name}` | {status(TORCH, name) or '-'} | {status(DEEPSPEED, name) or '-'} | {here} |"


def _wrapped(found: list[str]) -> list[str]:
    lines, line = [], ""
    for name in found:
        item = f"`{name}`" + ("," if name != found[-1] else ".")
        if len(line) + len(item) + 1 > 120:
            lines.append(line)
            line = item
        else:
            line = f"{line} {item}".strip()
    return [*lines, line]


if __name__ == "__main__":
    main()
