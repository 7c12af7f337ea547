"""Mistakes that type checkers find before the program runs; each line says what mypy reports there."""

from __future__ import annotations

import torch

import comm_orchestrator as dist

tensor = torch.ones(4)
dist.al_reduce(tensor)  # Module has no attribute "al_reduce"
dist.all_reduce(tensor, gruop=None)  # Unexpected keyword argument "gruop" for overloaded function "all_reduce"
dist.all_reduce("tensor")  # No overload variant of "all_reduce" matches argument type "str"
dist.broadcast(tensor, "0")  # No overload variant of "broadcast"
dist.all_reduce(tensor, timeout="5")  # No overload variant of "all_reduce"
rank: str = dist.get_rank()  # Incompatible types in assignment
dist.no_such_function()  # Module has no attribute "no_such_function"
dist.all_reduce(tensor, op=3)  # No overload variant of "all_reduce"
dist.all_reduce(tensor, group=[0, 1])  # No overload variant of "all_reduce"
dist.all_reduce(tensor).wait()  # "None" has no attribute "wait"
dist.all_gather([tensor], tensor, async_op=True).wait_all()  # "Work" has no attribute "wait_all"
number: int = dist.new_group([0])  # Incompatible types in assignment
names: list[str] = dist.all_gather(tensor)  # expression has type "list[Tensor]"
dist.new_group([0], backend=3)  # incompatible type "int"; expected "str | None"
