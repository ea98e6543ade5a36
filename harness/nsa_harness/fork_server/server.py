"""The program that runs as the fork server.

Its command line is python -u server.py CONTROL MODULES BLANKS. CONTROL is the file descriptor of the control socket.
MODULES are names of modules to import, separated by commas. BLANKS is an argument of blanks that reserves memory for
the command lines of forked processes.
"""

import os
import socket
import sys


def _serve() -> object:
    """Run the fork server, loaded by file path, and return the program that a forked process must run."""
    del sys.path[0]
    package = type(sys)("_nsa_harness")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["_nsa_harness"] = package
    sys.modules["_nsa_harness_server"] = sys.modules["__main__"]  # it keeps running when another module is __main__
    from _nsa_harness.fork_server.serving import serve  # type: ignore[import-not-found]

    return serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2].split(",") if sys.argv[2] else [])


if __name__ == "__main__":
    # `_serve` returns only in a forked process. The program then runs at the bottom of the stack, like any program.
    _serve().run()  # type: ignore[attr-defined]
