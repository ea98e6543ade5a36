"""Read the messages that a process printed before it ended.

These are tracebacks, errors at interpreter exit, messages of torch's debugging modes, and reports of sent signals.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from nsa_harness.core.evidence.evidence import DebugMessage, EarlierError, Frame, RaisedException, RankEvidence
from nsa_harness.core.evidence.health_samples import PrintedMessage
from nsa_harness.core.evidence.stacks import is_library, user_frame
from nsa_harness.core.report import Place

_PREFIX = re.compile(r"^(?:\[rank\d+\]:? ?)+")
_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$')
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Timeout)?)(?:: (.*))?$")
_ERROR_WORDS = re.compile(r"Error|Exception|terminate called|what\(\):|Fatal Python error|Aborted|Segmentation|FAILED")
# The wording is the same in torch 2.11 and 2.13.
_WARNINGS = re.compile(
    r"find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters"
)
_MAX_FRAMES = 200
_MAX_LINES = 20
_MAX_LENGTH = 500


def last_traceback(log: str) -> tuple[str, str, tuple[Frame, ...]] | None:
    """Return the last traceback in a log, or None if the log has none.

    The result is (exception type, message, frames), with the innermost frame first. If the message of an exception
    quotes the traceback of a DataLoader worker, the traceback of the worker is returned, because it comes last.
    """
    lines = [_PREFIX.sub("", line) for line in log.splitlines()]
    starts = [number for number, line in enumerate(lines) if line in (_START, f"Original {_START}")]
    for start in reversed(starts):
        frames: list[Frame] = []
        for line in lines[start + 1 :]:
            if frame := _FRAME.match(line):
                frames.append(Frame(file=frame[1], line=int(frame[2]), function=frame[3]))
            elif not line.startswith(" ") and frames:
                exception = _EXCEPTION.match(line)
                if exception:
                    return exception[1], (exception[2] or "")[:_MAX_LENGTH], tuple(reversed(frames[-_MAX_FRAMES:]))
                break
    return None


def with_passed_on_errors(exception: RaisedException) -> RaisedException:
    """Return the exception with the tracebacks that workers, pools and spawned ranks quote in its message as causes."""
    texts = (exception.message, *(earlier.message for earlier in exception.chain))
    tracebacks = (traceback for text in texts if (traceback := last_traceback(text)))
    inner = tuple(EarlierError(type=kind, message=message, frames=frames) for kind, message, frames in tracebacks)
    return replace(exception, chain=(*inner, *exception.chain))


def earliest_program_error(exception: RaisedException) -> RaisedException:
    """Return the earliest cause from the program's code that no library caught internally, or the exception itself."""
    own = [
        earlier
        for earlier in exception.chain
        if earlier.explicit and any(not is_library(frame.file) for frame in earlier.frames)
    ]
    if not own:
        return exception
    return replace(exception, type=own[-1].type, message=own[-1].message, frames=own[-1].frames)


# Messages of gloo's transport, the store and NCCL's watchdog about a wait longer than the timeout of the process group.
TIMEOUT_MESSAGE = re.compile(
    r"Timed out waiting|[Tt]imed out after \d+ ?(?:ms|milli)|Watchdog caught collective operation timeout"
    r"|Ranks? (?P<absent>\d+(?:, \d+)*) failed to pass monitoredBarrier"
)


_TIMEOUT_MS = re.compile(
    r"Timed out waiting (\d+) ?ms|Timeout\(ms\)=(\d+)|[Tt]imed out after (\d+) ?(?:ms|milli)|Barrier in (\d+) ?ms"
)


def timeout_s(message: str) -> float | None:
    """Return the timeout of the process group, in seconds, that a message of torch names, or None if it names none."""
    match = _TIMEOUT_MS.search(message)
    return next((int(number) / 1000 for number in match.groups() if number), None) if match else None


_LAST_BEFORE_ABORT = re.compile(r"Watchdog caught|what\(\):")


def timeout_message(rank: RankEvidence) -> re.Match[str] | None:
    """Return the match of the rank's message that it timed out while waiting for others, or None if there is none."""
    exception = rank.exception
    # Only an exception from torch counts: a program may also wait for something else than its ranks.
    is_from_torch = exception is not None and any("/torch/" in frame.file for frame in exception.frames[:1])
    texts = [f"{exception.type}: {exception.message}"] if exception is not None and is_from_torch else []
    texts += [line for line in rank.error_lines if _LAST_BEFORE_ABORT.search(line)]
    return next((message for text in texts if (message := TIMEOUT_MESSAGE.search(text))), None)


def known_warnings(log: Iterable[str]) -> tuple[str, ...]:
    """Return the torch warnings in a log that are useful for a diagnosis."""
    return tuple(sorted({match[0] for line in log if (match := _WARNINGS.search(line))}))


def error_lines(log: str) -> tuple[str, ...]:
    """Return the last lines of a log that mention an error, or the last non-blank line if none does."""
    lines = [_PREFIX.sub("", line)[:_MAX_LENGTH] for line in log.splitlines() if line.strip()]
    error_texts = [line for line in lines if _ERROR_WORDS.search(line)]
    return tuple(error_texts[-_MAX_LINES:] or lines[-1:])


