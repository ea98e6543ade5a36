"""Words for values, so that a number, place or verdict reads the same in every document."""

from __future__ import annotations

import math
import re
import signal
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from string import Formatter
from typing import Any

from nsa_harness.core.comparison.contrasts import Endings
from nsa_harness.core.comparison.hypotheses import Answer, HypothesisRow, Side
from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.evidence.host import NcclInfo
from nsa_harness.core.outcome.wording import (
    Meshes,
    at,
    counted,
    located_rank,
    location,
    ranks_text,
    shorten,
)
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
from nsa_harness.texts.causes import sections, text_of


def verdict(outcome: Outcome) -> str:
    """Return the verdict for readers. A job that was only inspected has no verdict, but that is not an error."""
    return _LOOKED_AT.get(outcome.verdict.cause or "", outcome.verdict.status.value)


def meaning(outcome: Outcome) -> str:
    """Return what the verdict means, and what it does not mean."""
    verdict = outcome.verdict
    if verdict.status is Status.HANG and outcome.ended == UNWATCHED:
        return "Its ranks stood in waits for each other that, by the files, could not end. More time would not help."
    if verdict.kind is None and verdict.status in (Status.FAIL, Status.ERROR):
        return text_of(verdict.cause, "verdict_means") or MEANING[verdict.status]
    return MEANING[verdict.kind or verdict.status]


MEANING: dict[HangKind | Status, str] = {
    HangKind.DEADLOCK: "Proven to move no more: what it waits for cannot come. More time would not help.",
    HangKind.LIVELOCK: "Proven to move no more: it burns CPU and finishes nothing. More time would not help.",
    HangKind.STARVED: "Proven to move no more: it waits for data that does not come.",
    HangKind.STOPPED: "Proven to move no more: a signal stopped it, and nothing has continued it.",
    Status.HANG: "Proven to move no more.",
    Status.FAIL: "The program ended wrongly.",
    Status.PASS: "Every rank ended by itself with 0, and no expected number was missed.",
    Status.SKIP: "This machine cannot run it. That says nothing about the program.",
    Status.ERROR: "The harness could not judge. That is neither a PASS nor a FAIL of the program.",
}


_LOOKED_AT = {STILL_RUNNING: "MOVES", SUSPECTED: "STALL", INCONCLUSIVE: "OPEN"}
UNKNOWN = "not known"
# The order in which readers want to see the verdicts.
LOUDEST_FIRST = (Status.HANG, Status.FAIL, Status.ERROR, Status.SKIP, Status.PASS)


