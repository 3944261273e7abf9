"""Is the answer the number, and nothing else?"""

import re

from rollouts_core.types import Sample


def number_only(sample: Sample) -> float:
    """1.0 where the answer is the right number alone; 0.5 where the right number comes first and more follows."""
    answer = str(sample.prompt.metadata["answer"])
    if sample.response.strip() == answer:
        return 1.0
    found = re.search(r"-?\d+", sample.response)
    return 0.5 if found is not None and found.group() == answer else 0.0
