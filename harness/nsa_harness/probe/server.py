"""torch's own worker server on a unix socket: its threads are not Python's, so it answers while the GIL is held."""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
from typing import Any

from .. import protocol

QUIET = 3  # above every level that the server logs at


def start(torch: Any, directory: str) -> None:
    """Listen until the process ends. Raises where this torch has no such server.

    The server ends the process when it is destroyed, and a forked child that exits would destroy it for its parent
    (torch 2.13: "failed to listen" in a thread, then abort). So nobody ever destroys it.
    """
    path = os.path.join(directory, protocol.SOCKET.format(pid=os.getpid()))
    server_type = sys.modules["torch._C._distributed_c10d"]._WorkerServer
    level = ctypes.c_int.in_dll(ctypes.CDLL(_library(torch)), "FLAGS_caffe2_log_level")
    failed: list[Exception] = []

    def make() -> None:
        # The server's threads inherit this: a signal must interrupt the thread that the program expects.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        before, level.value = level.value, QUIET  # it greets on stderr, which belongs to the program
        try:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(_listening(server_type, path)))
            os.chmod(path, 0o600)
        except Exception as error:
            failed.append(error)
        finally:
            level.value = before

    _run_aside(make)
    if failed:
        raise failed[0]


def _listening(server_type: Any, path: str) -> Any:
    """Through the directory's descriptor where the path itself is longer than a socket's address may be."""
    if len(os.fsencode(path)) <= protocol.SOCKET_PATH_LIMIT:
        return server_type(path)
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return server_type(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
    finally:
        os.close(directory)


def _library(torch: Any) -> str:
    return os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")


def _run_aside(make: Any) -> None:
    """In a thread that ends at once: its signal mask is not the program's."""
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            make()
        finally:
            done.release()

    thread = threading.Thread(target=run, name="nsa-harness-server", daemon=True)
    thread.start()
    done.acquire()
    thread.join()
