"""The case study: what five reports believed about a training job that did not train, each belief tested by a command.

The reports are the documents from which this project began. `truth/case_study.toml` quotes them and lists the commands.
The settings of the job are in `programs/case_study`. All results come from the commands that were run.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.experiments import PROGRAMS, REPOSITORY, Cell, Experiment, Results, digest_of, truths_of
from evaluation.launching import Place, Ran, harness, scratch, without_paths
from evaluation.plan_truth import REFUTED, SUPPORTED, ending
from evaluation.scoring import paragraph

SETTINGS = PROGRAMS / "case_study"
LIMIT_S = 3600.0
CONFIDENCE = 0.75  # of most claims; a claim about a failure that always occurs then needs three pairs of runs
UNDECIDED, NOT_COMPARABLE = "undecided", "not comparable"
AGREES, CONTRADICTS = "agrees", "contradicts"
REPORTED = "reported"  # the program of the reports; any other command launches nsa.train as it is
REPORTS = (
    "1-comprehensive-testing-report.md",
    "2-2xa100-production-test-report.md",
    "3-training-hang-debug-report.md",
    "4-ddp-hang-analysis-update.md",
    "5-test-engineer-action-plan.md",
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the case study."""

    name: str
    code: str  # the program that it launches: REPORTED or "today"
    words: tuple[str, ...]  # arguments of nsa-harness
    text: str  # the claim, or a paragraph about a run
    cause: str = ""  # of a run: the claim that tests its cause
    why: str = ""  # of a run: a paragraph that introduces this claim

    @property
    def line(self) -> str:
        return shlex.join(["nsa-harness", *self.words])

    @property
    def failure(self) -> str:
        """The failure that the command is about."""
        if any("rss_bytes" in word or "gpu_bytes" in word for word in self.words):
            return "memory"
        return "time limit" if self.code == REPORTED else "crash"

    @property
    def is_claim(self) -> bool:
        return self.words[0] == "claim"


@dataclass(frozen=True, kw_only=True)
class Belief:
    """A sentence of a report, the command that tests it, and the result that agrees with the sentence."""

    subject: str
    quote: str
    source: str  # number of the report and heading of the section
    claim: str  # name of a claim or run
    agrees: str


_STORED = truths_of("case_study")


def _run(name: str, stored: Mapping[str, str]) -> Command:
    words = tuple(shlex.split(stored["words"]))
    texts = {"text": stored["about"], "cause": stored["cause"], "why": stored["why"]}
    return Command(name=name, code=stored["code"], words=words, **texts)


def _claim(name: str, stored: Mapping[str, Any]) -> Command:
    text, words = stored["text"], shlex.split(stored["words"])
    # A claim without --confidence ends after three pairs in which nothing fails.
    confidence = [] if name == "five_layers" else [f"--confidence={stored.get('confidence', CONFIDENCE)}"]
    return Command(name=name, code=stored["code"], words=(*words, *confidence, f"--text={text}"), text=text)


RUNS = {name: _run(name, stored) for name, stored in _STORED["runs"].items()}
CLAIMS = {name: _claim(name, stored) for name, stored in _STORED["claims"].items()}
COMMANDS = RUNS | CLAIMS
BELIEFS = tuple(Belief(**stored) for stored in _STORED["beliefs"])


# The program of the reports.


def reported_files() -> dict[str, str]:
    """Return the files of nsa.train that differ in the program of the reports, by path, with their text.

    The selected branch is computed token by token. Neither a name nor a comment says so.
    """
    ops = REPOSITORY / "nsa" / "nsa_attention" / "ops"
    branch = _without_words((ops / "per_token.py").read_text())
    for name, neutral in (("PerTokenLoop", "SelectedBranch"), ("per_token", "selected_branch")):
        branch = branch.replace(name, neutral)
    imports = "from .selected_branch import SelectedBranch\n"
    dispatch = (ops / "dispatch.py").read_text().replace("from .per_token import PerTokenLoop\n", imports)
    condition = "if requested is Implementation.PER_TOKEN:"
    if dispatch.count(condition) != 1:
        raise SystemExit("case_study: dispatch.py no longer chooses the loop in one place")
    dispatch = dispatch.replace(condition, "if requested:").replace("PerTokenLoop", "SelectedBranch")
    return {"ops/selected_branch.py": branch, "ops/dispatch.py": dispatch}


