"""The objects of one namespace: by key, and linked to the objects that they continue."""

from __future__ import annotations

from maru_shm.index.entries import Entry, EntryState, Missing, Node
from maru_shm.types import Key, Namespace


class Forest:
    """Keys of one namespace. A key is in at most one of ``sealed``, ``reserved``, ``missing``."""

    __slots__ = ("missing", "namespace", "reserved", "sealed")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.sealed: dict[Key, Entry] = {}
        self.reserved: dict[Key, Entry] = {}
        self.missing: dict[Key, Missing] = {}

    def __len__(self) -> int:
        return len(self.sealed) + len(self.reserved) + len(self.missing)

    def node(self, key: Key) -> Node | None:
        """Whatever stands for ``key``."""
        return self.sealed.get(key) or self.reserved.get(key) or self.missing.get(key)

    def plant(self, entry: Entry, parent_key: Key | None) -> None:
        """Add a reserved entry: under its parent, and over the children that waited for it.

        A parent that is the key itself, or that descends from it, cannot be a prefix of it: the
        link is left out, because a ring could never be evicted.
        """
        self.reserved[entry.key] = entry
        waiting = self.missing.pop(entry.key, None)
        if waiting is not None:
            _move_children(waiting, entry)
        if parent_key is None or parent_key == entry.key:
            return
        parent = self.node(parent_key)
        if parent is None:
            parent = self.missing[parent_key] = Missing(parent_key, self)
        elif waiting is not None and _descends(parent, entry):
            return
        _link(parent, entry)

    def seal(self, entry: Entry) -> None:
        """Make a reserved entry findable."""
        del self.reserved[entry.key]
        self.sealed[entry.key] = entry
        entry.state = EntryState.SEALED
        if isinstance(entry.parent, Entry):
            entry.parent.heir = entry
        for child in entry.children():
            if child.state is EntryState.SEALED:
                entry.heir = child
                break

    def uproot(self, entry: Entry) -> Entry | None:
        """Take an entry out; its children, if any, wait for its key to come back.

        Returns its parent, if that is in the pool.
        """
        del (self.sealed if entry.state is EntryState.SEALED else self.reserved)[entry.key]
        parent = entry.parent
        if parent is not None:
            _unlink(parent, entry)
        if entry.first_child is not None:
            stand_in = self.missing[entry.key] = Missing(entry.key, self)
            _move_children(entry, stand_in)
        entry.heir = None
        if isinstance(parent, Entry):
            return parent
        if parent is not None and parent.first_child is None:
            del self.missing[parent.key]
        return None


def _link(parent: Node, child: Entry) -> None:
    first = parent.first_child
    child.parent = parent
    child.next_sibling = first
    if first is not None:
        first.previous_sibling = child
    parent.first_child = child


def _unlink(parent: Node, child: Entry) -> None:
    before, behind = child.previous_sibling, child.next_sibling
    if before is None:
        parent.first_child = behind
    else:
        before.next_sibling = behind
    if behind is not None:
        behind.previous_sibling = before
    if isinstance(parent, Entry) and parent.heir is child:
        parent.heir = None
    child.parent = child.next_sibling = child.previous_sibling = None


def _move_children(old: Node, new: Node) -> None:
    new.first_child, old.first_child = old.first_child, None
    for child in new.children():
        child.parent = new


def _descends(node: Node, ancestor: Entry) -> bool:
    while isinstance(node, Entry):
        if node is ancestor:
            return True
        if node.parent is None:
            return False
        node = node.parent
    return False
