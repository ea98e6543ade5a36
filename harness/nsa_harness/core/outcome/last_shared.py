"""Find the last collective that every rank completed, for the report of a hang."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_harness.core.collectives.reasons import last_common_call
from nsa_harness.core.collectives.timeline import Event, Timeline
from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.evidence.evidence import Call, StatusFile
from nsa_harness.core.evidence.steps import SETUP
from nsa_harness.core.outcome.wording import location_in_brackets, of_group


def last_shared_call(context: DiagnosisContext) -> str | None:
    """Return the last collective that every rank completed, as text with its location, or None if it is unknown."""
    evidence = context.evidence
    status_files = {rank.rank: rank.status_file for rank in evidence.ranks if rank.status_file is not None}
    if len(status_files) < len(evidence.ranks):
        return None
    call, event = last_common_call(status_files), _last_common_event(context.timelines)
    counts_steps = any(status_file.has_optimizer or status_file.steps_s for status_file in status_files.values())
    if event is not None and (call is None or not call.op.startswith(SETUP) or event.at_s > call.entered_s):
        step = event.step if counts_steps else None
        name = f"{event.op} #{event.seq}{of_group(event.group)}"
        if event.from_python:
            return f"{name}{location_in_brackets(event.place, step)}"
        return f"{name} (by DDP or FSDP{'' if step is None else f', step {step}'})"
    if call is None or any(_trained_after(status_file, call) for status_file in status_files.values()):
        return None
    return f"{call.op}{location_in_brackets(call.place, call.step if counts_steps else None)}"


def _last_common_event(timelines: Mapping[int, Timeline]) -> Event | None:
    """Return the lowest rank's event of the latest recorded collective that every rank completed, or None."""
    completed = [
        {(event.group, event.seq, event.op): event for event in timelines[rank].events if event.seq and event.is_done}
        for rank in sorted(timelines)
    ]
    common = set.intersection(*map(set, completed)) if len(completed) > 1 else set()
    return max((completed[0][key] for key in common), key=lambda event: event.at_s, default=None)


def _trained_after(status_file: StatusFile, call: Call) -> bool:
    """Return whether the rank began a backward pass, or finished a step, after it made the call."""
    event = status_file.latest_training_event
    is_later = event is not None and event.kind in ("backward", "optimizer", "step") and event.at_s > call.entered_s
    return is_later or any(done_s > call.entered_s for _, done_s in status_file.steps_s)