_LINES = 400  # last lines of a log that are searched
_MAX_MESSAGES = 8
_MAX_TEXT = 200
# How messages at exit begin. The first two are printed by Python 3.9 to 3.14, the last one by torch.
_BEGINNINGS = (
    ("atexit", re.compile(r"^Error in (atexit)\._run_exitfuncs:$|^Exception ignored in (atexit callback).*$")),
    ("left", re.compile(r"^.*resource_tracker: There appear to be (\d+ leaked .+?) objects? to clean up.*$")),
    ("process group", re.compile(r"^.*(destroy_process_group)\(\) was not called before program exit.*$")),
)


# How the tracebacks of a thread, of a child process of multiprocessing, and of other writers to the same stderr begin.
_BACKGROUND_BEGINNINGS = (
    ("thread", re.compile(r"^Exception in thread (.+?):?$")),
    ("child process", re.compile(r"^Process (\S+):$")),
    ("child process", re.compile(rf"^()(?={re.escape(_START)}$)")),
)


def read_exit_messages(log: str) -> tuple[PrintedMessage, ...]:
    """Return the messages in a log about problems that occurred when the interpreter exited."""
    return _read_messages(log, _BEGINNINGS)


def read_background_failures(log: str, exception: RaisedException | None) -> tuple[PrintedMessage, ...]:
    """Return the failures of a rank's threads and child processes that its log reports.

    Some tracebacks do not name their thread or process. Such a traceback is ignored if it belongs to `exception`, which
    is the rank's own exception, to an earlier error in its chain, or to a failure with a name.
    """
    errors: tuple[RaisedException | EarlierError, ...] = (exception, *exception.chain) if exception else ()
    known_lines = {frame.line for error in errors if (frame := user_frame(error.frames))}
    failures = [
        (failure, failure.place.line)
        for failure in _read_messages(log, _BACKGROUND_BEGINNINGS)
        if failure.place and failure.place.line
    ]
    known_lines |= {line for failure, line in failures if failure.name != failure.kind}
    return tuple(failure for failure, line in failures if failure.name != failure.kind or line not in known_lines)


def _read_messages(log: str, beginnings: Sequence[tuple[str, re.Pattern[str]]]) -> tuple[PrintedMessage, ...]:
    """Return the messages in the last lines of a log, found by (kind, pattern of the first line), each once."""
    lines = log.splitlines()[-_LINES:]
    messages: dict[PrintedMessage, None] = {}
    for number, line in enumerate(lines):
        for kind, beginning in beginnings:
            match = beginning.match(line)
            if match is not None and len(messages) < _MAX_MESSAGES:
                name = next((group for group in match.groups() if group), kind)
                messages[_read_message(kind, name, lines[number + (line != _START) :])] = None
    return tuple(messages)


def _read_message(kind: str, name: str, after: Sequence[str]) -> PrintedMessage:
    error, place, entry_place = "", None, None
    if after and after[0].startswith("Traceback (most recent call last)"):
        end = next((n for n, line in enumerate(after) if n and line and not line[0].isspace()), len(after))
        traceback = last_traceback("\n".join(after[: end + 1]))
        if traceback is not None:
            error_type, text, frames = traceback
            error, frame = f"{error_type}: {text}"[:_MAX_TEXT], user_frame(frames)
            place = Place(file=frame.file, line=frame.line, function=frame.function) if frame else None
            own = [frame for frame in frames if not is_library(frame.file)][-1:]
            entry_place = next(
                (Place(file=frame.file, line=frame.line, function=frame.function) for frame in own), None
            )
    return PrintedMessage(kind=kind, name=name[:_MAX_TEXT], error=error, place=place, entry_place=entry_place)


_ANOMALY = re.compile(r"Error detected in (\w{1,80})\. Traceback of forward call that caused the error:")
_FORWARD = "Operations executed during the original forward:"
_RECOMPUTED = "Operations executed during recomputation:"
_TRACE = re.compile(r"^(?P<log>\S.*)   \((?P<number>\d+) of \d+ in (?P<pass>original|recompute)\)$")
_OPERATION = re.compile(r"= torch\._ops\.([\w.]{1,80})\(")
_PRINTED = re.compile(r'^ {2,}File "(.+)", line (\d+), in (.+)$')
_LISTED = re.compile(r"^(/.+\.py|<.+>):(\d+):(\S+)$")
_MOST_LINES = 200


def read_debug_message(log: str) -> DebugMessage | None:
    """Return the last message in a log from torch's debugging modes, or None if there is none."""
    if "Traceback of forward call" not in log and _RECOMPUTED not in log:
        return None
    lines = [_PREFIX.sub("", line) for line in log.splitlines()]
    return _read_anomaly(lines) or _read_recomputation(lines)


def _read_anomaly(lines: Sequence[str]) -> DebugMessage | None:
    starts = [(number, match) for number, line in enumerate(lines) if (match := _ANOMALY.search(line))]
    if not starts:
        return None
    number, match = starts[-1]
    frames = tuple(_printed_frames(lines[number + 1 : number + 1 + _MOST_LINES]))
    return DebugMessage(operation=match[1], frames=frames[::-1]) if frames else None


