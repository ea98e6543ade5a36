"""Forks what the tests of the probe would otherwise start: `python forge.py CONTROL` has imported torch once, for all.

An order comes with the descriptors of three streams: {"words": [...], "environment": {...}} is answered with the pid of
the fork, {"reap": pid} with the status that it left. When the socket closes, the forge leaves.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any


def _serve(control: socket.socket) -> Any:
    """Returns only in a fork: the program that it is to run."""
    package = sys.modules["_nsa_harness"] = types.ModuleType("_nsa_harness")
    package.__path__ = [str(Path(__file__).resolve().parents[2] / "harness" / "nsa_harness")]
    serving = importlib.import_module("_nsa_harness.fork_server.serving")
    early = serving._preload()
    gc.collect()
    gc.freeze()  # an exit looks at everything that is not, and copies its pages
    while True:
        text, streams, *_ = socket.recv_fds(control, 1 << 17, 3)
        if not text:
            os._exit(0)
        order = json.loads(text)
        if "reap" in order:
            control.send(json.dumps(os.waitpid(order["reap"], 0)[1]).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            serving._replace_streams(*streams)
            program = importlib.import_module("_nsa_harness.fork_server.program").Program(order["words"])
            if order["cwd"] is not None:
                os.chdir(order["cwd"])
            program.prepare(order["environment"], with_probe="_NSA_HARNESS_BOARDS" in order["environment"])
            serving.rebind(early)
            return program
        for stream in streams:
            os.close(stream)
        control.send(json.dumps(pid).encode())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1]))).run()
