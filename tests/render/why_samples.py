"""Answers of `nsa-harness why`: an early stop by the rank's own loss, and every other kind of answer."""

from __future__ import annotations

from dataclasses import replace

from nsa_harness.core.experiment.why import FirstAnswer, Proof, RunResult, WhyReport, WhyResult, WhyRun
from nsa_harness.core.recording.explanation import Candidate, Division, Explanation, OriginKind, RankValues
from nsa_harness.core.report import Place, Status

FILE = "/home/ada/project/train.py"


def line(number: int, text: str, file: str = FILE) -> Place:
    return Place(file=file, line=number, text=text)


BAD = RankValues(name="self.bad", values=((0, "1"), (1, "1"), (2, "3")))
PATIENCE = RankValues(name="self.patience", values=((0, "3"), (1, "3"), (2, "3")))
COUNTER = Candidate(
    place=line(52, "self.bad += 1"), kind=OriginKind.MISSING_REDUCTION, ranks=(2,), name="self.bad", occurrence=33,
    values=(BAD,), chain=((line(52, "self.bad += 1"), "self.bad"), (line(57, "stop = self.is_over()"), "stop")),
)  # fmt: skip
LOSS = Candidate(place=line(48, "val = validate()"), kind=OriginKind.LENGTH, ranks=(2,), name="val")
LEAK = Candidate(
    place=line(20, "self.count += 1", "/home/ada/project/data.py"), kind=OriginKind.LEAK, ranks=(0,),
    name="sampler.count", caller=line(71, "preview(loader)"),
)  # fmt: skip
DIVISION = Division(
    place=line(61, "if self.bad >= self.patience: break"), occurrence=33,
    ways=(((2,), line(70, "save(model)")), ((0, 1), line(62, "step(model)"))),
    condition="self.bad >= self.patience", values=(BAD, PATIENCE), step=33,
)  # fmt: skip
EXPLANATION = Explanation(
    candidates=(COUNTER, LOSS, LEAK),
    division=DIVISION,
    ends=(((0, 1), line(87, "loss.backward()"), "backward"), ((2,), None, "")),
)
FIRST = FirstAnswer(
    run_id="20261121T101500-3f2a", path="/home/ada/project/reports/20261121T101500-3f2a", attempt="train",
    verdict=Status.HANG, cause="uneven_inputs", place=line(87, "loss.backward()"), ranks=(2,), stands=False,
    advice="Give every rank the same number of batches.",
)  # fmt: skip
RECORDED = WhyRun(dir="train", end="HANG · uneven_inputs · train.py:87", result=RunResult.SAME, wall_s=14.5)
SHARED = WhyRun(
    dir="train~2", end="PASS", result=RunResult.PASSED, wall_s=12.0, experiment="set_value", candidate=0,
    change="all ranks got the value of rank 0 (`self.bad` at train.py:52)", place=COUNTER.place, name="self.bad",
    proof=Proof.ORIGIN,
)  # fmt: skip
CERTAIN = WhyReport(
    scenario="train", first=FIRST, directory="/home/ada/project", max_runs=6, result=WhyResult.CERTAIN,
    explanation=EXPLANATION, runs=(RECORDED, SHARED, replace(RECORDED, dir="train~3")),
)  # fmt: skip
LIKELY = replace(CERTAIN, result=WhyResult.LIKELY, runs=(RECORDED,))
DECISION = replace(
    CERTAIN, result=WhyResult.DECISION,
    runs=(RECORDED, replace(SHARED, experiment="force_branch", proof=Proof.DECISION), RECORDED),
)  # fmt: skip
DROPPED = replace(CERTAIN, result=WhyResult.LIKELY, runs=(RECORDED, replace(SHARED, end="HANG", proof=Proof.DROPPED)))
FIRST_LINE = replace(
    CERTAIN, result=WhyResult.FIRST_LINE, explanation=replace(EXPLANATION, candidates=(), notes=("no_difference",)),
    first=replace(FIRST, cause="lock_cycle", stands=True), runs=(RECORDED,),
)  # fmt: skip
NOT_EXPLAINED = replace(FIRST_LINE, result=WhyResult.NOT_EXPLAINED, first=FIRST)
PASSED = replace(
    CERTAIN, result=WhyResult.PASSED, explanation=None,
    runs=(replace(RECORDED, end="PASS", result=RunResult.PASSED),) * 2,
)  # fmt: skip
OTHERWISE = replace(
    PASSED, result=WhyResult.OTHERWISE, runs=(replace(RECORDED, end="FAIL", result=RunResult.OTHERWISE),)
)
UNDECIDED = replace(PASSED, result=WhyResult.UNDECIDED, runs=(), interrupted=True)
ANSWERS = {
    "certain": CERTAIN, "likely": LIKELY, "decision": DECISION, "dropped": DROPPED, "first_line": FIRST_LINE,
    "not_explained": NOT_EXPLAINED, "passed": PASSED, "otherwise": OTHERWISE, "undecided": UNDECIDED,
}  # fmt: skip
