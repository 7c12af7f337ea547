"""The ranks of programs are forked from a process that has imported torch and this project."""

import sys
from pathlib import Path

from comm_utils.testing import preload

sys.path.insert(0, str(Path(__file__).resolve().parent))

preload("torch.distributed.tensor", "comm_orchestrator.facade")
