"""``import comm_orchestrator`` imports the façade, and torch, when one of its names is used."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from comm_utils.testing import patience

PROGRAMS = {
    "a name of the façade": """
        import sys
        import comm_orchestrator as dist
        assert "torch" not in sys.modules
        function = dist.all_reduce
        from comm_collectives import all_reduce
        assert function is all_reduce and vars(dist)["all_reduce"] is all_reduce
        """,
    "all names": """
        from comm_orchestrator import *
        import comm_orchestrator as dist
        assert {*dist.__all__} <= {*globals()} and {*dist.__all__} <= {*dir(dist)}
        assert init_distributed is dist.init_distributed
        """,
    "the names in dir()": """
        import comm_orchestrator as dist
        assert {"init_distributed", "rendezvous", "ReduceOp"} <= {*dir(dist)}
        """,
    "a name of torch": """
        import comm_orchestrator as dist
        supports = dist.supports_complex
        import torch.distributed
        assert supports is torch.distributed.supports_complex
        """,
    "torch's function that has the name of a package": """
        from comm_orchestrator import facade
        import comm_orchestrator as dist
        import comm_orchestrator.rendezvous.records
        import torch.distributed
        assert dist.rendezvous is torch.distributed.rendezvous
        """,
    "a module of the package": """
        import sys
        import comm_orchestrator as dist
        assert dist.selector is sys.modules["comm_orchestrator.selector"]
        assert "torch" not in sys.modules
        """,
    "a name that the program has set": """
        import comm_orchestrator as dist
        dist.all_reduce = print
        dist.broadcast
        assert dist.all_reduce is print
        """,
    "a name that does not exist": """
        import comm_orchestrator as dist
        try:
            dist.al_reduce
        except AttributeError as error:
            assert "module 'comm_orchestrator' has no attribute 'al_reduce'" in str(error)
        else:
            raise AssertionError
        """,
    "threads that are first at once": """
        import threading
        import comm_orchestrator as dist
        found = []
        threads = [threading.Thread(target=lambda: found.append(dist.all_reduce)) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert len(found) == 8 and len({*map(id, found)}) == 1
        """,
}


# A fork for each program, as to import torch takes longer than any of them.
EXECUTE = """
import json, os, sys
import torch.distributed
failed = []
for name, program in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        exec(program, {"__name__": "__main__"})
        os._exit(0)
    if os.wait()[1]:
        failed.append(name)
assert not failed, failed
"""
TEXTS = {name: textwrap.dedent(text) for name, text in PROGRAMS.items()}
LOAD_NO_TORCH = [name for name, text in TEXTS.items() if '"torch" not in sys.modules' in text]


def run(*arguments: str) -> None:
    command = [sys.executable, "-c", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * patience(), check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", LOAD_NO_TORCH)
def test_torch_comes_with_the_first_use_of_its_names(name: str) -> None:
    run(TEXTS[name])


def test_names_come_with_their_first_use() -> None:
    run(EXECUTE, json.dumps({name: text for name, text in TEXTS.items() if name not in LOAD_NO_TORCH}))