def seconds(value: float | None) -> str:
    """Return "0.06 s", "14.2 s", "2 min 5 s", or "2 h 1 min"."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 99.95:
        return f"{value:.2f} s" if value < 0.995 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if rest == 0 and minutes < 60:
        return f"{minutes} min"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(value_bytes: float | None, *, tenths: bool = False) -> str:
    """Return "412 MB" or "9.1 GB"; with `tenths` "1.4 MB" for a size below 100 MB."""
    if value_bytes is None:
        return UNKNOWN
    value_bytes = min(value_bytes, 10**18)
    if tenths and value_bytes < 99_500_000:
        return f"{value_bytes / 1e6:.1f} MB"
    if value_bytes < 999_500_000:
        return f"{value_bytes / 1e6:.0f} MB"
    return f"{value_bytes / 1e9:.1f} GB"


def number(value: float) -> str:
    """Return a whole number in full, with commas, and any other with five digits."""
    return f"{value:,.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else f"{value:.5g}"


def loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"


def middle(text: str, limit: int) -> str:
    """Return at most `limit` characters. The middle is cut out, because similar names differ at their ends."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def plural(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", "3 entries"."""
    return f"{count} {noun_for(count, noun)}"


def noun_for(count: float, noun: str) -> str:
    """Return "rank" for one, else "ranks", "entries", "batches"."""
    if count == 1:
        return noun
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def listing(texts: Sequence[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def certainty(confidence: float) -> str:
    """Return "certain", "likely" or "unknown"."""
    if confidence >= CERTAIN:
        return "certain"
    return "likely" if confidence >= 0.6 else "unknown"


def ranks(numbers: Iterable[int]) -> str:
    """Return "rank 1", "ranks 0, 2", "ranks 0-511 and 3 more": inclusive, and never longer than a line."""
    return ranks_text(tuple(numbers))


def rank_numbers(numbers: Iterable[int]) -> str:
    """Return the ranks without the noun: "1", or "0-2, 5"."""
    return ranks(numbers).partition(" ")[2]


def standing_rank(row: RankStatus) -> str:
    """Return "3 (dp=1 tp=1)", or "3" if the job has no mesh."""
    return f"{row.rank} ({row.coordinates})" if row.coordinates else str(row.rank)


def place_name(place: Place) -> str:
    """Return "nsa/model.py:212", or "" if only the module or parameter is known."""
    if place.file is None:
        return ""
    return place.file if place.line is None else f"{place.file}:{place.line}"


def place_details(place: Place, step: int | None = None) -> str:
    """Return the known details of the place: function, layer, module, parameter, step."""
    details = (
        place.function,
        None if place.layer is None else f"layer {place.layer}",
        place.module,
        None if place.parameter is None else f"parameter {place.parameter}",
        None if step is None else f"step {step}",
    )
    return " · ".join(word for word in details if word)


def statement(place: Place) -> str:
    """Return the source line of the place, which is the last line of its text."""
    return (place.text or "").rpartition("\n")[2].strip()


def source_lines(place: Place) -> Iterator[str]:
    """Yield the statement with its line numbers. The last line is the line of the place."""
    lines = textwrap.dedent(place.text).split("\n") if place.text else []
    digits = len(str(place.line or ""))
    for offset, line in enumerate(lines, start=1 - len(lines)):
        number = "" if place.line is None else max(place.line + offset, 1)
        yield f"{' ' if offset else '▸'} {number:>{digits}} │ {line}"


def numbered_lines(around: Place, marked: int | None) -> Iterator[str]:
    """Yield source lines with their numbers, and "▸" at the line `marked`. The last line is the line of the place."""
    lines = textwrap.dedent(around.text or "").split("\n")
    first = (around.line or 0) - len(lines) + 1
    digits = len(str(around.line or 0))
    for number, line in enumerate(lines, start=first):
        yield f"{'▸' if number == marked else ' '} {number:>{digits}} │ {line}"


def headline_tag(outcome: Outcome) -> str:
    """Return the text next to the verdict: the kind of a HANG, else the cause."""
    kind = outcome.verdict.kind
    return kind.value if kind is not None else outcome.verdict.cause or ""


def remarks(outcome: Outcome) -> Iterator[str]:
    """Yield remarks on the verdict: expectation, attempt, flakiness."""
    status = outcome.verdict.status
    if status is Status.PASS and not outcome.expected:
        yield "PASS was not expected"
    if status in (Status.HANG, Status.FAIL) and outcome.expected:
        yield "as expected"
    if outcome.attempt > 1 or not outcome.final:
        yield f"attempt {outcome.attempt}"
    if outcome.spec.deepening:
        yield f"looks into attempt {outcome.spec.deepening.of}: {outcome.spec.deepening.says}"
    if not outcome.final:
        yield "superseded by a later attempt"
    if outcome.flaky:
        yield "flaky: its attempts disagree"


def counts_line(report: Report) -> str:
    """Return "7 runs: 2 HANG · 1 FAIL · 4 PASS", the most important verdict first; "1 run in 3 attempts: 1 PASS".

    A repeated run counts once, and diagnostic reruns do not count.
    """
    by_status = counts(report.outcomes)
    total = sum(by_status.values())
    attempts = sum(outcome.spec.deepening is None for outcome in report.outcomes)
    tried = f" in {attempts} attempts" if attempts > total else ""
    parts = " · ".join(f"{by_status[status]} {status.value}" for status in LOUDEST_FIRST if by_status[status])
    return f"{plural(total, 'run')}{tried}: {parts}" if parts else "0 runs: nothing was judged"


def machine_line(facts: MachineFacts) -> str:
    torch = f"torch {facts.torch}" if facts.torch else "no torch"
    gpus = ", ".join(facts.gpus) if facts.gpus else "no GPU"
    return f"{torch} · {plural(facts.cpus, 'core')} · {gpus}"


def worst_first(outcome: Outcome) -> tuple[bool, bool, int]:
    """Return a sort key: unexpected outcomes that count come first, then the most important verdict."""
    return not outcome.final, outcome.expected, LOUDEST_FIRST.index(outcome.verdict.status)


def bad_news_first(report: Report) -> list[tuple[int, Outcome]]:
    """Return the outcomes with their numbers from 1, the worst first."""
    return sorted(enumerate(report.outcomes, start=1), key=lambda pair: worst_first(pair[1]))


def launch_line(rank_count: int, backend: str, subject: str) -> str:
    """Return "2 ranks · gloo · shape ci". The backend "any" of a program that chooses its own is not shown."""
    parts = (plural(rank_count, "rank"), "" if backend == "any" else backend, subject)
    return " · ".join(word for word in parts if word)


def exit_word(status: int | None) -> str:
    if status is None:
        return "had not ended"
    if status >= 0:
        return str(status)
    return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"


def exit_of(outcome: Outcome, rank: int) -> str:
    """Return the exit status of a rank as text. In a post-mortem, None means unknown, not still running."""
    status = outcome.exit_codes.get(rank)
    return UNKNOWN if status is None and outcome.ended == UNWATCHED else exit_word(status)


def wall_time(outcome: Outcome) -> str:
    return "not run" if outcome.verdict.status is Status.SKIP else seconds(outcome.timing.wall_s)


def facts(outcome: Outcome) -> tuple[str, ...]:
    """Return the facts about a run: its subject, launch, remarks, result of a diagnostic rerun, and notes."""
    showed = f"it showed: {outcome.showed}" if outcome.showed else ""
    launched = launch_line(outcome.spec.ranks, outcome.spec.backend, outcome.spec.subject)
    remarks_and_notes = (outcome.spec.about, launched, *remarks(outcome), showed, *outcome.spec.notes)
    return tuple(fact for fact in remarks_and_notes if fact)


def step(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def culprit_line(outcome: Outcome) -> str:
    """Return "culprit rank 1 · all_reduce #42 (group dp) · step 3 · victims rank 0 · phase backward"."""
    culprit = outcome.culprit
    collective = culprit.collective if culprit else None
    seq = "" if collective is None or collective.seq is None else f" #{collective.seq}"
    parts = (
        f"culprit {ranks(culprit.ranks)}" if culprit and culprit.ranks else "",
        f"{collective.op}{seq} (group {collective.group})" if collective else "",
        f"step {culprit.step}" if culprit and culprit.step is not None else "",
        f"phase {outcome.phase}" if outcome.phase and outcome.verdict.status is not Status.PASS else "",
        f"victims: {ranks(outcome.victims)}" if outcome.victims else "",
    )
    return " · ".join(word for word in parts if word)


def last_shared(outcome: Outcome) -> str:
    """Return the last call from Python that every rank completed; DDP's own calls, below Python, do not count."""
    return f"{outcome.last_agreed}, the last call from Python that every rank completed" if outcome.last_agreed else ""


