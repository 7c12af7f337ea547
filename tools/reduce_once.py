"""Reduce once on the backend that is named, to show that an installation works.

torchrun --standalone --nproc-per-node 2 tools/reduce_once.py BACKEND
"""

from __future__ import annotations

import sys

import torch

import comm_orchestrator as dist

dist.init_distributed(sys.argv[1])
tensor = torch.ones(1 << 18)
dist.all_reduce(tensor)
if not tensor.eq(dist.get_world_size()).all():
    sys.exit(f"all_reduce gave {tensor}")
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks reduced on {dist.get_backend()}: {dist.available_backends()['ccl'].details}")
dist.destroy_process_group()
