"""Prefetching with threads. The results have the order of the items.

Threads are used instead of processes because the slow parts (reading, decompressing, tokenizing, copying) release
Python's global interpreter lock. Threads end with their process, and need no fork, which is unsafe with CUDA or gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
JOIN_S = 2.0


class OrderedPrefetch(Generic[Item, Result]):
    """An iterator over the results of `work(item)`, which threads compute in advance.

    Only one thread at a time takes an item, so `items` may be slow and need not be thread-safe. At most `ahead`
    results, or one per worker if that is more, are computed in advance. With `workers` 0, each result is computed when
    it is requested. Call `close` at the end. `name` is the prefix of the thread names.
    """

    def __init__(
        self, items: Iterator[Item], work: Callable[[Item], Result], *, workers: int, ahead: int, name: str
    ) -> None:
        self._items, self._work, self._max_ahead = items, work, max(ahead, workers)
        self._items_lock = threading.Lock()
        self._changed = threading.Condition()
        self._results: dict[int, Result | BaseException] = {}
        self._started_count = self._returned_count = 0
        self._exhausted = self._closed = False
        # Daemon threads, so that a thread blocked in a read that never returns does not keep the process alive.
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        """Return the next result, or raise the exception that occurred while it was computed."""
        if not self._threads:
            return self._work(next(self._items))
        with self._changed:
            self._changed.wait_for(lambda: self._returned_count in self._results or self._is_over())
            if self._returned_count not in self._results:
                raise StopIteration
            result = self._results.pop(self._returned_count)
            self._returned_count += 1
            self._changed.notify_all()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Stop the threads, waiting at most JOIN_S seconds for each of them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _is_over(self) -> bool:
        return self._closed or (self._exhausted and self._returned_count == self._started_count)

    def _run(self) -> None:
        while self._has_room():
            with self._items_lock:
                number, item = self._next_item()
            if number is None:
                return
            self._finish(number, item if isinstance(item, BaseException) else self._compute(item))

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._started_count < self._returned_count + self._max_ahead)
            return not self._closed

    def _next_item(self) -> tuple[int | None, Item | BaseException]:
        """Return the number and value of the next item. The number is None if there are no more items."""
        if self._exhausted or self._closed:
            return None, StopIteration()
        try:
            item: Item | BaseException = next(self._items)
        except StopIteration as end:
            with self._changed:
                self._exhausted = True
                self._changed.notify_all()
            return None, end
        except BaseException as error:
            self._exhausted = True
            item = error
        with self._changed:
            self._started_count += 1
            return self._started_count - 1, item

    def _compute(self, item: Item) -> Result | BaseException:
        try:
            return self._work(item)
        except BaseException as error:  # raised again by __next__
            return error

    def _finish(self, number: int, result: Result | BaseException) -> None:
        with self._changed:
            self._results[number] = result
            self._changed.notify_all()
