"""Work done ahead by threads, handed out in the order of its items however many threads there are.

Threads and no processes: what takes the time (reading, unpacking, tokenising by the packages, gathering) releases
Python's lock; a thread needs no copy of the program, cannot be orphaned, and nothing forks beside CUDA or gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
JOIN_S = 2.0


class Ordered(Generic[Item, Result]):
    """An iterator over `work(item)`; `close` it. Without workers each result is made when it is asked for.

    The items are drawn one at a time, by whichever thread is free; drawing them may take long as well.
    """

    def __init__(
        self, items: Iterator[Item], work: Callable[[Item], Result], *, workers: int, ahead: int, name: str
    ) -> None:
        self._items, self._work, self._ahead = items, work, max(ahead, workers)
        self._drawing = threading.Lock()
        self._changed = threading.Condition()
        self._done: dict[int, Result | BaseException] = {}
        self._drawn = self._taken = 0
        self._exhausted = self._closed = False
        # Daemons: a thread that stands in a read that never returns must not keep the process.
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        """Raises what drawing or work raised, in the place of its result."""
        if not self._threads:
            return self._work(next(self._items))
        with self._changed:
            self._changed.wait_for(lambda: self._taken in self._done or self._is_over())
            if self._taken not in self._done:
                raise StopIteration
            result = self._done.pop(self._taken)
            self._taken += 1
            self._changed.notify_all()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """The threads end when they have done what they are at; one that stands in a read is left behind."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _is_over(self) -> bool:
        return self._closed or (self._exhausted and self._taken == self._drawn)

    def _run(self) -> None:
        while self._has_room():
            with self._drawing:
                number, item = self._draw()
            if number is None:
                return
            self._finish(number, item if isinstance(item, BaseException) else self._made(item))

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._drawn < self._taken + self._ahead)
            return not self._closed

    def _draw(self) -> tuple[int | None, Item | BaseException]:
        """A number and its item, or the error in its place, which is the last; no number when there are no more."""
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
            self._drawn += 1
            return self._drawn - 1, item

    def _made(self, item: Item) -> Result | BaseException:
        try:
            return self._work(item)
        except BaseException as error:  # handed on to who asks for the result
            return error

    def _finish(self, number: int, result: Result | BaseException) -> None:
        with self._changed:
            self._done[number] = result
            self._changed.notify_all()
