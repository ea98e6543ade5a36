"""The fork server of a bisection: python -u server.py CONTROL ROOM. ROOM is overwritten."""

import os
import socket
import sys


def _serve() -> object:
    """Load the other modules by file path under a private name, which no module of the user's can shadow."""
    del sys.path[0]
    package = type(sys)("_nsa_harness")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["_nsa_harness"] = package
    sys.modules["_nsa_harness_server"] = sys.modules["__main__"]  # it keeps running when another module is __main__
    from _nsa_harness.fork_server.serving import serve  # type: ignore[import-not-found]

    return serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    # Only a forked process gets here. Its program runs at the bottom of the stack, like any program.
    _serve().run()  # type: ignore[attr-defined]
