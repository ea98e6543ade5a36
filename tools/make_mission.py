"""Rebuilds docs/internals/mission.md: what the seeds describe, from tests/support/mission.py, and where it is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "internals" / "mission.md"
_HEAD = """# What the seeds describe, and where it is

```text
nsa-harness run -t plan
```

Five reports of a team that lost two weeks to "hangs" say what this project has to be able to do. Each row is one thing
from them, with the command that shows it, the options, files and scenarios that it lies in, and the tests that keep it.
What is missing or was never seen to run stands in its row. `python tools/make_mission.py` makes this page from
`tests/support/mission.py`, and `tests/project/test_mission.py` sees to it that every name in it is one that exists.
"""


def page() -> str:
    return "\n".join([_HEAD, *_sections()])


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def _sections() -> Iterator[str]:
    mission = _mission()
    lacking = [item for item in mission.ITEMS if item.missing]
    yield f"{len(mission.ITEMS)} things, of which {len(lacking)} are missing in part.\n"
    for section in mission.Section:
        yield f"## {section}\n"
        yield "| what | try | lies in | kept by |"
        yield "| --- | --- | --- | --- |"
        yield from (_row(item, mission.path_of) for item in mission.ITEMS if item.section is section)
        yield ""


def _row(item: object, path_of: Callable[[str], str]) -> str:
    names = vars(item)
    places = [*names["options"], *names["files"], *names["scenarios"], *names["leaves"]]
    where = ", ".join(map(_code, places))
    what = names["text"] + (f"<br>**Missing:** {names['missing']}" if names["missing"] else "")
    tests = ", ".join(_code(path_of(test)) for test in names["tests"])
    return f"| {what} | {_code(names['shown_by'])} | {where} | {tests} |"


def _code(text: str) -> str:
    return f"`{text}`"


def _mission() -> ModuleType:
    """Not by its name: there may be another module that is called so."""
    path = REPOSITORY / "tests" / "support" / "mission.py"
    spec = importlib.util.spec_from_file_location("nsa_harness_mission", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
