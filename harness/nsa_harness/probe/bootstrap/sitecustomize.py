"""Starts nsa-harness's instrumentation when Python starts, after the user's own sitecustomize.

This directory comes first on PYTHONPATH in every process of a run, so Python imports this module at startup.
"""

import os
import sys


def _run_users() -> None:
    """Import the user's own sitecustomize, which this module shadows."""
    here = os.path.dirname(os.path.abspath(__file__))
    ours = sys.modules.pop(__name__, None)
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if os.path.abspath(entry) != here]
    without = list(sys.path)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if sys.path == without:
            sys.path[:] = path
        if ours is not None:
            sys.modules.setdefault(__name__, ours)


def _start_probe() -> None:
    """Load and start the instrumentation under a module name that user code cannot shadow."""
    if not os.environ.get("_NSA_HARNESS_BOARDS"):
        return
    here = os.path.dirname(os.path.abspath(__file__))
    package = type(sys)("_nsa_harness")
    package.__path__ = [os.path.dirname(os.path.dirname(here))]
    sys.modules["_nsa_harness"] = package
    try:
        from _nsa_harness.probe import startup  # type: ignore[import-not-found]

        startup.start_probe()
    except Exception as error:
        print(f"nsa-harness: no probe in process {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr)


try:
    _run_users()
finally:
    _start_probe()
