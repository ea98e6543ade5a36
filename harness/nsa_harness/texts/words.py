"""Format the values in reports as text, in the same way for all output files."""

from __future__ import annotations

import math
import signal
import textwrap
from collections.abc import Iterable, Iterator, Sequence, Sized

from nsa_harness.core.comparison.contrasts import FailureCounts
from nsa_harness.core.comparison.hypotheses import Arm, DeadlineEnd, HypothesisAnswer, HypothesisRow, end_at_deadline
from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.evidence.host import NcclInfo
from nsa_harness.core.outcome.wording import location, ranks_text
from nsa_harness.core.report import (
    INCONCLUSIVE,
    STILL_RUNNING,
    SUSPECTED,
    UNWATCHED,
    Artifact,
    HangKind,
    MachineFacts,
    MemoryAt,
    Outcome,
    Place,
    RankStatus,
    Report,
    Status,
    Trouble,
    counts,
)
from nsa_harness.texts.causes import text_of


def verdict(outcome: Outcome) -> str:
    """Return the verdict as text for reports. A job that was only inspected gets MOVES, STALL or OPEN."""
    return _VERDICTS_OF_INSPECTED_JOBS.get(outcome.verdict.cause or "", outcome.verdict.status.value)


def meaning(outcome: Outcome) -> str:
    """Return a sentence that explains the verdict of a run."""
    verdict = outcome.verdict
    if verdict.status is Status.HANG and outcome.ending_text == UNWATCHED:
        return "Deadlock, according to the files: no rank could release the others. More time would not have helped."
    if verdict.kind is None and verdict.status in (Status.FAIL, Status.ERROR):
        return text_of(verdict.cause, "verdict_means") or MEANING[verdict.status]
    return MEANING[verdict.kind or verdict.status]


MEANING: dict[HangKind | Status, str] = {
    HangKind.DEADLOCK: "Deadlock proven: nothing in this job can release the ranks. More time would not help.",
    HangKind.LIVELOCK: "Livelock proven: a rank uses CPU but finishes nothing. More time would not help.",
    HangKind.STARVED: "Hang proven: a rank waits for data or an event that does not come.",
    HangKind.STOPPED: "Hang proven: a signal stopped a process, and nothing has resumed it.",
    Status.HANG: "Hang proven: the run makes no progress.",
    Status.FAIL: "The program failed.",
    Status.PASS: "Every rank exited with code 0, and every expected number was met.",
    Status.SKIP: "This machine cannot run it. That says nothing about the program.",
    Status.ERROR: "nsa-harness could not judge the run. This is neither a PASS nor a FAIL of the program.",
}


_VERDICTS_OF_INSPECTED_JOBS = {STILL_RUNNING: "MOVES", SUSPECTED: "STALL", INCONCLUSIVE: "OPEN"}
UNKNOWN = "not known"
# The order in which readers want to see the verdicts.
LOUDEST_FIRST = (Status.HANG, Status.FAIL, Status.ERROR, Status.SKIP, Status.PASS)