def numbers(outcome: Outcome) -> Iterator[str]:
    """Yield every known number of the run, each once."""
    metrics = dict(outcome.metrics)
    steps, first, last = (metrics.pop(name, None) for name in ("steps", "loss_first", "loss_last"))
    for shown_elsewhere in ("peak_rss_bytes", "peak_gpu_bytes", *_OF_ALL_STEPS):
        metrics.pop(shown_elsewhere, None)
    parts = [(part, metrics.pop(f"{part}_s", None)) for part in ("fetch", "forward", "backward", "optimizer")]
    rate = metrics.pop("tokens_per_s", outcome.usage.tokens_per_s)
    if steps is not None:
        yield f"{number(steps)} {noun_for(steps, 'step')}"
    if last is not None:
        yield f"loss {number(last)}" if first in (None, last) else f"loss {number(first)} → {number(last)}"
    if rate is not None:
        yield f"{number(rate)} tokens/s"
    yield from (f"{part} {seconds(value)}" for part, value in parts if value)
    yield from (f"{name} {number(value)}" for name, value in sorted(metrics.items()))
    if outcome.usage.peak_rss_bytes is not None:
        yield f"peak memory {size(outcome.usage.peak_rss_bytes)}"
    if outcome.usage.peak_gpu_bytes is not None:
        yield f"peak GPU memory {size(outcome.usage.peak_gpu_bytes)}"


