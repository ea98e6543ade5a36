"""First on PYTHONPATH in every process of a run: hands over to the user's own sitecustomize, then lets the probe in."""

import os
import sys


def _hand_over() -> None:
    """Import the next sitecustomize on the path, in our place. Its errors are the user's, and reach the interpreter."""
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


def _let_the_probe_in() -> None:
    """Load the probe by file path under a private name, so that a user's own modules do not matter."""
    if not os.environ.get("_NSA_HARNESS_BOARDS"):
        return
    here = os.path.dirname(os.path.abspath(__file__))
    package = type(sys)("_nsa_harness")
    package.__path__ = [os.path.dirname(os.path.dirname(here))]
    sys.modules["_nsa_harness"] = package
    try:
        from _nsa_harness.probe import startup  # type: ignore[import-not-found]

        startup.enter()
    except Exception as error:
        print(f"nsa-harness: no probe in process {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr)


try:
    _hand_over()
finally:
    _let_the_probe_in()
