"""The address at which the pages of runs are served, if they are."""

import os
from urllib.parse import quote

PAGES = "ROLLOUTS_PAGES"
"""Names the address under which whoever serves the outputs directory serves it; `rollouts up` does."""


def address_of(below: str) -> str | None:
    """The address of a file below the outputs directory; None where nobody serves it."""
    address = os.environ.get(PAGES)
    return f"{address.rstrip('/')}/{quote(below)}" if address else None