_OF_ALL_STEPS = (
    "step_s_median",
    "tokens_per_s_median",
    "tokens_per_s_slowest",
)  # metrics for criteria and `expect`, not for readers


def row_sentence(outcome: Outcome) -> str:
    """Return the text of an outcome's row in a table: steps and loss of a PASS, else the summary of the verdict."""
    passed = outcome.verdict.status is Status.PASS
    steps_and_loss = " · ".join(islice(numbers(outcome), 2)) if passed and "steps" in outcome.metrics else ""
    return steps_and_loss or outcome.verdict.summary


def times(outcome: Outcome) -> Iterator[str]:
    """Yield how long the launch, the detection of a hang, the teardown and the whole run took, if known."""
    timing = outcome.timing
    named = (("launch", timing.launch_s), ("detected after", timing.detected_s), ("teardown", timing.teardown_s))
    yield from (f"{name} {seconds(value)}" for name, value in named if value is not None)
    yield f"{seconds(timing.wall_s)} in all"


def grounds(outcome: Outcome) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the titled lists that show on what the verdict is based. An empty list is shown as "none" or "nothing"."""
    skipped = outcome.verdict.status is Status.SKIP
    if not outcome.findings and not skipped:
        yield "findings", ("none",)
    if outcome.ruled_out:
        yield "ruled out", outcome.ruled_out
    if not skipped:
        yield "checked", outcome.checked or ("nothing",)
    if outcome.spec.not_covered:
        yield "not covered", outcome.spec.not_covered
    if lines := tuple(memory(outcome)):
        yield "memory", lines
    if outcome.signals:
        yield "signals", tuple(f"{names}: {text}" for names, text in ranks_by_text(outcome.signals.items(), most=None))
    if outcome.nccl:
        yield "NCCL", tuple(nccl(outcome.nccl))
    if not skipped and outcome.ended != UNWATCHED:
        yield "times", tuple(times(outcome))
    if outcome.ended:
        yield "ended", (outcome.ended,)
    if not outcome.trouble and not skipped:
        yield "not captured", ("nothing; every source that was asked answered",)


_MAX_MEMORY_RANKS = 4  # ranks shown; if there are more, those that use most
_MOMENTS = {"boot": "at boot", "dump": "in the newest dump", "end": "at the end"}


def memory(outcome: Outcome) -> Iterator[str]:
    """Yield the memory of the ranks at boot, in a dump and at the end, if the end or the allocator was recorded."""
    is_shown = any(row.moment == "end" or row.allocated_bytes is not None for row in outcome.memory)
    for moment, name in _MOMENTS.items() if is_shown else ():
        rows = [row for row in outcome.memory if row.moment == moment]
        most = sorted(rows, key=_used_bytes, reverse=True)[:_MAX_MEMORY_RANKS]
        when = "at the hang" if moment == "end" and outcome.verdict.status is Status.HANG else name
        shown = [f"rank {row.rank} {', '.join(_memory_of(row))}" for row in rows if row in most]
        more = f"; {plural(len(rows) - len(most), 'more rank')} with less" if len(rows) > len(most) else ""
        if shown:
            yield f"{when}: {'; '.join(shown)}{more}"


def _used_bytes(row: MemoryAt) -> int:
    return max(row.device_bytes or 0, row.reserved_bytes or 0, row.allocated_bytes or 0, row.rss_bytes or 0)


def _memory_of(row: MemoryAt) -> Iterator[str]:
    if row.rss_bytes is not None:
        yield f"{size(row.rss_bytes)} resident"
    if row.allocated_bytes is not None:
        reserved = "" if row.reserved_bytes is None else f" of {size(row.reserved_bytes)} reserved"
        as_of = "" if row.allocator_step is None else f" as of step {row.allocator_step}"
        yield f"{size(row.allocated_bytes)} allocated{reserved}{as_of}"
    if row.device_bytes is not None:
        yield f"{size(row.device_bytes)} on its GPU, as the driver says"
    if row.step is not None:
        yield f"step {row.step}"


def nccl(info: NcclInfo) -> Iterator[str]:
    """Yield how NCCL connected the ranks."""
    if info.version:
        yield f"version {info.version}"
    if info.channels is not None:
        yield f"{plural(info.channels, 'channel')} for collectives, {info.p2p_channels} for transfers"
    if info.transports:
        yield f"transport {', '.join(info.transports)}"
    if info.network:
        yield f"network {info.network}"
    missing = sorted(set(info.seen) - set(info.connected))
    yield f"{ranks(info.connected)} connected" if info.connected else "no rank connected"
    if missing:
        yield f"{ranks(missing)} began to connect and did not finish"
    yield from (f"it warned: {text}" for text in info.warnings)


def gathered(file: Artifact) -> str:
    """Return the number of lines of a file of all attempts, or the reason why it is empty."""
    return file.absent or plural(file.count or 0, "line")


def trouble(item: Trouble) -> str:
    rank = "" if item.rank is None else f" of rank {item.rank}"
    return f"{item.what}{rank}: {item.why}"


_VITAL_HEAD = ("rank:", "loss:", "gradients", "buckets", "longest gap:", "peak memory:")


def vital_table(outcome: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and rows of the table of ranks, without unknown columns. A colon aligns a column to the right."""
    rows = [
        (
            str(row.rank),
            loss(row.loss),
            row.gradients or UNKNOWN,
            row.buckets or UNKNOWN,
            seconds(row.longest_quiet_s),
            size(row.peak_rss_bytes),
        )
        for row in outcome.vitals
    ]
    columns = [column for column in range(len(_VITAL_HEAD)) if any(row[column] != UNKNOWN for row in rows)]
    return tuple(_VITAL_HEAD[c] for c in columns), [tuple(row[c] for c in columns) for row in rows]


