"""Rows and columns in whole tiles, so that a request's bits do not depend on the other requests of its batch.

Matrix products take another path when they have a handful of rows, and attention when its columns end off a vector.
"""

TILE = 16


def round_up(count: int) -> int:
    """The next multiple of the tile."""
    return -(-count // TILE) * TILE
