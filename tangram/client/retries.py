"""The rule for sending a request again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tangram.errors import (
    CapacityExceededError,
    ConnectionFailed,
    DrainingError,
    QuotaExceededError,
    StorageUnavailableError,
    TangramError,
)
from tangram.types.backoff import backoff_s

#: Refused before any work: trying again later cannot run anything twice.
REFUSALS = (QuotaExceededError, CapacityExceededError, DrainingError, StorageUnavailableError)
#: Half of the first wait after a lost connection; it doubles with each further one.
BACKOFF_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often and how long a refused or lost request is tried again."""

    max_attempts: int = 5
    #: Longest single wait in seconds; a longer Retry-After is not waited for, the error is raised.
    wait_max_s: float = 30.0

    def wait_s(self, error: TangramError, attempt: int, *, repeatable: bool) -> float | None:
        """Return the seconds to wait before try ``attempt + 1``, or None if the error is to be raised.

        Refusals ran nothing. A lost connection may have, so only a ``repeatable`` request is sent again.
        """
        if attempt >= self.max_attempts:
            return None
        if isinstance(error, REFUSALS) and error.retry_after_s is not None:
            return error.retry_after_s if error.retry_after_s <= self.wait_max_s else None
        if isinstance(error, ConnectionFailed) and (repeatable or not error.detail.get("sent", True)):
            return backoff_s(attempt + 1, BACKOFF_S, self.wait_max_s, random.uniform(0.5, 1.0))
        return None
