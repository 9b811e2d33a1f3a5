"""Retention: old records and logs are deleted in the background, a bounded number at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from gateway.store import PRUNE_ROWS, Store
from manager.errors import StorageUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSpec:
    """How long ended records and their logs are kept."""

    records_age_s: float = 30 * 86400.0
    records_bytes: int = 8 * 2**30
    interval_s: float = 300.0
    #: Pause between two deletions of one round, so that they never keep the writer busy.
    pause_s: float = 0.05


async def prune_for_ever(store: Store, spec: RetentionSpec, wall: Callable[[], float] = time.time) -> None:
    """Delete what is too old or too much, every ``interval_s``, until cancelled."""
    log = structlog.get_logger("gateway.retention")
    while True:
        deleted = 0
        try:
            while True:
                older_than_s = wall() - spec.records_age_s
                count = await store.prune(older_than_s=older_than_s, bytes_max=spec.records_bytes)
                deleted += count
                if count < PRUNE_ROWS // 2:
                    break
                await asyncio.sleep(spec.pause_s)
        except StorageUnavailable as error:
            log.warning("old records stay", reason=error.message)
        if deleted:
            log.info("old records deleted", records=deleted)
        await asyncio.sleep(spec.interval_s)
