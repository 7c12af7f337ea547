"""The watch: who is missing, who has ended, and whose calls differ."""

from comm_utils.watch.settings import WatchSettings
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.watch import WATCH, Watch

__all__ = ["WATCH", "Trouble", "Watch", "WatchSettings"]
