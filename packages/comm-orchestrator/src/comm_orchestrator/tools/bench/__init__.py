"""``commctl bench``: what collectives take, over sizes, types, reductions, groups and libraries.

:mod:`.command` refuses what cannot be and starts the ranks (:mod:`~comm_orchestrator.tools.local_ranks`), :mod:`.rank`
is what each of them does: :mod:`.plan` lists what is to be measured, :mod:`.measuring` measures it on the
:mod:`.libraries`, :mod:`.data` checks the results. Sizes, bandwidths and the table are those that users of nccl-tests
know.
"""