def _without_words(source: str) -> str:
    """Return Python source without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree) + "\n"


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def _write_reported(package: Path) -> None:
    """Change a copy of nsa.train into the program of the reports."""
    (package / "ops" / "per_token.py").unlink()
    for path, text in reported_files().items():
        (package / path).write_text(text)


def _install_reported(place: Place) -> dict[str, str]:
    """Install nsa-harness with the program of the reports next to the project, and return the environment for it.

    The project becomes a git repository with two commits: the program of the reports, and nsa.train of today.
    """
    installed = place.folder.parent / "installed"
    for name in ("harness/nsa_harness", "nsa/nsa_attention", "scenarios"):
        _copy(REPOSITORY / name, installed / name)
    _write_reported(installed / "nsa" / "nsa_attention")
    package = place.folder / "nsa" / "nsa_attention"
    _copy(REPOSITORY / "nsa" / "nsa_attention", package)
    _write_reported(package)
    _git(place, "init", "--quiet")
    _commit(place, "The training program of the reports")
    shutil.rmtree(package)
    _copy(REPOSITORY / "nsa" / "nsa_attention", package)
    _commit(place, "The selected branch of today")
    return {"PYTHONPATH": os.pathsep.join(map(str, (installed / "harness", installed / "nsa")))}


def _commit(place: Place, message: str) -> None:
    _git(place, "add", "--all")
    _git(place, "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "--quiet", f"--message={message}")


def _git(place: Place, *words: str) -> None:
    subprocess.run(["git", "-C", str(place.folder), *words], check=True)


# The commands, run.


def launch(case: str) -> dict[str, Any]:
    """Run a command, and return its result, the lines with its answer, and what it added to the ledger."""
    command = COMMANDS[case]
    with scratch(SETTINGS) as place:
        environment = _install_reported(place) if command.code == REPORTED else {}
        program = [sys.executable, "-m", "nsa_harness"] if command.code == REPORTED else [harness()]
        ran = place.ran([*program, *command.words], LIMIT_S, **environment)
        ledger = place.folder / "reports" / "claims.jsonl"
        line = json.loads(ledger.read_text().splitlines()[-1]) if ledger.exists() else None
        report = place.stored("report.json")
        result = line["result"] if line else _ending(report, ran)
        return {
            **_fingerprint(case),
            "code": ran.code,
            "seconds": round(ran.seconds, 1),
            "result": result,
            "claim": line and _of_ledger(line),
            "said": list(_answer(result, without_paths(ran.output, place.folder))),
        }


def _ending(report: Mapping[str, Any] | None, ran: Ran) -> str:
    if report is None:
        return f"exit {ran.code}"
    return ending(next(outcome for outcome in report["outcomes"] if outcome["final"]))


def _of_ledger(line: Mapping[str, Any]) -> dict[str, Any]:
    sides = [{key: side[key] for key in ("what", "failed", "of", "ends")} for side in line["sides"]]
    return {
        **{key: line[key] for key in ("key", "why", "computes", "confidence", "attempts", "order_seed")},
        "sides": sides,
    }


def _answer(result: str, output: str) -> Iterator[str]:
    """Yield the lines of the output that answer the question: from the result to the end, without the pages."""
    lines = [line.rstrip() for line in output.splitlines()]
    starts = (result.split()[0].upper() + "  ", NOT_COMPARABLE)
    start = next((number for number, line in enumerate(lines) if line.startswith(starts)), 0)
    yield from (line for line in lines[start:] if not re.match(r"  (ledger|page|more|next|fixed\?|output) ", line))


def _fingerprint(case: str) -> dict[str, Any]:
    settings = [path.read_text() for path in sorted(SETTINGS.glob("*.yaml"))]
    return {"command": COMMANDS[case].line, "settings": digest_of(settings)}


def describe(_case: str, cell: Cell) -> str:
    return f"{cell['result']}   {cell['seconds']:.0f} s"


EXPERIMENT = Experiment(
    name="case_study",
    cases=tuple(COMMANDS),
    launch=launch,
    describe=describe,
    rows=lambda _: {},
    fingerprint=_fingerprint,
    key="commands",
)


# The page.


def verdict_on(belief: Belief, cell: Cell | None) -> str:
    """Return whether the result of a command agrees with a belief, or why it says neither."""
    if cell is None:
        return "not run yet"
    if belief.claim in RUNS:
        return AGREES if cell["result"].startswith(belief.agrees) else CONTRADICTS
    if cell["result"] in (SUPPORTED, REFUTED):
        return AGREES if cell["result"] == belief.agrees else CONTRADICTS
    return "not testable here" if cell["result"] == NOT_COMPARABLE else "open"


def page(results: Results) -> list[str]:
    """Return the lines of case-study.md."""
    seen = results[EXPERIMENT.key]
    return [*_head(results), *_symptoms(seen), *_changes(seen), *_table(seen), *_untestable(seen), *_details(seen)]


def _head(results: Results) -> Iterator[str]:
    seen, versions = results[EXPERIMENT.key], results.get("versions", {})
    minutes = sum(cell["seconds"] for cell in seen.values()) / 60
    yield from ("# Case study: five reports about a training job that did not train", "")
    yield from ("```text", "python -m evaluation run case_study", "python -m evaluation score --write", "```", "")
    yield from paragraph(
        """
        This page tests the beliefs of five reports about a training job. In August 2025, a team trained a model of 125
        million parameters with Native Sparse Attention on two GPUs, with DDP and gradient checkpointing. The first step
        did not end, or the job crashed. The reports named many causes and tried many fixes, but compared no run with a
        control run that differed in one setting only. nsa-harness was built because of these reports.
        """
    )
    yield ""
    yield from paragraph(
        f"""
        Each belief below is tested by `nsa-harness claim`, which launches the job in pairs, without and with one
        change, in random order. A claim is supported if runs with the change fail less often, and refuted if the change
        prevents less than half of the failures. The first command above runs all {len(COMMANDS)} commands of this page
        and stores their results in `evaluation/results/case_study.json`; a stopped run continues when the command is
        repeated. The second command writes the page from the stored results. No result on this page is written by hand.
        """
    )
    yield ""
    if seen:
        yield from paragraph(
            f"""
            The results are from {results["date"][:10]}. {len(seen)} of {len(COMMANDS)} commands have been run, in
            {minutes:.0f} minutes, on a machine with {results["cpus"]} cores, no GPU and a load of
            {results["load_1min"]:.0f}, with torch {versions["torch"]} and Python {versions["python"]}.
            """
        )
        yield ""
        yield from paragraph(
            f"""
            To save time, most claims ended at a confidence of {100 * CONFIDENCE:.0f} %: such a claim is wrong in at
            most one of {1 / (1 - CONFIDENCE):.0f} cases. The last section shows for each claim how its runs failed, and
            at which line.
            """
        )
    yield from ("", "## The job", "", *_job(versions))


def _job(versions: Mapping[str, str]) -> Iterator[str]:
    yield from paragraph(
        """
        The job is `nsa.train`, the training program of this project, with the settings of the reports. Where a CPU
        cannot run a setting, it is scaled down. The files are in `evaluation/programs/case_study`: `training.yaml` has
        the first settings of the reports, `patched.yaml` is the same job after the patch of report 4, and `repro.yaml`
        is the minimal reproduction of report 3.
        """
    )
    yield from ("", "| setting | in the reports | here |", "| --- | --- | --- |")
    for row in (
        ("devices", "2 A100 GPUs, NCCL", "2 processes on a CPU, gloo"),
        ("PyTorch", "2.5.1, CUDA 12.1", str(versions.get("torch", ""))),
        ("attention", "three branches: compressed, selected, sliding", "the same"),
        ("layers", "12", "12"),
        ("width", "768, 12 heads", "128, 8 heads: the model of the minimal reproduction in report 3"),
        (
            "sequence length",
            "2048, compared with 512",
            "2048 in `training.yaml`; 256, compared with 64, in `patched.yaml`",
        ),
        ("batch size per rank", "1 or 2", "2"),
        ("number format", "bfloat16", "bfloat16"),
        ("checkpointing", "all layers, reentrant (report 2)", "the same"),
        ("DDP", "`gradient_as_bucket_view`, buckets of 25 MB, buffers broadcast", "the same"),
        (
            "`find_unused_parameters`",
            "off, then on (patch of report 4)",
            "off in `training.yaml`, on in `patched.yaml`",
        ),
        (
            "time limit",
            "30 s (report 3) to 5 minutes (report 4)",
            "15 s in `training.yaml`: half of 30 s, for a sixth of the width",
        ),
        ("`TORCH_DISTRIBUTED_DEBUG`", "DETAIL", "INFO, because DETAIL makes DDP over gloo crash in torch 2.13"),
    ):
        yield f"| {' | '.join(row)} |"
    yield ""
    yield from paragraph(
        """
        The program of the reports is not public. After the reports it came out that its selected branch was computed
        in a Python loop over the tokens. Commands about the time limit therefore launch `nsa.train` with such a loop in
        place of its own selected branch. The names, the comments and the settings of this program do not say that there
        is a loop, and no fault is planted. Commands about the crash launch `nsa.train` unchanged, because with the loop
        the backward pass begins too late.
        """
    )


def _symptoms(seen: Mapping[str, Cell]) -> Iterator[str]:
    yield from ("", "## What really happened", "")
    for name, command in RUNS.items():
        if name in seen:
            yield from (*paragraph(command.text), "", *_console(seen[name]), "")
        if command.cause in seen:
            yield from (*paragraph(command.why), "", *_console(seen[command.cause]), "")


def _changes(seen: Mapping[str, Cell]) -> Iterator[str]:
    """Yield a list of the changes that help, and of those that do not."""
    yield from ("## What helps, and what does not", "")
    for result, head in ((SUPPORTED, "These claims are supported:"), (REFUTED, "These claims are refuted:")):
        texts = [command.text for name, command in CLAIMS.items() if name in seen and seen[name]["result"] == result]
        if texts:
            yield from (head, "", *(f"- {text}" for text in texts), "")


def _table(seen: Mapping[str, Cell]) -> Iterator[str]:
    verdicts = [verdict_on(belief, seen.get(belief.claim)) for belief in BELIEFS]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    yield from ("## The beliefs", "")
    yield from paragraph(
        f"""
        The table has {len(BELIEFS)} rows: {counts}. The column "source" has the number of the report and the heading
        of the section: {_report_list()}. The reports did not distinguish their failures; the column "failure" says
        which failure a row tests. The words "agrees" and "contradicts" compare the answer with the belief, for this
        failure only. Most beliefs are tested with the crash, because it takes less time. The columns "without" and
        "with" show how many runs failed without and with the change. If nothing fails on either side, the answer is
        undecided: the failure of the report does not occur here.
        """
    )
    yield ""
    heads = ("about", "belief, quoted", "source", "command that tests it", "failure", "answer", "and the belief")
    yield f"| {' | '.join((*heads, 'without', 'with', 'runs', 'confidence'))} |"
    yield "| --- | --- | --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: |"
    for belief, verdict in zip(BELIEFS, verdicts, strict=True):
        yield _row(belief, verdict, seen.get(belief.claim))
    yield ""


def _report_list() -> str:
    return ", ".join(f"{number} is `{name}`" for number, name in enumerate(REPORTS, 1))


def _row(belief: Belief, verdict: str, cell: Cell | None) -> str:
    command = COMMANDS[belief.claim]
    claim = f"[{command.text}](#{_anchor(command.text)})" if command.is_claim else f"`{command.line}`"
    line: Mapping[str, Any] = (cell and cell["claim"]) or {}
    sides = line.get("sides", ())
    counts = [f"{side['failed']} of {side['of']}" for side in sides] or ["", ""]
    runs = line.get("attempts", int(cell is not None and not command.is_claim))
    confidence = f"{100 * line['confidence']:.0f} %" if line and verdict in (AGREES, CONTRADICTS) else ""
    answer = f"**{cell['result'].upper()}**" if cell and cell["result"] != NOT_COMPARABLE else ""
    quote = belief.quote.replace("|", "\\|")
    return " | ".join(
        (
            f"| {belief.subject}",
            f"“{quote}”",
            belief.source,
            claim,
            command.failure,
            answer,
            verdict,
            *counts,
            str(runs),
            f"{confidence} |",
        )
    )


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-")


def _untestable(seen: Mapping[str, Cell]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for name, command in CLAIMS.items():
        if name in seen and seen[name]["result"] == NOT_COMPARABLE:
            reason = seen[name]["claim"]["why"].rpartition("cannot be launched here: ")[2]
            reasons.setdefault(reason, []).append(command.text)
    if reasons:
        yield from ("## What could not be tested", "")
        yield from paragraph("nsa-harness refused these claims, because this machine cannot launch one of their sides:")
        yield ""
        for reason, texts in reasons.items():
            yield from (f"- {reason}:", *(f"  - {text}" for text in texts))
        yield ""


def _details(seen: Mapping[str, Cell]) -> Iterator[str]:
    yield from ("## The commands and their answers", "")
    for name, command in CLAIMS.items():
        yield from (f"### {command.text}", "")
        yield from _console(seen[name]) if name in seen else ("Not run yet.",)
        yield ""


def _console(cell: Cell) -> Iterator[str]:
    yield from ("```console", f"$ {cell['command']}", *cell["said"])
    yield "```"