def ending_counts(ended: Endings) -> str:
    """Return "3 of 4 failed", or "" for a single attempt, whose verdict is shown next to it."""
    if ended.of < 2:
        return ""
    return f"{ended.bad} of {ended.of} failed" if ended.bad else f"{ended.of} of {ended.of}"


def hypothesis_reason(row: HypothesisRow) -> str:
    """Return the reason. If there are several contrasts, add how many of them show it."""
    shown_by, of = row.of_contrasts
    return f"{row.reason} ({shown_by} of {of} contrasts)" if of > 1 and row.changed else row.reason


def cost(row: HypothesisRow) -> str:
    """Return "2 runs or more, of 8.1 s each", or "" if the cost of the command is not known."""
    return "" if row.cost_s is None else f"2 runs or more, of {seconds(row.cost_s)} each"


def untested_note(number: int) -> str:
    return f"Not tested by these runs: {number} more, listed below with the command that tests each."


def hypothesis_answer(row: HypothesisRow) -> tuple[str, str]:
    return row.hypothesis.text, row.answer.value


def hypothesis_in_line(row: HypothesisRow) -> str:
    """Return the hypothesis, with the runs that support it or leave it undecided."""
    if row.answer in (Answer.SUPPORTED, Answer.UNDECIDED):
        return f"{row.hypothesis.text} ({hypothesis_because(row)})"
    return row.hypothesis.text


def hypothesis_because(row: HypothesisRow) -> str:
    """Return "passes with and without it: single_no_gc, manual_average", or the command that tests it."""
    runs = [f"{side.run.spec.scenario}{_counted(side)}" for side in (row.control, row.changed) if side]
    evidence = f": {', '.join(runs)}" if runs else f": {row.command}" if row.command else ""
    return f"{hypothesis_reason(row)}{evidence}"


