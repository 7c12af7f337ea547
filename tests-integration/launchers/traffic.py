"""What a host has sent over its network, for the programs of tests."""

from __future__ import annotations

__all__ = ["SETTLED"]

#: The beginning of a program, with ``settled()``: the bytes that TCP has delivered for this host, once that is all.
SETTLED = """
import json, os, re, subprocess, sys, time
import torch
import comm_orchestrator as dist

os.environ["COMM_CHECKS__ENABLED"] = "false"  # the watch asks the store again and again

def acknowledged_bytes():
    listed = subprocess.run(["ss", "-tinH"], capture_output=True, text=True, check=True).stdout
    found = 0
    for one in re.split(r"\\n(?=\\S)", listed):
        own, peer = (address.rpartition(":")[0].replace("[::ffff:", "").rstrip("]") for address in one.split()[3:5])
        if own != peer and not own.startswith("127."):
            found += sum(map(int, re.findall(r"bytes_acked:(\\d+)", one)))
    return found

def settled():  # what was delivered, once no rank waits for an acknowledgement
    dist.barrier()
    before = -1
    while (found := acknowledged_bytes()) != before:
        before = found
        time.sleep(0.1)
    dist.barrier()
    return found

"""
