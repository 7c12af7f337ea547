"""Check that digits.py ends with the same weights on 1, 2 and 4 ranks, on every backend that is named, and with an
accuracy above 95 %.

python same_weights.py [BACKEND ...]
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SCRIPT = Path(__file__).with_name("digits.py")


def train(backend: str, ranks: int, weights: Path) -> float:
    """Run digits.py on ``ranks`` processes; return the held-out accuracy it printed, in percent."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(SCRIPT), "--save", str(weights)]
    environment = os.environ | {"COMM_PROCESS_GROUP__BACKEND": backend}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = re.search(r"held-out accuracy .*: ([\d.]+)%", finished.stdout)
    if finished.returncode or found is None:
        sys.exit(f"training on {ranks} ranks failed on {backend}:\n{finished.stdout}{finished.stderr}")
    return float(found[1])


backends = sys.argv[1:] or ["gloo"]
with tempfile.TemporaryDirectory() as folder:
    reference = None
    for backend in backends:
        for ranks in (1, 2, 4):
            file = Path(folder, f"{ranks}.pt")
            accuracy = train(backend, ranks, file)
            weights = torch.cat([tensor.flatten() for tensor in torch.load(file, weights_only=True).values()])
            reference = weights if reference is None else reference
            difference = (weights - reference).abs().max().item()
            print(f"{ranks} ranks on {backend}: {accuracy:.1f} % right, weights differ by at most {difference:.1e}")
            if accuracy <= 95:
                sys.exit("the accuracy is not above 95 %")
            torch.testing.assert_close(weights, reference, rtol=1e-3, atol=1e-4)
print(f"1, 2 and 4 ranks end with the same weights on {' and '.join(backends)}")