def _counted(side: Side) -> str:
    counts = ending_counts(side.ended)
    return f" ({counts})" if counts else ""


_GIB, _MIB = 1 << 30, 1 << 20


def bytes_text(amount: float) -> str:
    if amount >= _GIB:
        return f"{amount / _GIB:.1f} GiB"
    return f"{amount / _MIB:.1f} MiB" if amount >= _MIB / 10 else f"{amount / 1024:.1f} KiB"


def duration(value_s: float) -> str:
    """Return "4 min 52 s"."""
    minutes, rest = divmod(round(value_s), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def agree(verb: str, subject: int | Sized) -> str:
    """Return the verb in the number of its subject: "waits" for one rank, "wait" for several."""
    count = subject if isinstance(subject, int) else len(subject)
    return verb if count == 1 else _PLURAL_VERBS.get(verb, verb.removesuffix("s"))


_PLURAL_VERBS = {"is": "are", "was": "were", "does": "do", "has": "have"}


def inside(function: str) -> str:
    """Return " in step" for the function `step`; "" if the function is unknown."""
    return f" in {function}" if function else ""


def child_wait(kind: str) -> str:
    """Return the text for a kind of wait of a child process, from [child_wait] of causes.toml."""
    waits = sections()["child_wait"]
    return waits.get(kind, waits["unknown"])


def process(child: Mapping[str, Any]) -> str:
    """Return "4711 (python worker.py)" for a process with pid and command."""
    return f"{child['pid']} ({shorten(child['command'], 60)})"


def wait(waiting: Mapping[str, Any]) -> str:
    """Return "rank 1 is blocked in recv from rank 0 at train.py:12" for the facts of a wait in a transfer.

    For any other wait, return "rank 1 is blocked in all_reduce #13 at train.py:12".
    """
    half = waiting.get("transfer")
    call = f"{half['op']} {'to' if half['sends'] else 'from'} {ranks(half['peers'])}" if half else waiting["blocked_in"]
    return f"rank {waiting['rank']} is blocked in {call}{at(waiting.get('line'))}"


def operation(call: Mapping[str, Any]) -> str:
    """Return "all_reduce #13 of group tp" for a collective. The group of all ranks is not named."""
    number = "" if call["number"] is None else f" #{call['number']}"
    group = "" if call["group"] in ("", "0") else f" of group {call['group']}"
    return f"{call['op']}{number}{group}"


def call_text(call: Mapping[str, Any]) -> str:
    """Return "all_reduce #13 of group tp at own/train.py:30" for a collective."""
    return f"{operation(call)}{at(call['line'])}"


def last_seen(seen: Mapping[str, Any]) -> str:
    """Return "last seen in forward blocks.0, step 3", or the text of [unseen] that shows why a rank was not seen."""
    if "unseen" in seen:
        return sections()["unseen"][seen["unseen"]]
    name = f" {seen['name']}" if seen["name"] else ""
    return f"last seen in {seen['in']}{name}, step {seen['step']}"


def last_line(seen: Mapping[str, Any] | None) -> str:
    """Return "; its last line seen, 0.25 s before the end, is own/train.py:12"; "" for None."""
    if seen is None:
        return ""
    line = at(seen["line"]).removeprefix(" at ")
    return f"; its last line seen, {seen['before_end_s']:.2f} s before the end, is {line}"


def blocked(waiting: Mapping[str, Any] | None) -> str:
    """Return "; ranks 0, 2 are blocked in all_reduce at own/train.py:18"; "" for None."""
    if waiting is None:
        return ""
    those, call = waiting["ranks"], waiting["blocked_in"] or "calls to other ranks"
    return f"; {ranks(those)} {agree('is', those)} blocked in {call}{at(waiting['line'])}"


_SHORT_S = 0.1  # shorter steps are shown in milliseconds


def pace(speed: Mapping[str, Any]) -> str:
    """Return "3 steps done, 4.0 s a step, 20 s more for all 8"."""
    text, step_s = f"{counted(speed['steps_done'], 'step')} done", speed["step_s"]
    if step_s is not None:
        text += f", {step_s * 1000:.1f} ms a step" if step_s < _SHORT_S else f", {step_s:.1f} s a step"
    if speed["left_s"] is not None:
        text += f", {speed['left_s']:.0f} s more for all {speed['steps_planned']}"
    return text


def hot_part(part: Mapping[str, Any]) -> str:
    """Return "step at own/train.py:12, in the loop of line 10, (90 %)" for a part of a profile and its samples."""
    loop = "" if part["loop_line"] is None else f", in the loop of line {part['loop_line']},"
    return f"{part['function']}{at(part['line'])}{loop} ({100 * part['samples'] // part['of']} %)"


def refused(code: str) -> str:
    """Return the text for what the machine refused, from [refused] of causes.toml."""
    return sections()["refused"][code]


def ended_there(end: Mapping[str, Any]) -> str:
    """Return "2 hang at own/train.py:12" for attempts that ended in the same way on the same line."""
    return f"{end['count']} {agree(end['verb'], end['count'])} at {location(end['line'])}"


def what_follows(change: str, ended: str) -> str:
    """Return ": " and what the end of a diagnostic rerun with this change shows; "" if it shows nothing."""
    text = sections()["what_follows"].get(f"{change}, {ended}")
    return f": {text}" if text else ""


def gpu(seen: Mapping[str, Any]) -> str:
    """Return "GPU 1 is at 97 % and holds 512 MiB"."""
    return f"GPU {seen['index']} is at {100 * seen['utilisation']:.0f} % and holds {seen['used_bytes'] >> 20} MiB"


def in_step(step: int | None) -> str:
    """Return " in step 3" with its leading space; "" for None."""
    return "" if step is None else f" in step {step}"


def of_step(step: int | None) -> str:
    """Return " of step 3" with its leading space; "" for None."""
    return "" if step is None else f" of step {step}"


def first_few(names: Sequence[str], count: int | None = None, *, shown: int = 3, of: str = "") -> str:
    """Return "a, b, c and 2 more". `count` is the number of all names, if `names` has only the first ones."""
    count = len(names) if count is None else count
    return ", ".join(names[:shown]) + (f" and {count - shown} more{of}" if count > shown else "")


def parameter_names(names: Sequence[str]) -> str:
    """Return "a.weight" for one parameter and "2 parameters (a.weight, a.bias)" for several."""
    if not names:
        return "some of its parameters"
    return f"{counted(len(names), 'parameter')} ({first_few(names)})" if len(names) > 1 else names[0]


def callers(entered: Sequence[Mapping[str, Any]], ranks: Sequence[int] | None = None) -> str:
    """Return "rank 0 called all_reduce #6, rank 1 called barrier #6". Default: for all ranks."""
    texts = [(rank, call_text(call)) for call in entered for rank in call["ranks"] if ranks is None or rank in ranks]
    return ", ".join(f"{names} called {text}" for names, text in ranks_by_text(texts))


_MAX_CYCLE_LINKS = 4  # waits that a sentence spells out; all others are counted


def wait_cycle(waits: Sequence[Mapping[str, Any]]) -> str:
    """Return "rank 0 is blocked in all_reduce #3 for rank 1, rank 1 is blocked in barrier #9 for rank 0"."""
    texts = []
    for link in waits[:_MAX_CYCLE_LINKS]:
        never = ", which never entered that group" if link["never_entered"] else ""
        texts.append(f"rank {link['rank']} is blocked in {call_text(link['call'])} for rank {link['waits_for']}{never}")
    return first_few(texts, len(waits), shown=_MAX_CYCLE_LINKS)


def on_ranks(values: Sequence[Mapping[str, Any]], *patterns: str) -> str:
    """Return "4 elements on rank 0, 2 elements on rank 1" for values from `ranks_by_facts`.

    A pattern such as "{elements} elements" names facts of a value. Each value uses the first pattern all of whose facts
    it has, else the last pattern. `{line}` becomes " at own/train.py:12".
    """
    texts = [(rank, _fill_pattern(patterns, value)) for value in values for rank in value["ranks"]]
    return ", ".join(f"{text} on {names}" for names, text in ranks_by_text(texts))


def _fill_pattern(patterns: Sequence[str], facts: Mapping[str, Any]) -> str:
    """Return the first pattern whose names all are in `facts`, else the last pattern, with the facts filled in."""
    *earlier, last = patterns
    for pattern in earlier:
        if all(name is None or name in facts for _, name, _, _ in Formatter().parse(pattern)):
            return _fill_pattern([pattern], facts)
    return last.format(**{**facts, "line": at(facts.get("line"))})


def counts_by_rank(counts: Sequence[Mapping[str, Any]]) -> str:
    """Return "rank 0 x1 · rank 1 x0"."""
    texts = [(rank, f"x{count['count']}") for count in counts for rank in count["ranks"]]
    return " · ".join(f"{names} {text}" for names, text in ranks_by_text(texts))


_MAX_TEXTS = 4  # texts that a sentence spells out; the ranks of the other texts are counted


def ranks_by_text(texts: Iterable[tuple[int, str]], most: int | None = _MAX_TEXTS) -> list[tuple[str, str]]:
    """Return each text once, after the names of its ranks: [("ranks 0, 2", "all_reduce"), ("rank 1", "barrier")].

    The texts are in the order of their lowest ranks. After `most` texts, one last item counts the other ranks.
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts):
        by_text.setdefault(text, []).append(rank)
    groups = [(ranks_text(numbers), text) for text, numbers in by_text.items()]
    rest = sum(map(len, list(by_text.values())[most:])) if most is not None else 0
    return [*groups[:most], (f"{rest} more ranks", "something else")] if rest else groups


_MENTION = re.compile(r"\branks? (?:\d+(?:, \d+){0,3}(?: and \d+)?)(?![-\d]|\.\d)(?!, \d| and \d| \()")
_NUMBER = re.compile(r"\d+")
_STEP = re.compile(r",? (?:(?:in|of|since|after|to) )?step \d+\b|\b\d+ steps? done, ")


def with_coordinates(claim: str, places: Meshes) -> str:
    """Return the claim with mesh coordinates after the first mention of each rank."""
    mentioned: set[int] = set()

    def located(number: re.Match[str]) -> str:
        rank = int(number[0])
        if rank in mentioned or rank not in places:
            return number[0]
        mentioned.add(rank)
        return located_rank(rank, places)

    return _MENTION.sub(lambda mention: _NUMBER.sub(located, mention[0]), claim) if places else claim


def without_steps(claim: str) -> str:
    """Return the claim without step numbers. They mean nothing in a program without an optimizer."""
    return _STEP.sub("", claim)


# The filters that templates may apply to a fact.
FILTERS: dict[str, Callable[..., str]] = {
    "agree": agree,
    "at": at,
    "blocked": blocked,
    "bytes": bytes_text,
    "call": call_text,
    "callers": callers,
    "child_wait": child_wait,
    "counted": counted,
    "counts_by_rank": counts_by_rank,
    "ended_there": ended_there,
    "first_few": first_few,
    "fixed": lambda value, decimals: f"{value:.{decimals}f}",
    "general": lambda value, digits=6: f"{value:.{digits}g}",
    "gib": lambda value: f"{value / 2**30:.1f} GiB",
    "gpu": gpu,
    "hot_part": hot_part,
    "in_step": in_step,
    "inside": inside,
    "last_line": last_line,
    "last_seen": last_seen,
    "location": location,
    "missing_gradients": lambda seen: f"rank {seen['rank']}: {seen['missing']}",
    "of_step": of_step,
    "on_ranks": on_ranks,
    "operation": operation,
    "pace": pace,
    "parameter_names": parameter_names,
    "process": process,
    "ranks": ranks,
    "refused": refused,
    "shorten": shorten,
    "wait_cycle": wait_cycle,
    "wait": wait,
    "what_follows": what_follows,
}
