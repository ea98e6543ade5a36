"""Rebuild the table of requirements in docs/internals/mission.md."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "internals" / "mission.md"
_HEAD = """# Requirements, and where they are met

```text
nsa-harness run -t plan
```

The requirements of this project come from five reports of a team that lost two weeks to hangs. Each row is one
requirement, with a command that shows it, the options, files and scenarios that implement it, and the tests that check
it. A row also says what is missing or has not been run yet. `python tools/make_mission.py` builds this page from
`tests/support/mission.py`, and `tests/project/test_mission.py` checks that every name on it exists.
"""


def page() -> str:
    return "\n".join([_HEAD, *_sections()])


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def _sections() -> Iterator[str]:
    mission = _mission()
    lacking = [item for item in mission.ITEMS if item.missing]
    yield f"{len(mission.ITEMS)} requirements, of which {len(lacking)} are not fully met.\n"
    for section in mission.Section:
        yield f"## {section}\n"
        yield "| what | try | implemented in | checked by |"
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
    path = REPOSITORY / "tests" / "support" / "mission.py"
    spec = importlib.util.spec_from_file_location("nsa_harness_mission", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module in sys.modules
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
