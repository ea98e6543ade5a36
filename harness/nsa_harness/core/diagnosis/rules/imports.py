"""The rule about a user's file that Python imports instead of an installed package of the same name."""

from __future__ import annotations

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, exception_place, failed_ranks, first_own_failure
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.verdict.verdict import Failure, FailureKind


@rule_if(first_own_failure)
def hidden_package(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Explain a failed import of a package that a file of the user hides, such as a torch.py beside the script."""
    error = first.exception
    hints = error.hints if error else ()
    file = next((hint.name for hint in hints if hint.kind == "hiding file"), "")
    if first.kind is FailureKind.LAUNCHER:
        file = context.evidence.hiding_file
    if not file:
        return None
    return Explanation(
        cause=Cause.HIDDEN_PACKAGE,
        evidence=EvidenceKind.RAISED,
        facts={"file": file, "launcher": error is None},
        ranks=failed_ranks([first]),
        place=exception_place(context, first.rank, error) if error else None,
        proof=(error.proof,) if error else ("output.log",),
    )
