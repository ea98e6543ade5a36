"""Where the program chose to leave: the line that called sys.exit or os._exit, told to the board.

Neither raises anything that a hook would see, and the beat's last look may be a quarter of a second old. Who leaves
with a failure while an exception is handled leaves because of it: a child of mp.spawn, and many a main function.
"""

from __future__ import annotations

import _thread
import os
import sys

from .. import protocol
from .places import chain, innermost, place_text

# typing costs more than everything else here together, in every Python process of a run: only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .endings import Endings
    from .status_file import StatusFileWriter
    from .trouble import TroubleLog


class Leaving:
    """Stands around the two calls. Both do what they did; whoever catches SystemExit goes on."""

    def __init__(self, board: StatusFileWriter, trouble: TroubleLog, endings: Endings) -> None:
        self._board = board
        self._trouble = trouble
        self._endings = endings
        self._pid = os.getpid()
        self._main_thread = _thread.get_ident()
        harness = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        # Packages are foreign here as well: argparse and click leave on behalf of the line that called them.
        self._foreign = (os.path.dirname(os.__file__) + os.sep, harness + os.sep, "<frozen ")

    def install(self) -> None:
        sys.exit = self._around(sys.exit, whole_process=False)
        os._exit = self._around(os._exit, whole_process=True)

    def watch_the_end(self) -> None:
        """Called as the interpreter begins to end, before it joins threads and calls handlers, which may hang.

        Only once torch is there: it has loaded threading. Python has no public way to be called that early.
        """
        sys.modules["threading"]._register_atexit(self._over)

    def _over(self) -> None:
        if os.getpid() == self._pid:
            self._board.over = True
            self._trouble.attempt("raised", self._endings.has_left)
            self._trouble.attempt("end", lambda: self._board.note(self._board.what("exit", "shutdown")))

    def _around(self, leave: Callable[..., Any], *, whole_process: bool) -> Callable[..., Any]:
        def leaving(*args: Any, **options: Any) -> Any:
            # sys.exit in another thread ends that thread alone; a forked child has no board.
            ends = whole_process or _thread.get_ident() == self._main_thread
            if ends and os.getpid() == self._pid:
                frame = sys._getframe(1)
                self._trouble.attempt("leaving", lambda: self._tell(frame))
                if args[:1] not in ((), (None,), (0,)):
                    self._endings.leaves(sys.exc_info()[1])
                if whole_process:
                    self._trouble.attempt("raised", self._endings.has_left)
            return leave(*args, **options)

        # As functools.wraps does, which is not loaded yet.
        leaving.__name__, leaving.__qualname__, leaving.__doc__ = leave.__name__, leave.__qualname__, leave.__doc__
        return leaving

    def _tell(self, frame: Any) -> None:
        left = innermost(frame, self._foreign) or frame
        self._board.saw(place_text(left.f_code.co_filename, left.f_lineno, left.f_code.co_name))
        self._board.fact(protocol.FACT_LEFT, chain(left, self._foreign))
