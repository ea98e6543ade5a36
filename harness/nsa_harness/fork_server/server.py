"""Started by the controller of a bisection: python -u server.py CONTROL ROOM. ROOM is there to be written over."""

import os
import socket
import sys


def _serve() -> object:
    """Load the rest by file path under a private name, so that a user's own harness.py does not matter."""
    del sys.path[0]
    package = type(sys)("_nsa_harness")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["_nsa_harness"] = package
    sys.modules["_nsa_harness_server"] = sys.modules["__main__"]  # it goes on running when another one is __main__
    from _nsa_harness.fork_server.serving import serve  # type: ignore[import-not-found]

    return serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    # Only a forked process comes here. What it is to be runs at the bottom of the stack, like any program.
    _serve().run()  # type: ignore[attr-defined]
