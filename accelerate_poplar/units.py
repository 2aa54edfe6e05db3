"""Bytes as people read them."""

from __future__ import annotations

GIB = 1024**3
"""Bytes in a GiB."""


def gib(count: float, *, digits: int = 1) -> str:
    """A number of bytes in GiB, with its unit."""
    return f"{count / GIB:.{digits}f} GiB"
