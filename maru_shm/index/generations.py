"""Objects by generation: found by number, and listed in ascending order page by page."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice

from maru_shm.index.entries import Entry
from maru_shm.types import Generation

_PAGE_ENTRIES = 1024
_SPARSE_ENTRIES = _PAGE_ENTRIES // 8


class ByGeneration:
    """Generations only ever grow, so appending to pages of dictionaries keeps them sorted.

    Lookup and removal bisect the pages; the list of pages is 1/1024 of the objects. A page that
    few survive on is written anew, so that memory follows the living, not the dead.
    """

    def __init__(self) -> None:
        self._firsts: list[Generation] = []
        self._pages: list[dict[Generation, Entry]] = []
        self._room = 0

    def append(self, entry: Entry) -> None:
        """Add an entry whose generation is higher than every one added before."""
        generation = entry.generation
        if not self._room or not self._pages:
            self._firsts.append(generation)
            self._pages.append({})
            self._room = _PAGE_ENTRIES
        self._pages[-1][generation] = entry
        self._room -= 1

    def get(self, generation: Generation) -> Entry | None:
        """The entry with this generation."""
        position = bisect_right(self._firsts, generation) - 1
        return self._pages[position].get(generation) if position >= 0 else None

    def remove(self, entry: Entry) -> None:
        """Forget an entry that is there."""
        generation = entry.generation
        position = bisect_right(self._firsts, generation) - 1
        page = self._pages[position]
        del page[generation]
        if not page:
            del self._pages[position]
            del self._firsts[position]
            if position == len(self._pages):
                self._room = 0
        elif len(page) == _SPARSE_ENTRIES:
            self._pages[position] = dict(page)

    def after(self, generation: Generation, limit: int) -> list[Entry]:
        """The first ``limit`` entries behind ``generation``, ascending."""
        rows: list[Entry] = []
        for position in range(max(0, bisect_right(self._firsts, generation) - 1), len(self._pages)):
            if len(rows) >= limit:
                break
            behind = (
                entry for number, entry in self._pages[position].items() if number > generation
            )
            rows.extend(islice(behind, limit - len(rows)))
        return rows
