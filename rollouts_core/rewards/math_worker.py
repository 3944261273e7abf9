"""The process that compares mathematics: `python -m rollouts_core.rewards.math_worker`, a JSON object a line."""

import ctypes
import json
import logging
import resource
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
MOST_MEMORY = 4 * 2**30


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        from math_verify import parse, verify
    except ImportError as error:
        _say({"error": f"math_equal needs the package math-verify where it runs: {error}"})
        return
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    _say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        _say(_compared(parse, verify, asked["answer"], asked["response"]))


def _compared(parse: Any, verify: Any, answer: str, response: str) -> dict[str, Any]:
    """Compare two answers. math-verify's own deadlines use alarms and are off: the caller has a deadline."""
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    wanted = parse(marked, parsing_timeout=None) or parse(answer, parsing_timeout=None)
    if not wanted:
        return {"error": f"the row's answer {answer!r} is not mathematics that math-verify can read"}
    try:
        return {"equal": bool(verify(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))}
    except (MemoryError, RecursionError):
        return {"equal": False}


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
