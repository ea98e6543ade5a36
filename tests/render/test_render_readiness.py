"""READINESS.md and the last lines on the terminal, whole, of one check that was missed and cut short."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_harness.core.experiment.readiness import (
    CriterionResult,
    CriterionRow,
    Decision,
    FailureReason,
    Measurement,
    PhaseRow,
    RunRow,
    Untested,
)
from nsa_harness.core.report import MachineFacts, Place
from nsa_harness.render.experiments.readiness import (
    ReadinessRecord,
    amount_text,
    headline,
    readiness_json,
    readiness_md,
    result_lines,
)

BLAME = FailureReason(
    run="stable",
    verdict="PASS",
    cause="memory_growth",
    sentence="the host memory of rank 1 grows by 2.0 MiB a step",
    place=Place(file="/srv/train.py", line=41),
    advice="Look for what a step appends to.",
    next="nsa-harness run reports/r/stable/spec.json",
)
SLOPE = CriterionRow(
    name="memory_slope",
    result=CriterionResult.MISSED,
    metric="memory_slope_bytes",
    unit="bytes a step",
    limit=(("lt", 1e6),),
    measured=Measurement(value=2.1e6, low=2.05e6, high=2.15e6),
    margin=-1.15,
    run="stable",
    dir="stable",
    repeat="nsa-harness run reports/r/stable/spec.json",
    blame=BLAME,
)
THROUGHPUT = replace(
    SLOPE,
    name="throughput",
    result=CriterionResult.MET,
    unit="tokens/s",
    limit=(("gt", 50.0),),
    measured=Measurement(value=800.0),
    margin=15.0,
    blame=None,
)
GPU = replace(
    THROUGHPUT,
    name="gpu_memory",
    result=CriterionResult.NOT_TESTED,
    unit="bytes",
    limit=(("lt", 30e9),),
    measured=None,
    margin=None,
    run=None,
    dir=None,
    repeat=None,
    why="needs 2 GPUs; this machine has no GPU",
)
RUN = RunRow(
    scenario="stable",
    verdict="PASS",
    cause="memory_growth",
    as_it_should=False,
    dir="stable",
    wall_s=61.0,
    repeat=SLOPE.repeat,
    blame=BLAME,
)
RECORD = ReadinessRecord(
    verdict=Decision.NO_GO,
    ended=False,
    shape="ci",
    checklist="mine.readiness.yaml",
    about="",
    command="nsa-harness ready ci --checklist mine.readiness.yaml",
    run_id="r",
    harness="0.1.0",
    machine=MachineFacts(host="h", cpus=2, gpus=(), torch="2.13.0"),
    criteria=(THROUGHPUT, SLOPE, GPU),
    phases=(
        PhaseRow(name="stable", about="", result=CriterionResult.MISSED, why="stable, memory_slope", runs=(RUN,)),
        PhaseRow(name="long", about="", result=CriterionResult.NOT_REACHED, why="stable failed", runs=()),
    ),
    not_tested=(Untested(what="gpu_memory", why=GPU.why), Untested(what="nccl", why="no GPU")),
)
MARKDOWN = """\
# NO-GO · ready ci

**memory_slope: 2.1 MB a step (2.05 MB to 2.15 MB) in stable, limit &lt; 1 MB a step; \
stable ended with PASS (memory_growth).**

The check was interrupted. The same command continues it.

## Cause: stable

PASS, memory_growth at `srv/train.py:41`: The host memory of rank 1 grows by 2.0 MiB a step.

**Do:** Look for what a step appends to.

```sh
nsa-harness run reports/r/stable/spec.json
```

## Criteria

| criterion | result | measured | limit | margin | run | repeat |
| --- | --- | --- | --- | --- | --- | --- |
| throughput | **met** | 800 tokens/s | \\> 50 tokens/s | 16 times the limit | [stable](stable/verdict.json) | REPEAT |
| memory_slope | **missed** | 2.1 MB a step (2.05 MB to 2.15 MB) | &lt; 1 MB a step | 2.15 times the limit | \
[stable](stable/verdict.json) | REPEAT |
| gpu_memory | **not tested** |  | &lt; 30 GB | needs 2 GPUs; this machine has no GPU |  |  |

