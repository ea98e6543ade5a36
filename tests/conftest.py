"""What all tests share: two workers for the whole suite, programs that find the harness compiled, no daily draw."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: on a loaded machine an example takes as long as it takes.
settings.register_profile("of_the_tree", derandomize=True, deadline=None)
settings.load_profile("of_the_tree")

# Whoever forbids bytecode pays for it in each of some hundred interpreters started here: 2 s to compile the harness.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Their tests start jobs and wait for what becomes of them; those of all other folders compute, or are over at once.
LAUNCHING = Path(__file__).with_name("end_to_end")
WORKERS = (
    3  # on two cores: most tests wait, for a limit or an import; more at once would load the machine that some measure
)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Side by side, a file a worker, where nobody has named tests or workers and no GPU is shared."""
    mine = not hasattr(config, "workerinput")  # a worker comes here too, and has none below it
    whole = mine and config.args_source is pytest.Config.ArgsSource.TESTPATHS and "not gpu" in config.option.markexpr
    if whole and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = WORKERS, "loadfile"
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported or collected becomes garbage: to look for some took a quarter of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One worker waits while the other computes: files that launch are spread among the others.

    They are through before the others are, and the small files of the core come last, so that both workers end
    together.
    """
    if not hasattr(config, "workerinput"):
        return
    files = list(dict.fromkeys(item.path for item in items))
    launching = [path for path in files if path.is_relative_to(LAUNCHING)]
    others = [path for path in reversed(files) if not path.is_relative_to(LAUNCHING)]
    place = {path: 0.8 * number / len(launching) for number, path in enumerate(launching)}
    place |= {path: number / len(others) for number, path in enumerate(others)}
    items.sort(key=lambda item: place[item.path])
