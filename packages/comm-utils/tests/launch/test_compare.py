"""Launchers that say something else than the one that was believed."""

from __future__ import annotations

import pytest

from comm_utils.launch import LAUNCHERS, LaunchInfo, contradictions, discover

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


def test_one_sentence_says_who_what_and_which() -> None:
    environ = {**SRUN, "RANK": "0", "WORLD_SIZE": "4"}
    assert contradictions(environ, discover(environ)) == [
        "slurm says rank 1 (environment variable SLURM_PROCID) and world size 2 (environment variable "
        "SLURM_STEP_NUM_TASKS); rank 0 (environment variable RANK) and world size 4 (environment variable WORLD_SIZE) "
        "are used"
    ]


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "2"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"},  # a batch script
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFB)},
    ],
)
def test_tasks_of_slurm_that_nobody_started(environ: dict[str, str]) -> None:
    (sentence,) = contradictions(environ, discover(environ))
    assert "Slurm has allocated 2 tasks (environment variable SLURM_NTASKS)" in sentence
    assert "start all tasks with 'srun python ...'" in sentence
    assert contradictions({**environ, "SLURM_NTASKS": "1"}, discover(environ)) == []
    launched = {**environ, "RANK": "0", "WORLD_SIZE": "2"}
    assert contradictions(launched, discover(launched)) == []
    assert contradictions({"SLURM_NTASKS": "x"}, discover(environ)) == []


def test_only_what_differs() -> None:
    environ = {**SRUN, "RANK": "1", "WORLD_SIZE": "4"}
    (sentence,) = contradictions(environ, discover(environ))
    assert "rank" not in sentence
    assert "world size 2" in sentence
    assert contradictions({**environ, "WORLD_SIZE": "2"}, discover({**environ, "WORLD_SIZE": "2"})) == []


def test_half_of_torchruns_pair() -> None:
    environ = {**SRUN, "WORLD_SIZE": "4"}
    assert contradictions(environ, discover(environ)) == [
        "environment variable WORLD_SIZE is 4; world size 2 (environment variable SLURM_STEP_NUM_TASKS) is used"
    ]
    for right in ({**SRUN, "WORLD_SIZE": "2"}, {**SRUN, "RANK": "1"}, {**SRUN, "RANK": "x"}):
        assert contradictions(right, discover(right)) == []


def test_stale_variables_of_pmi() -> None:
    environ = {**SRUN, "PMI_RANK": "0", "PMI_SIZE": "2"}
    assert contradictions(environ, discover(environ)) == [
        "pmi says rank 0 (environment variable PMI_RANK); rank 1 (environment variable SLURM_PROCID) is used"
    ]


def test_arguments_may_be_contradicted() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2"}
    info = LaunchInfo("arguments", 1, 2, sources={"rank": "argument rank"})
    assert contradictions(environ, info) == [
        "environment says rank 0 (environment variable RANK); rank 1 (argument rank) is used"
    ]


@pytest.mark.parametrize(
    "environ",
    [
        # torchrun's agents run under srun on purpose.
        {**SRUN, "RANK": "7", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"},
        # A launcher that lost and cannot be understood does not matter.
        {**SRUN, "SLURM_PROCID": "x", "RANK": "0", "WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "4", "PET_NNODES": "1:4"},
        # Open MPI says the same as the cloud that it was started by.
        {"SM_HOSTS": '["a", "b"]', "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {},
    ],
)
def test_nothing_to_say(environ: dict[str, str]) -> None:
    assert contradictions(environ, discover(environ)) == []


def test_launchers_may_be_given() -> None:
    launchers = (("mine", lambda _: LaunchInfo("mine", 3, 4)), *LAUNCHERS)
    (sentence,) = contradictions({}, LaunchInfo("arguments", 0, 4), launchers)
    assert sentence == "mine says rank 3 (mine); rank 0 (arguments) is used"
