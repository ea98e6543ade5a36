"""profile.txt: where the time of a slow run goes, as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness import protocol
from nsa_harness.core.diagnosis.profile import Pace, pace, profiles
from nsa_harness.core.evidence.evidence import Evidence


def profile_text(evidence: Evidence) -> Iterator[str]:
    """Line by line; nothing where nobody was sampled."""
    made = profiles(evidence)
    if not made:
        return
    seen_at = [one.at_s for one in evidence.samples]
    yield f"{len(seen_at)} samples, {min(seen_at):.1f} s to {max(seen_at):.1f} s after the launch"
    if (speed := pace(evidence)) is not None:
        yield f"{speed.done} {'step' if speed.done == 1 else 'steps'} done, {_pace_words(speed)}"
    for one in made:
        yield ""
        yield f"rank {one.rank}: at work in {one.working} of {one.samples} samples{_nodes_words(one.nodes)}"
        for line in one.lines:
            inside = "" if line.leaf is None or line.leaf == line.user else f"   in {line.leaf.function}"
            share = f"{100 * line.seen / one.samples:5.1f} %"
            yield f"  {share}  {line.user.file}:{line.user.line} {line.user.function}{inside}"


def _nodes_words(nodes: int | None) -> str:
    if nodes is None:
        return ""
    more = " or more" if nodes >= protocol.NODES_LIMIT else ""
    return f", {nodes}{more} autograd nodes in its first backward pass"


def _pace_words(speed: Pace) -> str:
    words = f"the one in progress takes {speed.running_s:.1f} s"
    if speed.step_s is not None:
        words = f"{speed.step_s:.1f} s a step; {words}"
    return words if speed.left_s is None else f"{words}; {speed.left_s:.0f} s more for all {speed.planned}"
