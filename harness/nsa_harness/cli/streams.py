"""The standard streams of `nsa-harness`, which may be closed, full, or a pipe that nobody reads any more."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDERR = 2


class _Output(io.FileIO):
    """A standard stream that remembers why writing to it failed. A failed write to stderr raises nothing."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            if self.fileno() != _STDERR:
                raise
            return memoryview(data).nbytes


def open_standard_streams() -> None:
    """Connect the closed standard streams of this process to /dev/null, and replace `sys.stdout` and `sys.stderr`.

    Without this, the next file that is opened would become the standard stream of every child process. Characters that
    the encoding of a stream does not have are escaped.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `descriptor`
            os.set_inheritable(descriptor, True)
    # A caller may have replaced a stream, for example by a StringIO.
    if sys.stdout is None or isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _text_stream(1, sys.stdout)
    if sys.stderr is None or isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _text_stream(_STDERR, sys.stderr)


def _text_stream(descriptor: int, stream: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """Return a text stream for a file descriptor, with the encoding and the buffering of `stream`, if there is one."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(descriptor, "w", closefd=False)),
        encoding=stream.encoding if stream else None,
        errors="backslashreplace",
        line_buffering=descriptor == _STDERR or (stream is not None and stream.line_buffering),
        write_through=stream is not None and stream.write_through,
    )


def lost_output() -> str:
    """Flush stdout. Return why text was lost, or "" if none was. A reader that closes its pipe loses nothing."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failure = raw.failure if isinstance(raw, _Output) else None
    if failure is None:
        return ""
    # Otherwise Python would flush the stream again at exit, fail, and exit with code 120.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    return "" if failure.errno == errno.EPIPE else (failure.strerror or type(failure).__name__).lower()
