"""The rule for sending a request again."""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass

from tangram.errors import (
    CapacityExceededError,
    ConnectionFailed,
    DrainingError,
    FunctionUnavailableError,
    QuotaExceededError,
    StorageUnavailableError,
    TangramError,
)
from tangram.types.values.backoff import backoff_s

logger = logging.getLogger("tangram.client")
#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()

#: Refused before any work: trying again later cannot run anything twice.
REFUSALS = (
    QuotaExceededError,
    CapacityExceededError,
    DrainingError,
    StorageUnavailableError,
    FunctionUnavailableError,
)
#: Of these, what a restart answers with: they end by themselves.
OUTAGES = (DrainingError, StorageUnavailableError)
#: Half of the first wait after a lost connection; it doubles with each further one, up to the second.
BACKOFF_S, BACKOFF_MAX_S = 0.2, 5.0
#: Tries of a request that is refused by a bound, unless ``max_attempts`` says otherwise.
ATTEMPTS = 5
#: One outage fails every call that is under way: seconds for which the same is not told again, and how much is kept.
TELL_EVERY_S, TOLD_MAX = 10.0, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often and how long a refused or lost request is tried again."""

    #: Tries of one request, whatever becomes of them; None: five of one that is refused by a bound, and for an outage
    #: as many as ``outage_s`` has room for.
    max_attempts: int | None = None
    #: Longest single wait in seconds; a longer Retry-After is not waited for, the error is raised.
    wait_max_s: float = 30.0
    #: Seconds for which a gateway that cannot be reached, drains or starts is waited for.
    outage_s: float = 60.0
    #: The same for an address at which nobody listens and nobody has answered this client before; None: as long.
    refused_s: float | None = None

    def patience_s(self, error: TangramError, *, new: bool) -> float:
        """Return for how long an outage is waited for; ``new`` if nobody has answered yet."""
        refused = new and self.refused_s is not None and error.detail.get("refused")
        return self.refused_s if refused and self.refused_s is not None else self.outage_s

    def wait_s(
        self, error: TangramError, attempt: int, failing_s: float, *, repeatable: bool, new: bool = False
    ) -> float | None:
        """Return the seconds to wait before try ``attempt + 1``, or None if the error is to be raised.

        ``failing_s`` is how long it has failed. Refusals ran nothing. A lost connection may have, so only a
        ``repeatable`` request is sent again.
        """
        if error.detail.get("tls") or error.detail.get("foreign"):
            return None
        lost = isinstance(error, ConnectionFailed)
        outage = lost or isinstance(error, OUTAGES)
        most = self.max_attempts or (None if outage else ATTEMPTS)
        if (most is not None and attempt >= most) or (outage and failing_s >= self.patience_s(error, new=new)):
            return None
        if isinstance(error, REFUSALS) and error.retry_after_s is not None:
            return error.retry_after_s if error.retry_after_s <= self.wait_max_s else None
        if lost and (repeatable or not error.detail.get("sent", True)):
            most_s = min(BACKOFF_MAX_S, self.wait_max_s)
            return backoff_s(attempt + 1, BACKOFF_S, most_s, CHANCE.uniform(0.5, 1.0))
        return None


class Teller:
    """Warns once of what many calls, of all clients in the process, meet at the same time."""

    def __init__(self) -> None:
        self._told_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def warn(self, failure: str, then: str) -> None:
        """Warn of the failure and what is done about it, unless that failure was told within ``TELL_EVERY_S``."""
        now_s = time.monotonic()
        with self._lock:
            told_s = self._told_s.pop(failure, None)
            again = told_s is None or now_s - told_s >= TELL_EVERY_S
            self._told_s[failure] = now_s if told_s is None or again else told_s
            while len(self._told_s) > TOLD_MAX:
                del self._told_s[next(iter(self._told_s))]
        logger.log(logging.WARNING if again else logging.DEBUG, "%s; %s", failure, then)


TELLER = Teller()


class FailureStreak:
    """How long, and how often, one thing has failed in a row."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._attempt = 0
        self._since_s = 0.0

    def again_s(self, error: TangramError, *, repeatable: bool = True, new: bool = False) -> float | None:
        """It failed: return the seconds to wait before the next try, or None if the error is to be raised."""
        now_s = time.monotonic()
        if self._attempt == 0:
            self._since_s = now_s
        self._attempt += 1
        wait_s = self._retries.wait_s(error, self._attempt, now_s - self._since_s, repeatable=repeatable, new=new)
        if wait_s is not None and self._attempt == 1:
            if isinstance(error, ConnectionFailed):
                TELLER.warn(str(error), f"trying again for {self._retries.patience_s(error, new=new):g} s")
            elif isinstance(error, FunctionUnavailableError):
                TELLER.warn(str(error), f"asking again in {wait_s:.0f} s")
        return wait_s

    def succeeded(self) -> None:
        """It did not fail this time."""
        self._attempt = 0
