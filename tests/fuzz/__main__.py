"""Looks for input that is answered by a traceback instead of a message: `python -m tests.fuzz TARGET [SECONDS] [SEED]`.

Each target takes good input, changes it at random places, and hands it to the function that reads it. Allowed is what
that function promises: a value, or an error of this project with a message. Anything else is printed with the input
that did it. `all` instead of a target: each of them for so many seconds.
"""

import faulthandler
import os
import random
import signal
import sys
import time

from tests.fuzz.found import TARGETS, Findings

SECONDS = 60.0
MOST = 10
"""After so many that were found, it ends."""
LONGEST = 60
"""Seconds of one input. One that takes longer is shown, and everything ends."""


def main(target: str, seconds: float = SECONDS, seed: int = 0) -> int:
    """Exit status 1 where something was found."""
    return max([_looked(name, seconds, seed) for name in (TARGETS if target == "all" else [target])])


def _looked(name: str, seconds: float, seed: int) -> int:
    draw, end, findings, tried, shown = random.Random(seed), time.monotonic() + seconds, Findings(), 0, 0

    def show(*_: object) -> None:
        faulthandler.dump_traceback()
        print(f"  {name}: takes longer than {LONGEST} s: {findings.given!r:.2000}", flush=True)
        os._exit(1)

    signal.signal(signal.SIGALRM, show)
    with TARGETS[name].opened() as read:
        while time.monotonic() < end and shown < MOST:
            tried += 1
            signal.alarm(LONGEST)
            findings.look(TARGETS[name], read, draw)
            if len(findings.found) > shown:
                shown = len(findings.found)
                print(findings.found[-1], flush=True)
    signal.alarm(0)
    print(
        f"{name}: {tried:,} inputs in {seconds:.0f} s, seed {seed}: {findings.refused:,} refused with a message, "
        f"{shown} answered by something else",
        flush=True,
    )
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *(float(word) for word in sys.argv[2:3]), *(int(word) for word in sys.argv[3:4])))
