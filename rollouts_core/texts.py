"""Text that can be stored and tokenized."""

import json
from typing import Any

HALF = "has half of a character: a \\ud800 to \\udfff without its other half"


def has_half_characters(value: Any) -> bool:
    """Whether a text in JSON data has half of a UTF-16 pair. JSON allows it; files and tokenizers do not."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return True
    return False