def seconds(value: float | None) -> str:
    """Return a time in seconds as text, such as "0.06 s", "14.2 s", "2 min 5 s" or "2 h 1 min"."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 99.95:
        return f"{value:.2f} s" if value < 0.995 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if rest == 0 and minutes < 60:
        return f"{minutes} min"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def whole_seconds(value: float) -> str:
    """Return an estimated time as text, such as "52 s" or "2 min 5 s"."""
    return seconds(float(round(value))) if value >= 99.5 else f"{max(round(value), 1)} s"


def size(value_bytes: float | None, *, tenths: bool = False) -> str:
    """Return a size such as "412 MB" or "9.1 GB". `tenths`: with a decimal below 100 MB, such as "1.4 MB"."""
    if value_bytes is None:
        return UNKNOWN
    value_bytes = min(value_bytes, 10**18)
    if tenths and value_bytes < 99_500_000:
        return f"{value_bytes / 1e6:.1f} MB"
    if value_bytes < 999_500_000:
        return f"{value_bytes / 1e6:.0f} MB"
    return f"{value_bytes / 1e9:.1f} GB"


def number(value: float) -> str:
    """Return a number as text, such as "12,345". Numbers that are not whole are rounded to five digits."""
    return f"{value:,.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else f"{value:.5g}"


def loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"


def middle(text: str, limit: int) -> str:
    """Return the text, with its middle cut out if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def plural(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 rank", "2 ranks" or "3 entries"."""
    return f"{count} {noun_for(count, noun)}"


def noun_for(count: float, noun: str) -> str:
    """Return the singular or plural form of the noun for this count, such as "ranks"."""
    if count == 1:
        return noun
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def listing(texts: Sequence[str]) -> str:
    """Join the texts into a list for a sentence, such as "a, b and c"."""
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def certainty(confidence: float) -> str:
    """Return the word for a confidence between 0 and 1, such as "certain" or "likely"."""
    if confidence >= CERTAIN:
        return "certain"
    return "likely" if confidence >= 0.6 else "unknown"


def ranks(numbers: Iterable[int]) -> str:
    """Return the ranks as short text, such as "rank 1", "ranks 0, 2" or "ranks 0-511 and 3 more"."""
    return ranks_text(tuple(numbers))


def rank_numbers(numbers: Iterable[int]) -> str:
    """Return the ranks as text without the word "rank", such as "1" or "0-2, 5"."""
    return ranks(numbers).partition(" ")[2]


MANY_RANKS = 64  # with more, no table has a row for each rank


def part_of_ranks(numbers: Sequence[int], total: int) -> str:
    """Return ranks as text, such as "ranks 0, 2", or "1,016 of 1,024 ranks" if they are most ranks with many gaps."""
    text = ranks(numbers)
    is_most = total > MANY_RANKS and 2 * len(numbers) > total
    return f"{len(numbers):,} of {total:,} ranks" if is_most and " more" in text else text


def rank_with_coordinates(row: RankStatus) -> str:
    """Return a rank with its device mesh coordinates, such as "3 (dp=1 tp=1)"."""
    return f"{row.rank} ({row.coordinates})" if row.coordinates else str(row.rank)


def place_name(place: Place) -> str:
    """Return the file with its directory and the line, such as "nsa/model.py:212", or "" if they are unknown."""
    return location(place) if place.file is not None else ""


def whole_place_name(place: Place) -> str:
    """Return the whole path of the file and the line, or "" if they are unknown."""
    return place_name(place) and (place.file or "") + ("" if place.line is None else f":{place.line}")


def place_details(place: Place, step: int | None = None) -> str:
    """Return the function, layer, module, parameter and step of a location as one string."""
    details = (
        place.function,
        None if place.layer is None else f"layer {place.layer}",
        place.module,
        None if place.parameter is None else f"parameter {place.parameter}",
        None if step is None else f"step {step}",
    )
    return " · ".join(word for word in details if word)


def statement(place: Place) -> str:
    """Return the source line of a location without indentation."""
    return (place.text or "").rpartition("\n")[2].strip()


def numbered_lines(around: Place, marked_line: int | None) -> Iterator[str]:
    """Yield numbered source lines, the last of which is that of `around`, and one of which is marked with "▸"."""
    lines = textwrap.dedent(around.text or "").split("\n")
    first = (around.line or 0) - len(lines) + 1
    digits = len(str(around.line or 0))
    for number, line in enumerate(lines, start=first):
        yield f"{'▸' if number == marked_line else ' '} {number:>{digits}} │ {line}"


def headline_tag(outcome: Outcome) -> str:
    """Return the word to show next to the verdict: either the kind of hang or the cause code."""
    kind = outcome.verdict.kind
    return kind.value if kind is not None else outcome.verdict.cause or ""


def remarks(outcome: Outcome) -> Iterator[str]:
    """Yield remarks on the verdict, such as "as expected" or "attempt 2"."""
    status = outcome.verdict.status
    if status is Status.PASS and not outcome.expected:
        yield "PASS was not expected"
    if status in (Status.HANG, Status.FAIL) and outcome.expected:
        yield "as expected"
    if outcome.attempt > 1 or not outcome.final:
        yield f"attempt {outcome.attempt}"
    if outcome.spec.deepening:
        yield f"diagnostic rerun of attempt {outcome.spec.deepening.of}: {outcome.spec.deepening.says}"
    if not outcome.final:
        yield "superseded by a later attempt"
    if outcome.flaky:
        yield "flaky: its attempts end differently"


def counts_line(report: Report) -> str:
    """Return a text such as "7 runs: 2 HANG · 1 FAIL · 4 PASS", in which a repeated run counts once."""
    by_status = counts(report.outcomes)
    total = sum(by_status.values())
    attempts = sum(outcome.spec.deepening is None for outcome in report.outcomes)
    in_attempts = f" in {attempts} attempts" if attempts > total else ""
    parts = " · ".join(f"{by_status[status]} {status.value}" for status in LOUDEST_FIRST if by_status[status])
    return f"{plural(total, 'run')}{in_attempts}: {parts}" if parts else "0 runs: nothing was judged"


def machine_line(facts: MachineFacts) -> str:
    torch = f"torch {facts.torch}" if facts.torch else "no torch"
    gpus = ", ".join(facts.gpus) if facts.gpus else "no GPU"
    return f"{torch} · {plural(facts.cpus, 'core')} · {gpus}"


def severity_key(outcome: Outcome) -> tuple[bool, bool, int]:
    """Return a sort key that puts the worst outcomes first."""
    return not outcome.final, outcome.expected, LOUDEST_FIRST.index(outcome.verdict.status)


def bad_news_first(report: Report) -> list[tuple[int, Outcome]]:
    """Return the outcomes of a report, worst first, each with its number."""
    return sorted(enumerate(report.outcomes, start=1), key=lambda pair: severity_key(pair[1]))


def launch_line(rank_count: int, backend: str, subject: str) -> str:
    """Describe a launch, such as "2 ranks · gloo · shape ci"."""
    parts = (plural(rank_count, "rank"), "" if backend == "any" else backend, subject)
    return " · ".join(word for word in parts if word)


def exit_word(status: int | None) -> str:
    if status is None:
        return "had not exited"
    if status >= 0:
        return str(status)
    return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"


def exit_of(outcome: Outcome, rank: int) -> str:
    """Return the exit status of `rank` as text. A missing status is unknown if only files of a job were read."""
    status = outcome.exit_codes.get(rank)
    return UNKNOWN if status is None and outcome.ending_text == UNWATCHED else exit_word(status)


def wall_time(outcome: Outcome) -> str:
    return "not run" if outcome.verdict.status is Status.SKIP else seconds(outcome.timing.wall_s)


def run_facts(outcome: Outcome) -> tuple[str, ...]:
    """Return facts about a run, such as its description, launch, remarks and notes."""
    rerun_result = f"result: {outcome.rerun_answer}" if outcome.rerun_answer else ""
    launch = launch_line(outcome.spec.ranks, outcome.spec.backend, outcome.spec.subject)
    says_nothing_new = set(outcome.spec.about.split()) <= {*launch.split(), "on"}
    about = "" if says_nothing_new else outcome.spec.about
    remarks_and_notes = (about, launch, *remarks(outcome), rerun_result, *outcome.spec.notes)
    return tuple(fact for fact in remarks_and_notes if fact)


def step(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def marked_culprits(outcome: Outcome) -> frozenset[int]:
    """Return the culprits to mark. If every rank of several is one, a mark would say nothing, so none is marked."""
    in_table = {row.rank for row in outcome.rank_statuses if row.is_culprit}
    culprits = frozenset(in_table or (outcome.culprit.ranks if outcome.culprit else ()))
    marks_all = len(culprits) > 1 and len(culprits) >= max(outcome.spec.ranks, len(outcome.rank_statuses))
    return frozenset() if marks_all else culprits


def culprit_line(outcome: Outcome) -> str:
    """Return a line that names the culprit and its victims, such as "culprit rank 1 · step 3 · victims: rank 0"."""
    culprit = outcome.culprit
    collective = culprit.collective if culprit else None
    seq = "" if collective is None or collective.seq is None else f" #{collective.seq}"
    parts = (
        f"culprit {ranks(culprit.ranks)}" if culprit and marked_culprits(outcome) else "",
        f"{collective.op}{seq} (group {collective.group})" if collective else "",
        f"step {culprit.step}" if culprit and culprit.step is not None else "",
        f"phase {outcome.phase}" if outcome.phase and outcome.verdict.status is not Status.PASS else "",
        f"victims: {ranks(outcome.victims)}" if outcome.victims else "",
    )
    return " · ".join(word for word in parts if word)


def last_shared(outcome: Outcome) -> str:
    """Describe the last collective that all ranks completed, or return "" if it is unknown."""
    return f"{outcome.last_agreed}, the last collective that every rank completed" if outcome.last_agreed else ""


def numbers(outcome: Outcome) -> Iterator[str]:
    """Yield the known numbers of a run as text, such as "12 steps" or "peak memory 412 MB"."""
    metrics = dict(outcome.metrics)
    for shown_elsewhere in (*_STEPS_AND_LOSS, "peak_rss_bytes", "peak_gpu_bytes", *_OF_ALL_STEPS):
        metrics.pop(shown_elsewhere, None)
    parts = [(part, metrics.pop(f"{part}_s", None)) for part in ("fetch", "forward", "backward", "optimizer")]
    rate = metrics.pop("tokens_per_s", outcome.usage.tokens_per_s)
    yield from _steps_and_loss(outcome)
    if rate is not None:
        yield f"{rate:,.{int(rate < 100)}f} tokens/s"
    yield from (f"{part} {seconds(value)}" for part, value in parts if value and value >= _SHORTEST_SHOWN_S)
    yield from (f"{name} {number(value)}" for name, value in sorted(metrics.items()))
    yield from _peak_memory(outcome)


def main_numbers(outcome: Outcome) -> Iterator[str]:
    """Yield the steps, the loss and the peak memory of a run as text."""
    yield from _steps_and_loss(outcome)
    yield from _peak_memory(outcome)


def _steps_and_loss(outcome: Outcome) -> Iterator[str]:
    steps, first, last = map(outcome.metrics.get, _STEPS_AND_LOSS)
    if steps is not None:
        yield f"{number(steps)} {noun_for(steps, 'step')}"
    if last is not None:
        yield f"loss {number(last)}" if first in (None, last) else f"loss {number(first)} → {number(last)}"


def _peak_memory(outcome: Outcome) -> Iterator[str]:
    if outcome.usage.peak_rss_bytes is not None:
        yield f"peak memory {size(outcome.usage.peak_rss_bytes)}"
    if outcome.usage.peak_gpu_bytes is not None:
        yield f"peak GPU memory {size(outcome.usage.peak_gpu_bytes)}"


_STEPS_AND_LOSS = ("steps", "loss_first", "loss_last")
_SHORTEST_SHOWN_S = 0.005
# Metrics for criteria and `expect`, not for readers.
_OF_ALL_STEPS = ("step_s_median", "tokens_per_s_median", "tokens_per_s_slowest")


def row_sentence(outcome: Outcome) -> str:
    """Return the text that summarizes an outcome in a table row."""
    shows_steps = outcome.verdict.status is Status.PASS and "steps" in outcome.metrics
    steps_and_loss = " · ".join(_steps_and_loss(outcome)) if shows_steps else ""
    return steps_and_loss or outcome.verdict.summary


def ending(outcome: Outcome) -> str:
    """Return how the processes of a run ended, or "" for a job that was judged from its files."""
    return "" if outcome.ending_text == UNWATCHED else outcome.ending_text


def times(outcome: Outcome) -> Iterator[str]:
    """Yield the durations of a run as text, such as "launch 2.1 s"."""
    timing = outcome.timing
    phases = (("launch", timing.launch_s), ("detected after", timing.detected_s), ("teardown", timing.teardown_s))
    yield from (f"{name} {seconds(value)}" for name, value in phases if value is not None)
    yield f"{seconds(timing.wall_s)} in all"


def grounds(outcome: Outcome) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the observations on which the verdict of a run is based, as (title, items) pairs."""
    is_skip = outcome.verdict.status is Status.SKIP
    if not outcome.findings and not is_skip:
        yield "findings", ("none",)
    if outcome.ruled_out_causes:
        yield "ruled out", outcome.ruled_out_causes
    if not is_skip:
        yield "checked", outcome.passed_checks or ("nothing",)
    if outcome.spec.not_covered:
        yield "not covered", outcome.spec.not_covered
    if lines := tuple(memory(outcome)):
        yield "memory", lines
    if outcome.signals:
        yield "signals", tuple(f"{names}: {text}" for names, text in ranks_by_text(outcome.signals.items(), most=None))
    if outcome.nccl:
        yield "NCCL", tuple(nccl(outcome.nccl))
    if not is_skip and outcome.ending_text != UNWATCHED:
        yield "times", tuple(times(outcome))
    if ended := ending(outcome):
        yield "ended", (ended,)
    if not outcome.trouble and not is_skip:
        yield "not captured", ("nothing: every source could be read",)


_MAX_MEMORY_RANKS = 4  # maximum number of ranks that are shown; those that use most memory
_MOMENTS = {"boot": "at boot", "dump": "in the latest dump", "end": "at the end"}


def memory(outcome: Outcome) -> Iterator[str]:
    """Yield one line about the ranks' memory usage for each recorded moment of the run."""
    is_shown = any(row.moment == "end" or row.allocated_bytes is not None for row in outcome.memory)
    for moment, name in _MOMENTS.items() if is_shown else ():
        rows = [row for row in outcome.memory if row.moment == moment]
        most = sorted(rows, key=_used_bytes, reverse=True)[:_MAX_MEMORY_RANKS]
        when = "at the hang" if moment == "end" and outcome.verdict.status is Status.HANG else name
        texts = [f"rank {row.rank} {', '.join(_memory_of(row))}" for row in rows if row in most]
        more = f"; {plural(len(rows) - len(most), 'more rank')} with less" if len(rows) > len(most) else ""
        if texts:
            yield f"{when}: {'; '.join(texts)}{more}"


def _used_bytes(row: MemoryAt) -> int:
    return max(row.device_bytes or 0, row.reserved_bytes or 0, row.allocated_bytes or 0, row.rss_bytes or 0)


def _memory_of(row: MemoryAt) -> Iterator[str]:
    if row.rss_bytes is not None:
        yield f"{size(row.rss_bytes)} resident"
    if row.allocated_bytes is not None:
        of_reserved = "" if row.reserved_bytes is None else f" of {size(row.reserved_bytes)} reserved"
        as_of = "" if row.allocator_step is None else f" as of step {row.allocator_step}"
        yield f"{size(row.allocated_bytes)} allocated{of_reserved}{as_of}"
    if row.device_bytes is not None:
        yield f"{size(row.device_bytes)} on its GPU, according to the driver"
    if row.step is not None:
        yield f"step {row.step}"


def nccl(info: NcclInfo) -> Iterator[str]:
    """Yield facts about NCCL, such as its version, channels and transport."""
    if info.version:
        yield f"version {info.version}"
    if info.channels is not None:
        yield f"{plural(info.channels, 'channel')} for collectives, {info.p2p_channels} for transfers"
    if info.transports:
        yield f"transport {', '.join(info.transports)}"
    if info.network:
        yield f"network {info.network}"
    missing = sorted(set(info.logged_ranks) - set(info.connected_ranks))
    yield f"{ranks(info.connected_ranks)} connected" if info.connected_ranks else "no rank connected"
    if missing:
        yield f"{ranks(missing)} started to connect but did not finish"
    yield from (f"warning: {text}" for text in info.warnings)


def line_count(file: Artifact) -> str:
    """Return the number of lines in a file, such as "12 lines", or the reason for its absence."""
    return file.absent or plural(file.count or 0, "line")


def trouble(item: Trouble) -> str:
    rank = "" if item.rank is None else f" of rank {item.rank}"
    return f"{item.what}{rank}: {item.why}"


def ending_counts(endings: FailureCounts) -> str:
    """Return a text such as "3 of 4 failed", or "4 of 4" if none of four failed, and "" for a single attempt."""
    if endings.attempts < 2:
        return ""
    return (
        f"{endings.failed} of {endings.attempts} failed"
        if endings.failed
        else f"{endings.attempts} of {endings.attempts}"
    )


def hypothesis_reason(row: HypothesisRow) -> str:
    """Return the reason for a hypothesis's result, and how many contrasts agree, such as "(2 of 3 contrasts)"."""
    shown_by, of = row.contrast_counts
    reason = hypothesis_reason_alone(row)
    return f"{reason} ({shown_by} of {of} contrasts)" if of > 1 and row.changed else reason


def hypothesis_reason_alone(row: HypothesisRow) -> str:
    """Return why the hypothesis has its result, with remarks on deadlines and on expected failures."""
    runs = [side.run for side in (row.control, row.changed) if side]
    remarks = [_deadline_remark(run.spec.scenario, end) for run in runs if (end := end_at_deadline(run))]
    if row.answer is HypothesisAnswer.SUPPORTED and any(
        run.expected and run.verdict.status is not Status.PASS for run in runs
    ):
        remarks.append("its scenario expects this failure")
    return "; ".join((row.reason, *remarks))


def _deadline_remark(scenario: str, end: DeadlineEnd) -> str:
    rate = "its rate is not known" if end.end_s is None else f"at this rate it would end after {end.end_s:.0f} s"
    return f"{scenario} reached its deadline of {end.deadline_s:g} s, which is no cause: {rate}"


def cost(row: HypothesisRow) -> str:
    """Return the cost of testing a hypothesis, such as "2 or more runs of 8.1 s each", or "" if it is unknown."""
    return "" if row.cost_s is None else f"2 or more runs of {seconds(row.cost_s)} each"


def untested_note(number: int) -> str:
    return f"Not tested by these runs: {number} more, listed below with the command that tests each."


def hypothesis_in_line(row: HypothesisRow) -> str:
    """Return the text of a hypothesis, with the reason in brackets if it is supported or undecided."""
    if row.answer in (HypothesisAnswer.SUPPORTED, HypothesisAnswer.UNDECIDED):
        return f"{row.hypothesis.text} ({hypothesis_because(row)})"
    return row.hypothesis.text


def hypothesis_because(row: HypothesisRow) -> str:
    """Return the reason for the judgement on a hypothesis, and the runs or command for checking it."""
    runs = [f"{side.run.spec.scenario}{_counts_in_brackets(side)}" for side in (row.control, row.changed) if side]
    evidence = f": {', '.join(runs)}" if runs else f": {row.command}" if row.command else ""
    return f"{hypothesis_reason(row)}{evidence}"


def _counts_in_brackets(side: Arm) -> str:
    counts = ending_counts(side.counts)
    return f" ({counts})" if counts else ""


def duration(value_s: float) -> str:
    """Return a time in minutes and seconds, such as "4 min 52 s" or "12 s"."""
    minutes, rest = divmod(round(value_s), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def verb_for(verb: str, subject: int | Sized) -> str:
    """Return the verb for a number or collection of subjects: "waits" for one rank, "wait" for several."""
    count = subject if isinstance(subject, int) else len(subject)
    return verb if count == 1 else _PLURAL_VERBS.get(verb, verb.removesuffix("s"))


_PLURAL_VERBS = {"is": "are", "was": "were", "does": "do", "has": "have"}


_MAX_TEXTS = 4  # texts that a sentence lists; the ranks with other texts are only counted


def ranks_by_text(texts: Iterable[tuple[int, str]], most: int | None = _MAX_TEXTS) -> list[tuple[str, str]]:
    """Group ranks by text, as in [("ranks 0, 2", "all_reduce")]. Beyond `most` groups, ranks are only counted."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts):
        by_text.setdefault(text, []).append(rank)
    groups = [(ranks_text(numbers), text) for text, numbers in by_text.items()]
    rest = sum(map(len, list(by_text.values())[most:])) if most is not None else 0
    return [*groups[:most], (f"{rest} more ranks", "something else")] if rest else groups
