"""Ranks of these tests are forked from a process that has imported what all of them import."""

from comm_utils.testing import preload

preload("torch.distributed.tensor", "pytest", "hypothesis")
