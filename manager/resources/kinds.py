"""The kinds of declared resources; the configuration and the views derive from them."""

from __future__ import annotations

from manager.resources.concurrency import ConcurrencySpec
from manager.resources.declared import ResourceSpec
from manager.resources.quota import QuotaSpec

KINDS: tuple[type[ResourceSpec], ...] = (QuotaSpec, ConcurrencySpec)
