"""Exponential backoff: the one formula of every retry, in the server and in its clients."""

from __future__ import annotations

#: Doublings beyond which a wait grows no more, whatever its bound: 2.0 ** 1024 is no float.
_DOUBLINGS_MAX = 64


def backoff_s(attempt: int, first_s: float, most_s: float, chance: float = 1.0) -> float:
    """Return the seconds to wait after try ``attempt`` (from 1): ``first_s``, doubled each time, at most ``most_s``.

    ``chance`` is the part of it that is waited: drawn from [0, 1) it spreads those who failed together (full jitter).
    """
    return min(most_s, first_s * 2.0 ** min(attempt - 1, _DOUBLINGS_MAX)) * chance
