"""Waiting children: the actions that running actions have invoked, and that have not started."""

from __future__ import annotations

from collections.abc import Iterator

from manager.core.waiting.queue import Waiting


class WaitingChildren:
    """Waiting children by the id of their running parent, first come first."""

    def __init__(self) -> None:
        self._children: dict[str, list[Waiting]] = {}

    def __bool__(self) -> bool:
        return bool(self._children)

    def add(self, parent_id: str, child: Waiting) -> None:
        self._children.setdefault(parent_id, []).append(child)

    def leave(self, child: Waiting) -> None:
        """Forget a child that waits no more."""
        parent_id = child.action.parent or ""
        siblings = self._children.get(parent_id)
        if siblings is not None and child in siblings:
            siblings.remove(child)
            if not siblings:
                del self._children[parent_id]

    def orphan(self, parent_id: str) -> None:
        """Let the children of a parent that is over go on as ordinary actions."""
        self._children.pop(parent_id, None)

    def first(self) -> Iterator[tuple[str, Waiting]]:
        """Return each parent's id with the child that it invoked first; children may leave meanwhile."""
        return iter([(parent_id, children[0]) for parent_id, children in self._children.items()])
