"""Export the records of the comms logger on this rank to a file that other programs read.

``export(path, rows)`` chooses by the file's name:

* ``.jsonl``: JSON lines, one object for each row;
* ``.csv``: a heading and a line for each row;
* ``.prom``: Prometheus' text format, for the textfile collector of node_exporter.

A file is complete or as it was before: it is written beside its place and then moved there.
"""

from comm_utils.observability.exports.choosing import FORMATS, export
from comm_utils.observability.exports.prometheus import write_prometheus
from comm_utils.observability.exports.tables import write_csv, write_jsonl

__all__ = ["FORMATS", "export", "write_csv", "write_jsonl", "write_prometheus"]
