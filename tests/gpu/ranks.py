"""Two ranks that share one GPU, by gloo, against one device."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rollouts_core.training.objectives import create_cross_entropy_loss
from rollouts_core.training.pytorch import create_pytorch_backend
from tests.gpu.rows import tell
from tests.rollouts_core.models import tiny_model
from tests.rollouts_core.on_ranks import STEPS, optimization, train

SECONDS = 80


def main(device: str) -> None:
    alone = train(create_pytorch_backend(tiny_model(), create_cross_entropy_loss(), optimization()), range(STEPS))
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["--log-dir=/dev/null", "-m", "tests.rollouts_core.on_ranks", "train", directory]
        environment = os.environ | {"ROLLOUTS_TEST_DEVICE": device}
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
        if done.returncode:
            tell("two ranks", done.stderr[-600:].replace("\n", " "), False)
            return
        told = json.loads((Path(directory) / "told.json").read_text())
    apart = max(abs(one[name] / other[name] - 1) for one, other in zip(told, alone, strict=True) for name in other)
    tell("two ranks", f"losses and norms of {STEPS} steps at most {apart:.1e} from one device's", apart < 1e-3)


if __name__ == "__main__":
    main(sys.argv[1])
