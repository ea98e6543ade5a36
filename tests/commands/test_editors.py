"""What docs/editors.md promises: links, the pre-commit hook and the problem matcher."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from nsa_harness.render.documents.report_json import from_json
from nsa_harness.render.terminal.stream import Paint
from nsa_harness.render.terminal.terminal import STYLES, linked_files

REPOSITORY = Path(__file__).resolve().parents[2]
MAIN = "import sys; sys.argv[0] = 'nsa-harness'; from nsa_harness.cli.main import main; main()"
GOOD = "name: good\nabout: fine\nrun: {program: train.py, ranks: 2}\n"


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_lines_of_the_program_are_links_and_nothing_else_is() -> None:
    sample = REPOSITORY / "reports" / "sample" / "report.json"
    (outcome,) = from_json(sample.read_text(), str(sample)).outcomes
    paint = Paint(Tty(), {"TERM": "xterm-256color"}, STYLES)
    paint.links |= linked_files(outcome)
    file = "/home/user/nsa-harness/harness/nsa_harness/faults/acts.py"
    painted = paint.colour("rank 1 waits (faults/acts.py:37), not in acts.py:371")
    assert f"file://{file}\x1b\\" in painted
    links = re.findall(r"\x1b\]8;[^;]*;(file:[^\x1b]*)\x1b", painted)
    assert links == [f"file://{file}"]
    assert "file://" not in Paint(io.StringIO(), {}, STYLES).colour("faults/acts.py:37")


def test_the_hook_refuses_a_wrong_scenario_file(tmp_path: Path) -> None:
    (hook,) = YAML(typ="safe").load((REPOSITORY / ".pre-commit-hooks.yaml").read_text())
    names = ["scenarios/good.yaml", "scenarios/deep/wrong.yml", "scenarios/base/parent.yaml", "config.yaml",
             "scenarios/my.readiness.yaml"]  # fmt: skip
    chosen = [name for name in names if re.search(hook["files"], name) and not re.search(hook["exclude"], name)]
    assert chosen == names[:2]
    (tmp_path / "scenarios" / "deep").mkdir(parents=True)
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / names[0]).write_text(GOOD)
    (tmp_path / names[1]).write_text(GOOD.replace("about", "abut"))
    program, *words = shlex.split(hook["entry"])
    assert program == "nsa-harness"
    runs = [
        subprocess.run(
            [sys.executable, "-c", MAIN, *words, *files], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for files in (chosen[:1], chosen)
    ]
    assert [run.returncode for run in runs] == [0, 2]
    text = (REPOSITORY / "docs" / "editors.md").read_text()
    pattern = json.loads(text.rpartition("```json\n")[2].partition("```")[0])["pattern"]
    found = re.match(pattern["regexp"], runs[1].stderr)
    assert found is not None
    assert found.group(pattern["file"], pattern["line"], pattern["column"]) == ("scenarios/deep/wrong.yml", "2", "1")
