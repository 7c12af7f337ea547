"""Pipeline parallelism: schedules as data, their check, and what runs them."""

from comm_collectives.hooks.pipeline.actions import Action, Compute, Exchange, Message, Schedule
from comm_collectives.hooks.pipeline.channel import StageChannel, TensorType
from comm_collectives.hooks.pipeline.check import ScheduleReport, check_schedule
from comm_collectives.hooks.pipeline.run import run_schedule
from comm_collectives.hooks.pipeline.schedules import (
    forward_only,
    gpipe,
    interleaved,
    one_forward_one_backward,
    schedule_of,
)
from comm_collectives.hooks.pipeline.tied import TiedParameter, tie_parameter

__all__ = [
    "Action",
    "Compute",
    "Exchange",
    "Message",
    "Schedule",
    "ScheduleReport",
    "StageChannel",
    "TensorType",
    "TiedParameter",
    "check_schedule",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_forward_one_backward",
    "run_schedule",
    "schedule_of",
    "tie_parameter",
]
