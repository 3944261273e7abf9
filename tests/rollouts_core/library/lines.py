"""How lines are counted."""


def lines_of(code: str) -> int:
    """Without blank lines and comments."""
    lines = [line.strip() for line in code.splitlines()]
    return len([line for line in lines if line and not line.startswith("#")])
