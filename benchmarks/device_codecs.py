"""How fast codecs encode and decode on a GPU, beside a copy of the same tensor.

    python benchmarks/device_codecs.py [--mib 64] [--rounds N] [--codecs NAME ...] [--json FILE]

In each round the codecs take turns; the device's own clock counts (CUDA events around several calls, on a buffer that
is larger than its caches). The table shows the microseconds of the median round for a float32 tensor of ``--mib``, and
the float32 bytes that are read or written a second. Results are compared with those of the CPU before anything counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from measuring import MIB, output_file, positive

from comm_collectives.compression import make_codec

CODECS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit")
WAYS = ("encode", "encode with error", "decode", "decode and add")
CALLS = 5


def ways(name: str, count: int) -> dict[str, Callable[[], object]]:
    """What is timed of a codec, after its results were compared with the CPU's."""
    codec = make_codec(name)
    source = torch.randn(count, generator=torch.Generator().manual_seed(1))
    found = []
    for device in ("cpu", "cuda"):
        own, error = source.to(device), torch.zeros(count, device=device)
        wire = torch.empty(codec.encoded_bytes(count), dtype=torch.uint8, device=device)
        target = torch.ones(count, device=device)
        codec.encode(own, wire, error)
        codec.encode(own, wire)
        codec.decode(wire, target)
        codec.decode(wire, target, add=True)
        found.append([one.cpu() for one in (wire, target, error)])
    if not all(map(torch.equal, *found)):
        raise SystemExit(f"{name}: the GPU has other bits than the CPU")
    return {
        "encode": lambda: codec.encode(own, wire),
        "encode with error": lambda: codec.encode(own, wire, error),
        "decode": lambda: codec.decode(wire, target),
        "decode and add": lambda: codec.decode(wire, target, add=True),
    }


def seconds(call: Callable[[], object]) -> float:
    """The device's time for one call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="of the float32 tensor")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--json", type=output_file, help="also write the seconds of each round to this file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device")
    count = given.mib * MIB // 4
    source, target = torch.ones(count, device="cuda"), torch.ones(count, device="cuda")
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    for name in given.codecs:
        calls |= {f"{name}, {way}": call for way, call in ways(name, count).items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(given.rounds + 2):
        for name, call in calls.items():
            taken = seconds(call)
            if turn >= 2:
                times[name].append(taken)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.mib} MiB, {given.rounds} rounds")
    print(f"copy: {statistics.median(times['copy']) * 1e6:.0f} µs")
    print(f"| codec | {' | '.join(f'{way}, µs (GB/s)' for way in WAYS)} |")
    print(f"|---|{'---:|' * len(WAYS)}")
    for name in given.codecs:
        medians = [statistics.median(times[f"{name}, {way}"]) for way in WAYS]
        print(f"| {name} | {' | '.join(f'{one * 1e6:.0f} ({count * 4 / one / 1e9:.0f})' for one in medians)} |")
    if given.json:
        given.json.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
