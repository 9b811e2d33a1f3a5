"""Families: the actions that running actions have invoked, and that wait."""

from __future__ import annotations

from collections.abc import Iterator

from manager.core.queue import Entry


class WaitingChildren:
    """Waiting children by the id of their running parent, first come first."""

    def __init__(self) -> None:
        self._children: dict[str, list[Entry]] = {}

    def add(self, parent_id: str, child: Entry) -> None:
        self._children.setdefault(parent_id, []).append(child)

    def leave(self, child: Entry) -> None:
        """It waits no more."""
        parent_id = child.action.parent or ""
        siblings = self._children.get(parent_id)
        if siblings is not None and child in siblings:
            siblings.remove(child)
            if not siblings:
                del self._children[parent_id]

    def orphan(self, parent_id: str) -> None:
        """The parent is over: its children go on as ordinary actions."""
        self._children.pop(parent_id, None)

    def first(self) -> Iterator[tuple[str, Entry]]:
        """Each parent's id and the child that it invoked first; children may leave meanwhile."""
        return iter([(parent_id, children[0]) for parent_id, children in self._children.items()])
