"""Code that every layer on torch shares; beside ``testing``, the only part of this package that needs torch.

The backends and the collectives import it; nothing else of ``comm_utils`` does, so that ``comm_utils`` needs no torch.
"""
