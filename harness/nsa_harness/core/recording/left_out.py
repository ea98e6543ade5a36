"""Find where a rank left out a message for which another rank waits."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness.core.recording.recording import Communication
from nsa_harness.core.recording.statements import Statements
from nsa_harness.core.recording.trace import Trace

_SENDS = frozenset({"send", "isend", "send_object_list"})
_RECEIVES = frozenset({"recv", "irecv", "recv_object_list"})


def left_out(trace: Trace, awaited: Communication, statements: Statements) -> Iterator[int]:
    """Yield executions of a rank that left out the counterpart of a message that another rank waits for.

    The first is the last execution of a condition or loop around a statement that could have made it, whose body was
    not executed. Then come the ends of the calls in it, which decided that, and the statement that called the function.
    """
    opposite = _SENDS if "recv" in awaited.operation else _RECEIVES
    headers = statements.headers_around(opposite)
    for execution in reversed(range(len(trace.executions))):
        place = trace.place(execution)
        span = headers.get((place.file or "", place.line or 0))
        if span is not None and not _enters(trace, execution, span):
            yield execution
            yield from (trace.members[call][-1] for call in trace.calls.get(execution, ()) if trace.members[call])
            yield from list(trace.outer(execution))[:1]
            return


def _enters(trace: Trace, execution: int, span: tuple[int, int]) -> bool:
    """Return whether the statement after this one in the same function is in the lines `span`, or is not known."""
    following = trace.position[execution] + 1
    members = trace.members[trace.activation_of[execution]]
    if following == len(members):
        return not trace.activations[trace.activation_of[execution]].ended
    return span[0] <= trace.executions[members[following]].line <= span[1]