def _printed_frames(lines: Sequence[str]) -> Iterator[Frame]:
    """Yield the frames of a printed traceback, outermost first."""
    for line in lines:
        if frame := _PRINTED.match(line):
            yield Frame(file=frame[1], line=int(frame[2]), function=frame[3])
        elif not line.startswith("    ") and line.strip():
            return


def _read_recomputation(lines: Sequence[str]) -> DebugMessage | None:
    """Return the first difference that checkpointing's debug mode printed in `lines`, or None if there is none."""
    if _FORWARD not in lines or _RECOMPUTED not in lines:
        return None
    start, middle = lines.index(_FORWARD), lines.index(_RECOMPUTED)
    forward, again = _operations(lines[start:middle]), _operations(lines[middle : middle + _MOST_LINES * 10])
    for (number, before), (other, after) in zip_longest(forward, again, fillvalue=(0, "")):
        if before == after:
            continue
        frames = tuple(
            _listed_frames(lines, "original", number) if number else _listed_frames(lines, "recompute", other)
        )
        return DebugMessage(
            operation=before or after, instead=after if before else "", frames=frames, is_recomputation=True
        )
    return None


def _operations(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Return the number and the name of each tensor operation in `lines`, except `detach` operations."""
    operations: list[tuple[int, str]] = []
    number = 0
    for line in lines:
        if line.startswith("+--"):
            break
        operation = _OPERATION.search(line)
        number += line.startswith("$")
        if operation and "detach" not in operation[1]:
            operations.append((number, operation[1]))
    return operations


def _listed_frames(lines: Sequence[str], pass_name: str, number: int) -> Iterator[Frame]:
    """Yield the frames listed for tensor operation `number` of the "original" or "recompute" pass, innermost first."""
    inside = False
    for line in lines:
        if trace := _TRACE.match(line):
            inside = trace["pass"] == pass_name and int(trace["number"]) == number
        elif inside and (frame := _LISTED.match(line)):
            yield Frame(file=frame[1], line=int(frame[2]), function=frame[3])


_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n.*?exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)")
# Messages of processes that send signals. If a message names no process, the signal went to the whole job.
_SENDERS = (
    ("torchrun", re.compile(r"Sending process (?P<pid>\d+) closing signal (?P<signal>\w+)")),
    ("torchrun", re.compile(r"Unable to shutdown process (?P<pid>\d+) via.*forcefully exiting via (?P<signal>\w+)")),
    ("torch.multiprocessing.spawn", re.compile(r"Terminating process (?P<pid>\d+) via signal (?P<signal>\w+)")),
    ("DeepSpeed's launcher", re.compile(r"Killing subprocess (?P<pid>\d+)")),
    ("Lightning's launcher", re.compile(r"Child process with PID \d+ (?P<why>terminated with code -?\d+)")),
    (
        "somebody outside, to torchrun",
        re.compile(r"(?:Received (?=\S+ death signal, shutting)|SignalException: Process .*: )(?P<number>\d{1,2})?"),
    ),
    ("Slurm", re.compile(r"CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]*[A-Z]))?")),
)
_FIRST = "Root Cause (first observed failure):"

_MAX_SIGNALS = 256


@dataclass(frozen=True, kw_only=True)
class AgentFailure:
    """One failed rank in the summary that torchrun prints when it ends."""

    rank: int
    pid: int
    status: int
    first: bool


def agent_failures(log: str) -> tuple[AgentFailure, ...]:
    """Return the failed ranks listed in the summary that torchrun prints when it ends."""
    others, heading, first = log.partition(_FIRST)
    return tuple(
        AgentFailure(rank=int(rank), pid=int(pid), status=int(status), first=part is first and bool(heading))
        for part in (others, first)
        for rank, status, pid in _FAILURE.findall(part)
    )


def is_from_outside(sender: str) -> bool:
    """Return whether a sender named by `closing_signals` is outside the job, so that the job did not fail itself."""
    return sender.startswith(("Slurm", "somebody outside")) and "task failure" not in sender


def _signal_name(number: str | None) -> str:
    return {int(one): one.name for one in signal.Signals}.get(int(number or signal.SIGTERM), "SIGTERM")


def closing_signals(log: str) -> tuple[tuple[int, str, str], ...]:
    """Return the signals that a launcher or scheduler reports in a log.

    Each item is (pid, signal, sender), with a signal name such as "SIGTERM". The pid is 0 if the signal went to the
    whole job.
    """
    signals = [
        (match.start(), sender, match.groupdict()) for sender, pattern in _SENDERS for match in pattern.finditer(log)
    ]
    return tuple(
        (
            int(parts.get("pid") or 0),
            parts.get("signal") or _signal_name(parts.get("number")),
            f"{sender} ({parts['why'].lower()})" if parts.get("why") else sender,
        )
        for _, sender, parts in sorted(signals, key=lambda signal: signal[0])[:_MAX_SIGNALS]
    )
