"""What all tests share: two workers for the whole suite, programs that find the harness compiled, no daily draw."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

settings.register_profile("of_the_tree", derandomize=True)
settings.load_profile("of_the_tree")

# Whoever forbids bytecode pays for it in each of some hundred interpreters started here: 2 s to compile the harness.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

WORKERS = 2  # most tests wait, for a limit or an import; more at once would load the machine that some measure


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Side by side, a file a worker, where nobody has named tests or workers and no GPU is shared."""
    mine = not hasattr(config, "workerinput")  # a worker comes here too, and has none below it
    whole = mine and config.args_source is pytest.Config.ArgsSource.TESTPATHS and "not gpu" in config.option.markexpr
    if whole and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = WORKERS, "loadfile"
        config.option.loadscopereorder = False