## Not tested here

- gpu_memory: needs 2 GPUs; this machine has no GPU
- nccl: no GPU

## Phases

| phase | result | runs | time |
| --- | --- | --- | ---: |
| stable | **failed** | [stable](stable/verdict.json) PASS | 61.0 s |
| long | **not reached** | stable failed |  |

Run `r` on h · torch 2.13.0 · 2 cores · no GPU · nsa-harness 0.1.0 · checklist: mine.readiness.yaml

```sh
nsa-harness ready ci --checklist mine.readiness.yaml
```
"""
TERMINAL = """\

  criterion      result       measured                             limit           margin
  throughput     met          800 tokens/s                         > 50 tokens/s   16 times the limit
  memory_slope   missed       2.1 MB a step (2.05 MB to 2.15 MB)   < 1 MB a step   2.15 times the limit
  gpu_memory     not tested                                        < 30 GB

  not reached  long: stable failed
  not tested   gpu_memory (needs 2 GPUs; this machine has no GPU) · nccl (no GPU)
  cause        stable PASS memory_growth at srv/train.py:41: The host memory of rank 1 grows by 2.0 MiB a step.
  do           Look for what a step appends to.
  next         nsa-harness run reports/r/stable/spec.json
  more         reports/r/READINESS.md

NO-GO  ready ci   memory_slope: 2.1 MB a step (2.05 MB to 2.15 MB) in stable, limit < 1 MB a step; stable ended with
       PASS (memory_growth)
       interrupted; the same command continues it: nsa-harness ready ci --checklist mine.readiness.yaml
"""


def test_the_document_says_the_verdict_its_cause_and_then_what_it_rests_on() -> None:
    assert readiness_md(RECORD) == MARKDOWN.replace("REPEAT", f"`{SLOPE.repeat}`")


def test_the_terminal_ends_with_the_verdict() -> None:
    assert "\n".join(result_lines(RECORD, Path("reports/r"), 120)) + "\n" == TERMINAL
    assert max(len(line) for line in result_lines(RECORD, Path("reports/r"), 70)) <= 70


def test_the_record_has_every_number_and_what_it_rests_on() -> None:
    said = json.loads(readiness_json(RECORD))
    assert (said["schema"], said["verdict"], said["criteria"][1]["measured"]) == (
        1, "NO-GO", {"value": 2.1e6, "low": 2.05e6, "high": 2.15e6},
    )  # fmt: skip
    assert said["criteria"][1]["blame"]["place"]["line"] == 41


def test_a_go_says_what_was_not_tested_and_what_is_open_is_said_first() -> None:
    go = replace(RECORD, verdict=Decision.GO, criteria=(THROUGHPUT, GPU), phases=())
    assert headline(go) == "1 of 2 criteria met, none missed; gpu_memory, nccl not tested here"
    unread = replace(THROUGHPUT, result=CriterionResult.OPEN, why="stable reported no tokens_per_s")
    undecided = replace(RECORD, verdict=Decision.UNDECIDED, criteria=(unread, GPU))
    assert headline(undecided) == "0 of 2 criteria met; throughput: stable reported no tokens_per_s; and 1 more open"


def test_a_run_that_did_not_pass_goes_before_the_numbers_that_it_misses() -> None:
    hang = replace(RECORD.phases[0], runs=(replace(RUN, verdict="HANG", cause="starved"),))
    assert headline(replace(RECORD, phases=(hang,))).startswith(
        "stable ended with HANG (starved); memory_slope: 2.1 MB"
    )


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [
        (28.4e9, "bytes", "28.4 GB"), (95700.0, "bytes a step", "95.7 kB a step"), (-12.0, "bytes", "-12 bytes"),
        (812.04, "tokens/s", "812 tokens/s"), (3.0, "", "3"),
    ],
)  # fmt: skip
def test_a_number_is_told_with_its_unit(value: float, unit: str, told: str) -> None:
    assert amount_text(value, unit) == told
