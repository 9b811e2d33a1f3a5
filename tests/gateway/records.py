"""Records as an accepted invocation makes them, for tests of what keeps them."""

from __future__ import annotations

from gateway.invocations.record import Mode, Record, new_id
from gateway.store.store import Store


def accepted(store: Store, **fields: object) -> Record:
    """The record of an accepted async invocation, created in the store but not committed."""
    seq = store.next_seq()
    usual: dict[str, object] = {
        "seq": seq,
        "id": new_id(seq),
        "function": "f",
        "revision": "r",
        "task": "default",
        "trajectory": None,
        "parent": None,
        "mode": Mode.ASYNC,
        "accepted_s": float(seq),
        "input": b"{}",
    }
    made = Record(**(usual | fields))  # type: ignore[arg-type]  # the fields' names are the test's own
    store.create(made)
    return made
