"""Write down the public surface as it is released: `python -m tests.rollouts_core.library.release`."""

import json
from pathlib import Path

from tests.rollouts_core.library.surface import surface

if __name__ == "__main__":
    path = Path(__file__).with_name("released.json")
    path.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
