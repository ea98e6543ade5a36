"""Decide what the coordinator of a job on several nodes does next, from the state that each node has published.

Nothing here compares clocks of two nodes: a state has durations that its node measured itself, and numbers that only
increase. `unseen_s` is the time, on the coordinator's own clock, since a node's state has last changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

LOST_S = 20.0  # a node whose state has not changed for this long, while its ranks had not ended, is lost
LEASE_S = 12.0  # a coordinator that has not renewed its lease for this long is replaced


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """The state of one node, as its agent publishes it."""

    node: str
    beat: int = 0  # increases whenever the state is written
    host: str = ""
    harness: str = ""  # version of nsa-harness
    attempt: str = ""
    ranks: tuple[int, ...] = ()  # all global ranks that were seen on the node
    living_ranks: tuple[int, ...] = ()
    world_size: int = 0
    quiet_s: float | None = None  # since the last progress of any of its ranks; None = no rank lives
    stall_s: float = 0.0  # the pause after which it suspects a stall
    check_s: float = 0.0  # the pause after which it looks for a wait that nothing can end
    look: int = 0  # number of its latest answered request for a snapshot
    done: int = 0  # number of the latest decision for which all its files are stored
    is_ending: bool = False  # the job reacts to a signal that asks it to end, so what it waits for is no hang
    restarts: int = 0  # number of proven hangs after which its ranks made progress again
    ended: bool = False  # its launcher has ended, and all its files are stored
    status: int | None = None  # exit status of its launcher
    started: float = 0.0  # wall clock, only for people
    origin_ns: int = 0  # monotonic clock at second 0 of the node's times, only for people


@dataclass(frozen=True, kw_only=True)
class SeenNode:
    """The latest state of a node that the coordinator has read, and for how long it has not changed."""

    state: NodeState
    unseen_s: float = 0.0

    @property
    def is_lost(self) -> bool:
        return not self.state.ended and self.unseen_s > LOST_S


class Step(StrEnum):
    """The next action of the coordinator."""

    WAIT = "wait"
    BEGIN = "begin"  # a stall of all nodes is suspected: request the first snapshot
    JUDGE = "judge"  # all nodes have answered: merge the snapshots and try to prove a hang
    CANCEL = "cancel"  # a node has made progress
    RETRACT = "retract"  # a node has made progress after a proven hang
    FINISH = "finish"  # all nodes have ended or are lost


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The snapshots that were requested, and what was decided."""

    look: int = 0  # the number of the latest request
    first: int = (
        1  # the number of the first request of the current suspicion; greater than `look`: nothing is suspected
    )
    end: int = 0  # the number of the decision after which all nodes end their ranks, once all have stored their files
    hang: int = 0  # the number of the latest decision that the job hangs, and has not been retracted; 0 = none

    @property
    def is_suspected(self) -> bool:
        return self.first <= self.look


def next_step(nodes: Sequence[SeenNode], requests: Requests, *, min_nodes: int = 1) -> Step:
    """Return what to do next.

    A suspicion needs every node: all ranks have been seen, and on each node that has living ranks, none of them made
    progress for longer than the node's limit. `min_nodes`: number of nodes that the job has at least.
    """
    active = [node.state for node in nodes if not node.state.ended and not node.is_lost]
    if nodes and not active:
        return Step.FINISH
    if requests.hang:
        has_progress = any(node.state.restarts >= requests.hang for node in nodes)
        return Step.RETRACT if has_progress else Step.WAIT
    suspects = len(nodes) >= min_nodes and _all_stand_still(active)
    if not requests.is_suspected:
        return Step.BEGIN if suspects else Step.WAIT
    if not suspects:
        return Step.CANCEL
    return Step.JUDGE if all(state.look >= requests.look for state in active) else Step.WAIT


def _all_stand_still(active: Iterable[NodeState]) -> bool:
    """Return whether no rank of the job makes progress. A node without ranks may still be starting them."""
    states = list(active)
    with_living = [state for state in states if state.living_ranks]
    are_starting = any(not state.ranks or state.is_ending for state in states)
    still = all(state.quiet_s is not None and state.quiet_s >= state.check_s for state in with_living)
    return bool(with_living) and not are_starting and still


def exceeds_limits(nodes: Iterable[SeenNode]) -> bool:
    """Return whether every node has made no progress for longer than its limit for a stall.

    Before that, only a wait that nothing can end proves a hang.
    """
    active = (node.state for node in nodes if not node.state.ended and not node.is_lost)
    return all(state.quiet_s is None or state.quiet_s >= state.stall_s for state in active if state.living_ranks)


def quiet_s(nodes: Iterable[SeenNode]) -> float:
    """Return for how long no rank of the job has made progress: the shortest time that a node has measured."""
    states = (node.state for node in nodes if not node.state.ended and not node.is_lost)
    return min((state.quiet_s or 0.0 for state in states if state.living_ranks), default=0.0)


def lost_nodes(nodes: Iterable[SeenNode]) -> tuple[str, ...]:
    """Return the names of the nodes whose agents no longer publish, although their ranks had not ended."""
    return tuple(sorted(node.state.node for node in nodes if node.is_lost))
