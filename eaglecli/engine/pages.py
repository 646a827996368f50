"""The page pool: which KV slots are whose. Pure bookkeeping, no tensors.

Slot = page * page_size + offset. Page 0 is never handed out: its first slot is the dummy slot that padding writes to.
"""


class PagePool:
    """Hands out whole pages, all of a request's at once, and takes them back together."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        # Lowest pages on top of the stack: a short run touches little of a large cache.
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_slots(self) -> int:
        """Slots of the cache, the dummy page included."""
        return (self.num_pages + 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Whole pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, num_pages: int) -> bool:
        """Whether so many pages are free now."""
        return num_pages <= len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take `num_pages` pages. Raises ValueError when they are not there: ask `can_allocate` first."""
        if not self.can_allocate(num_pages):
            raise ValueError(f"{num_pages} pages asked, {len(self._free)} free")
        taken = self._free[len(self._free) - num_pages :]
        del self._free[len(self._free) - num_pages :]
        return taken[::-1]

    def free(self, pages: list[int]) -> None:
        """Give pages back, in the order in which they were allocated."""
        self._free.extend(reversed(pages))

    def check(self, held: list[list[int]]) -> None:
        """Prove that free and held pages are all pages, each once. Raises AssertionError naming the first fault."""
        owned = [page for pages in held for page in pages]
        seen = sorted(self._free + owned)
        assert seen == list(range(1, self.num_pages + 1)), f"pages lost or held twice: {len(seen)} known of {self.num_pages}"
