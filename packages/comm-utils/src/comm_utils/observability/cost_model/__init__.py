"""Models of how long communication takes: latency and bandwidth, fitted to measurements.

What they say of anything that was not measured is a prediction, with an interval, and has to be called so.
"""

from comm_utils.observability.cost_model.estimating import MARKS, Estimate, Estimator, NoFitError
from comm_utils.observability.cost_model.fitting import HOLD_OUT, Fit, FittedPoint, fit_all, held_out
from comm_utils.observability.cost_model.link import Link, parse_link
from comm_utils.observability.cost_model.model import NOT_MEASURED, Model, Source
from comm_utils.observability.cost_model.points import STATISTICS, Key, Point, collect
from comm_utils.observability.cost_model.rounds import Shape

__all__ = [
    "HOLD_OUT",
    "MARKS",
    "NOT_MEASURED",
    "STATISTICS",
    "Estimate",
    "Estimator",
    "Fit",
    "FittedPoint",
    "Key",
    "Link",
    "Model",
    "NoFitError",
    "Point",
    "Shape",
    "Source",
    "collect",
    "fit_all",
    "held_out",
    "parse_link",
]
