"""Predicted and measured peak memory: `python -m tests.benchmarks.estimates STORE CONFIG ...` prints the table.

The configs have been run with this store; of each stage the manifest has the measured peak.
"""

import sys
from dataclasses import replace
from pathlib import Path

from flows.preflight import place_store, store_of
from rollouts_core.config.loading import load_config
from rollouts_core.memory import GIB
from rollouts_core.stages.estimate import estimate
from rollouts_core.stages.plan import plan


def main(store: str, configs: list[str]) -> None:
    print("| config | stage | predicted | measured | predicted / measured |\n|---|---|---|---|---|")
    for name, *changes in (config.split(",") for config in configs):
        config = place_store(load_config(Path(name), changes), Path(name), store)
        stages, place = plan(config), store_of(config)
        for told, stage in zip(estimate(replace(config), stages, place), stages.stages, strict=True):
            if not told.parts or not place.has(stage.artifact):
                continue
            measured = place.manifest(stage.artifact).provenance.used.get("peak_memory")
            if measured:
                print(
                    f"| {Path(name).stem} {' '.join(changes)} | {told.stage} | {told.peak / GIB:.2f} GiB | "
                    f"{measured / GIB:.2f} GiB | {told.peak / measured:.2f} |"
                )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
