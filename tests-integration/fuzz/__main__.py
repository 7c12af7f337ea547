"""Fuzzes the decoders, one after the other: ``python -m fuzz --seconds 60 object trace`` in this folder's parent."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INSTRUMENTED = [
    *("comm_config", "comm_utils.json_files", "comm_utils.topology", "comm_utils.launch", "comm_utils.observability"),
    *("comm_utils.torch_support", "comm_utils.operations", "comm_utils.flight_recorder", "comm_utils.watch"),
    *("comm_collectives.object_codec", "comm_collectives.objects", "comm_collectives.compression"),
    *("comm_backend_ccl.member_records", "comm_backend_ccl.placement", "comm_backend_ccl.host_profile"),
    *("comm_backend_ccl.store_messages", "comm_backend_ccl.any_source"),
    *("comm_orchestrator.rendezvous", "comm_orchestrator.tools.trace"),
]
_TOTAL_S = 20.0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s fuzz --", description=__doc__)
    parser.add_argument("--seconds", type=float, help=f"for each decoder; by default {_TOTAL_S:g} s for all of them")
    parser.add_argument("--seed", type=int, default=0, help="of what is random; 0 takes the time")
    parser.add_argument("--mutations", action="store_true", help="without atheris, even where it is installed")
    parser.add_argument(
        "--keep", action="store_true", help="add inputs that reach new lines, and findings, to the corpus"
    )
    parser.add_argument("names", nargs="*", metavar="DECODER")
    return parser.parse_args()


def _atheris(wanted: bool) -> Any | None:
    """Import what finds its way by coverage; None where it cannot be had, as for a new Python."""
    if not wanted:
        return None
    try:
        import atheris
    except ImportError:
        return None
    return atheris


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep what atheris says of every module from standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _write(folder: Path, data: bytes, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def main() -> int:
    options = _options()
    atheris = _atheris(not options.mutations)
    if atheris is not None:
        with _silent(), atheris.instrument_imports(include=_INSTRUMENTED):
            from fuzz import decoders
    else:
        from fuzz import decoders
    from fuzz import distilling, engines
    from fuzz.bounds import read_corpus

    unknown = [name for name in options.names if name not in decoders.DECODERS]
    if unknown:
        print(f"no decoder {', '.join(unknown)}; there are: {', '.join(decoders.DECODERS)}")
        return 2
    logging.disable(logging.CRITICAL)
    table = [decoders.DECODERS[name] for name in options.names or decoders.DECODERS]
    seconds = options.seconds or max(0.5, _TOTAL_S / len(table))
    seed = options.seed or int(time.time()) % 2**31
    engine = "atheris" if atheris is not None else "mutations of the corpus"
    print(f"{len(table)} decoders, {seconds:.3g} s each, by {engine}, seed {seed}")
    print(f"{'decoder':<18} {'executions':>11} {'coverage':>9} {'corpus':>7}  finding", flush=True)
    failed = 0
    for decoder in table:
        kept = read_corpus(decoders.CORPUS, decoder)
        found = engines.run(decoder, decoders.CORPUS, seconds, seed, atheris)
        covered = "-" if found.covered is None else found.covered
        print(
            f"{decoder.name:<18} {found.executions:>11} {covered:>9} {len(kept):>7}  {found.finding or '-'}", flush=True
        )
        failed += bool(found.finding)
        if found.data is not None:
            folder = decoders.CORPUS / decoder.name if options.keep else Path("findings") / decoder.name
            print(f"  the input is in {_write(folder, found.data, 'failed')}", flush=True)
        if options.keep:
            new = distilling.distilled(decoder, [*decoder.seeds(), *kept], found.made)
            for data in new:
                _write(decoders.CORPUS / decoder.name, data, "reaches")
            print(f"  {len(new)} inputs were added", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
