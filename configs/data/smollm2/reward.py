"""Is the first number of the answer the right one?"""

import re

from rollouts_core.types import Sample


def first_number(sample: Sample) -> float:
    """1.0 where it is, whatever follows; otherwise 0.0."""
    found = re.search(r"-?\d+", sample.response)
    return float(found is not None and found.group() == str(sample.prompt.metadata["answer"]))
