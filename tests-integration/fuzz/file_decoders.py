"""Decoders of files, and of the environment that a launcher makes."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import comm_config
from comm_backend_ccl import host_profile
from comm_config.environment import unknown_variables
from comm_orchestrator.tools.trace.files import check
from comm_orchestrator.tools.trace.summary import summarize
from comm_orchestrator.tools.trace.tables import format_summary
from comm_utils import json_files
from comm_utils.errors import ArgumentError, LaunchError
from comm_utils.launch import LAUNCHERS, contradictions, discover
from comm_utils.launch.hostlist import expand_counts, expand_hosts
from comm_utils.observability import bench_results
from comm_utils.observability.cost_model import model
from comm_utils.observability.traces import chrome
from comm_utils.observability.traces.alignment import aligned
from comm_utils.observability.traces.file import load_rank
from comm_utils.observability.traces.traffic import traffic
from fuzz.bounds import Decoder

__all__ = ["DECODERS"]

ROOT = Path(__file__).resolve().parents[2]
_TESTS = ROOT / "packages/comm-utils/tests/observability"


@lru_cache
def _descriptor() -> int:
    """A file without a name: nothing is left behind, however a process ends."""
    return os.memfd_create("fuzz")


def _file(data: bytes) -> str:
    os.ftruncate(_descriptor(), 0)
    os.pwrite(_descriptor(), data, 0)
    return f"/proc/self/fd/{_descriptor()}"


def _of_files(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(_file(data))


# --- traces: what `commctl trace` does with them


def _trace(path: str) -> None:
    found = load_rank(path)
    if found.world_size > 1:
        return  # which a folder with this file alone is refused for
    check(found, path)
    traces = aligned([found])
    summary = summarize(traces)
    json.dumps(summary.to_json()).encode()
    format_summary(summary, io.StringIO()).encode()
    traffic(traces)
    chrome.write(io.StringIO(), traces)


def _traces() -> Sequence[bytes]:
    recorded = [(_TESTS / "corpus/recorded" / name).read_bytes() for name in ("rank0.jsonl", "rank1.jsonl")]
    failed = [path.read_bytes() for path in sorted(_TESTS.glob("corpus/failed/*/rank0.jsonl"))]
    return [*(_alone(one) for one in recorded), *(one for one in failed if len(one) < 10_000)]


def _alone(data: bytes) -> bytes:
    """Return the first lines of a trace, as if its rank had been the only one."""
    text = b"\n".join(data.split(b"\n")[:14])
    for before, after in ((b'"world_size":2', b'"world_size":1'), (b'"rank":1', b'"rank":0'), (b"[0,1]", b"[0]")):
        text = text.replace(before, after)
    return text


# --- measurements


def _bench(path: str) -> None:
    for one in bench_results.load(path).results:
        assert one.is_empty in (True, False)


def _benches() -> Sequence[bytes]:
    result: dict[str, Any] = dict.fromkeys(
        ("root", "world_size", "nodes", "groups", "size_bytes", "count", "iterations"), 2
    )
    result |= dict.fromkeys(("time_us", "min_us", "p50_us", "p95_us", "p99_us", "max_us"), 1.5)
    result |= {"operation": "all_reduce", "library": "ours", "backend": "gloo", "way": "in_place", "dtype": "float32"}
    result |= {"op": "sum", "rounds_us": [1.5, 2], "algbw_gb_per_s": 1, "busbw_gb_per_s": 1, "wrong": None}
    head = {"format": bench_results.FORMAT, "version": bench_results.VERSION, "made": "", "command": ""}
    file = {**head, "system": {"ranks": 2}, "options": {}, "results": [result]}
    return [json.dumps(file).encode(), json.dumps({**file, "results": []}).encode()]


def _models() -> Sequence[bytes]:
    errors = {"count": 1, "median": 0.1, "p90": 0.1, "low": 0.0, "high": 0.2}
    line = {"algorithm": "ring", "alpha_us": 1.0, "beta_us_per_byte": 0.001}
    fit = dict.fromkeys(("library", "backend", "way", "dtype", "op"), "x") | {
        "operation": "all_reduce",
        "level": "intra",
        "pieces": [{**line, "from_bytes": 0, "alternatives": [line], "assumed": False}],
        "points": [{"world_size": 2, "nodes": 1, "size_bytes": 8, "measured_us": 1.0, "fitted_us": 1.0}],
        "residuals": errors,
        "between_sizes": errors,
        "between_world_sizes": None,
    }
    head = {"format": model.FORMAT, "version": model.VERSION, "made": "", "command": "", "statistic": "p50"}
    return [json.dumps({**head, "fits": [fit], "sources": [], "link": None, "notes": []}).encode()]


def _model(path: str) -> None:
    json.dumps(model.load(path).to_json())


_MACHINE = b'"@machine@"'


def _profile(data: bytes) -> None:
    """The cache of this machine, whose name the input does not need to know."""
    machine = json.dumps(host_profile._machine()).encode()
    os.environ[host_profile.VARIABLE] = _file(data.replace(_MACHINE, machine))
    host_profile.load(2)


def _profiles() -> Sequence[bytes]:
    row = ["all_reduce", 1024, False, True, "eager", 900]
    return [b'{"machine":' + _MACHINE + b',"ranks":{"2":{"by":"me","rows":' + json.dumps([row]).encode() + b"}}}"]


# --- configuration


def _configuration(path: str) -> None:
    comm_config.load_config(path, environ={})


_CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"process_group": {"backend": "gloo"}, "timeouts": {"collective_s": 5}, "comms_logger": {"enabled": True}},
    {"network": {"interface": ["eth0"], "variables": {"A": "b"}}, "objects": {"max_bytes": 1000}},
    {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "communication_data_type": "fp16"},
    {"compress_communication": {"method": "int8", "block_size": 256}, "comms_logger": {"prof_ops": ["all_reduce"]}},
)


def _variables(data: bytes) -> dict[str, str]:
    lines = data.decode("utf-8", "surrogateescape").replace("\0", "").split("\n")
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, sign, value in pairs if sign}


def _environment(data: bytes) -> None:
    environ = _variables(data)
    environ.pop("COMM_CONFIG", None)  # which names a file
    comm_config.load_config(None, environ=environ)
    unknown_variables(environ)


_ENVIRONMENTS = (
    b'COMM_PROCESS_GROUP__BACKEND=gloo\nDEEPSPEED_TIMEOUT=3\nCOMM_OBJECTS={"max_bytes": 1000}\nCOMM_OBJEKTS=1',
    b'COMM_NETWORK__INTERFACE=eth0,ib\nCOMM_COMMS_LOGGER__PROF_OPS=["all_reduce"]\nCOMM_TIMEOUTS__INIT_S=3',
    b'COMM_COMPRESS_COMMUNICATION={"method": "int8"}\nCOMM_NETWORK__VARIABLES={"A": "b"}\nCOMM_LAUNCH__MASTER_PORT=1',
)


# --- launchers


def _launch(data: bytes) -> None:
    environ = _variables(data)
    found = []
    for _, launcher in LAUNCHERS:
        try:
            found.append(launcher(environ))
        except LaunchError as error:
            str(error).encode("utf-8", "surrogateescape")
    contradictions(environ, discover(environ))


def _launches() -> Sequence[bytes]:
    recorded = json.loads((ROOT / "packages/comm-utils/tests/launch/recorded.json").read_text())
    found = [_environ_of(one) for one in _dictionaries(recorded)]
    slurm = (
        b"SLURM_STEP_ID=0\nSLURM_PROCID=1\nSLURM_NTASKS=4\nSLURM_LOCALID=1\nSLURM_NODEID=0\nSLURM_JOB_ID=7\n"
        b"SLURM_STEP_NODELIST=node[1-2]\nSLURM_STEP_TASKS_PER_NODE=2(x2)"
    )
    return [*found[:12], slurm, b'SM_HOSTS=["a","b"]\nSM_CURRENT_HOST=b', b"PET_NNODES=2\nPET_NODE_RANK=1"]


def _dictionaries(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, dict):
        return [found for one in value for found in _dictionaries(one)] if isinstance(value, list) else []
    if value and all(isinstance(one, str) for one in value.values()):
        return [value]
    return [found for one in value.values() for found in _dictionaries(one)]


def _environ_of(variables: dict[str, str]) -> bytes:
    return "\n".join(f"{name}={value}" for name, value in sorted(variables.items())).encode()[:2000]


def _host_list(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    hosts = expand_hosts(text)
    assert all(hosts)


def _json(data: bytes) -> None:
    found = json_files.parse(data.decode("utf-8", "replace"), "here")
    json.dumps(found, ensure_ascii=False).encode()
    repr(found)


DECODERS = (
    Decoder("trace", _of_files(_trace), (ArgumentError,), _traces, "lines"),
    Decoder("bench", _of_files(_bench), (ArgumentError,), _benches, "json"),
    Decoder("model", _of_files(_model), (ArgumentError,), _models, "json"),
    Decoder("host-profile", _profile, (), _profiles, "json"),
    Decoder(
        "configuration",
        _of_files(_configuration),
        (comm_config.ConfigError,),
        lambda: [json.dumps(one).encode() for one in _CONFIGURATIONS],
        "json",
    ),
    Decoder("environment", _environment, (comm_config.ConfigError,), lambda: _ENVIRONMENTS, "text"),
    Decoder("launchers", _launch, (LaunchError,), _launches, "text"),
    Decoder("host-list", _host_list, (LaunchError,), lambda: [b"node[01-04,7],login1", b"a[1-2]b[3-4]"], "text"),
    Decoder(
        "task-counts",
        lambda data: expand_counts(data.decode("utf-8", "replace")),
        (LaunchError,),
        lambda: [b"2(x3),1", b"4"],
        "text",
    ),
    Decoder("json", _json, (ArgumentError,), lambda: [b'{"a": [1, 2.5, null, "\\ud83d\\ude00"]}', b"[" * 70], "json"),
)
