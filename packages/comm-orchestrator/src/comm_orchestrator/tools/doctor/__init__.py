"""``commctl doctor``: what there is, what is wrong with it, and what to do about it.

Each check is a module with functions that return :class:`~comm_orchestrator.tools.doctor.finding.Finding` objects;
``examination`` runs all of them, on one rank or on all ranks of a job together.
"""

__all__: list[str] = []
