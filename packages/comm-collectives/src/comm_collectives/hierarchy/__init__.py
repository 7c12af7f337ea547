"""Collectives of groups that span hosts, in steps within hosts and steps between them.

:mod:`.layout` knows the hosts of a group's ranks, :mod:`.plan` makes the groups within and between hosts,
:mod:`.algorithms` are the steps, :mod:`.backend` offers them as a backend, and :mod:`.choice` decides which calls take
them.
"""
