"""Rebuild reports/sample and the pictures in docs/images from real runs.

    python tools/make_sample.py             takes about a minute: runs fault_deadlock and hang.py
    python tools/make_sample.py --bisect    takes about four minutes: also runs a bisection of fault_gc_layer

Host names and directories of this machine are replaced by neutral names.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLE = REPOSITORY / "reports" / "sample"
IMAGES = REPOSITORY / "docs" / "images"
SCENARIO = "fault_deadlock"
HOST = "example"
HOME = "/home/user/nsa-harness"
# Files of an attempt that are binary, or that have the same content as another file.
LEFT_OUT = ("boards", "logs", "evidence", "rank*/board", "dumps/*.json")
HANG_PY = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.ones(1)
for step in range(100):
    dist.all_reduce(loss)
    if dist.get_rank() == 0 and step == 50:
        torch.save(loss, "checkpoint.pt")
        dist.barrier()
dist.destroy_process_group()
"""
HANG_COMMAND = ("run", "hang.py", "--ranks", "2")
BISECT_COMMAND = ("bisect", "fault_gc_layer", "--gc-range")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--bisect", action="store_true", help="also draw a bisection")
    with_bisection = parser.parse_args().bisect
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools")]
    with tempfile.TemporaryDirectory(prefix="nsa-harness-sample-") as folder:
        work = Path(folder)
        make_sample(work / "sample")
        draw_hang(work / "example")
        if with_bisection:
            draw_bisection(work / "bisection")


def make_sample(work: Path) -> None:
    """Run the sample scenario, and store its report as reports/sample."""
    run = _launch(work, "run", SCENARIO)
    _remove_files(run / SCENARIO)
    _render_again(run)
    _replace_paths(run, work)
    shutil.rmtree(SAMPLE, ignore_errors=True)
    shutil.copytree(run, SAMPLE)
    print(f"{SAMPLE.relative_to(REPOSITORY)}: {sum(1 for path in SAMPLE.rglob('*') if path.is_file())} files")


def draw_hang(work: Path) -> None:
    """Run a script that hangs, and save pictures of its terminal output and HTML report."""
    import pictures

    from nsa_harness.render.documents.report_json import from_json
    from nsa_harness.render.terminal.screen import done_lines, outcome_lines
    from nsa_harness.render.terminal.terminal import STYLES
    from nsa_harness.subject.playbook import PLAYBOOK

    work.mkdir()
    (work / "hang.py").write_text(HANG_PY)
    run = _launch(work, *HANG_COMMAND)
    _render_again(run)
    _replace_paths(run, work)
    report = from_json((run / "report.json").read_text())
    lines = [
        *outcome_lines(report.outcomes[0], pictures.COLUMNS),
        *done_lines(report, PLAYBOOK, Path("reports/latest"), pictures.COLUMNS),
    ]
    command = f"nsa-harness {' '.join(HANG_COMMAND)}"
    pictures.save_terminal(lines, STYLES, IMAGES / "hang-terminal.svg", command=command)
    page = run / "report.html"
    pictures.save_page(page, IMAGES / "hang-page.png", width=1100, height=860)
    timeline = r'<h2>Ranks over time</h2>.*?<p class="key">.*?</p>'
    pictures.save_part(page, timeline, IMAGES / "hang-timeline.png", width=960, height=190)
    collectives = r"<h2>Collectives where the ranks diverge</h2>.*?</table>"
    pictures.save_part(page, collectives, IMAGES / "hang-collectives.png", width=960, height=320)


def draw_bisection(work: Path) -> None:
    """Run a bisection, and save pictures of its terminal output and HTML report."""
    import pictures

    from nsa_harness.render.experiments.screen import STYLES

    work.mkdir()
    output = _nsa_harness(work, *BISECT_COMMAND, capture=True)
    run = (work / "reports" / "latest").resolve()
    screen = without_paths(output[output.index("BISECT") :], work).replace(f"reports/{run.name}", "reports/latest")
    command = f"nsa-harness {' '.join(BISECT_COMMAND)}"
    pictures.save_terminal(screen.splitlines(), STYLES, IMAGES / "bisect-terminal.svg", command=command)
    _replace_paths(run, work)
    grid = r'<ol class="search".*?</ol>'
    pictures.save_part(run / "report.html", grid, IMAGES / "bisect-grid.png", width=1000, height=440)


def _launch(work: Path, *command: str) -> Path:
    """Run nsa-harness in `work`, and return the run directory."""
    work.mkdir(exist_ok=True)
    _nsa_harness(work, *command)
    return (work / "reports" / "latest").resolve()


def _nsa_harness(work: Path, *command: str, capture: bool = False) -> str:
    """Run nsa-harness from this checkout, and return its output if `capture` is set.

    Raises SystemExit if nsa-harness itself fails. A run with the verdict FAIL or HANG is not an error.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    code = "import sys; sys.argv[0] = 'nsa-harness'; from nsa_harness.cli.main import main; main()"
    environ = {**clean, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=work, env=environ, check=False, text=True,
        stdout=subprocess.PIPE if capture else None,
    )  # fmt: skip
    if done.returncode not in (0, 1, 124):
        raise SystemExit(f"nsa-harness {' '.join(command)}: exit code {done.returncode}")
    return done.stdout or ""


def _remove_files(attempt: Path) -> None:
    for path in [path for pattern in LEFT_OUT for path in attempt.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _render_again(run: Path) -> None:
    """Write the output files of a run again, with a neutral host name."""
    from nsa_harness.render.documents.documents import write_documents
    from nsa_harness.render.documents.report_json import from_json
    from nsa_harness.subject.playbook import PLAYBOOK
    from nsa_harness.supervisor.storage.rundir import RunDir

    directory = RunDir(run)
    report = from_json(directory.report.read_text())
    write_documents(directory, replace(report, machine=replace(report.machine, host=HOST)), PLAYBOOK)
    for path in run.rglob("*.json*"):
        text = re.sub(r'("host": ?)"[^"]*"', rf'\1"{HOST}"', path.read_text())
        path.write_text(re.sub(r'("kernel": ?)"[^"]*"', r'\1"(removed)"', text))


def without_paths(text: str, work: Path) -> str:
    """Return the text with directory names of this machine replaced by neutral ones."""
    directories = {
        str(work.resolve()): "/home/user/work",
        sys.prefix: f"{HOME}/.venv",
        str(REPOSITORY): HOME,
        sys.base_prefix: "/usr",
    }
    # The longest first: the environment may be inside the checkout.
    for ours, neutral in sorted(directories.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(ours, neutral)
    return text


def _replace_paths(run: Path, work: Path) -> None:
    for path in _files(run):
        try:
            text = path.read_text()
        except UnicodeDecodeError:  # a binary file of a run that is only drawn
            continue
        path.write_text(without_paths(text, work))


def _files(run: Path) -> Iterator[Path]:
    return (path for path in run.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
