'''Rules: pure functions from a run to its cause, in the order in which the diagnosis calls them.

A rule is a function `(context: DiagnosisContext) -> Explanation | None`. It recognizes a mechanism, never the
texts of known programs, and returns None if the run does not show this mechanism. How to add a rule:

1. **CauseRow.** Give the cause its member of `Cause` in `causes.py`, and its section in `texts/causes.toml`. If no frozen
   evidence shows the cause, give facts for its template in `BY_HAND` of `tests/texts/test_templates.py`.
2. **Rule.** Write the function in the module of its family. If it first needs to find something in the run, let
   `@rule_if(find)` pass that in: the rule runs only if `find(context)` is not None.

       @rule_if(root_where(lambda root: root.kind is WaitKind.PIPE))
       def pipe_full(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
           """A rank writes to a pipe that no process empties."""
           line = wait_place(context, root)
           return Explanation(
               cause=Cause.PIPE_FULL,
               evidence=EvidenceKind.KERNEL,  # on which the rule is based; the row lists what makes it certain
               facts={"line": line, "child": None},
               ranks=ranks,
               place=line,  # of the culprit
               proof=dump_proof(context, root),
           )

3. **Facts.** They are values, never prose: numbers, strings from the run (a message, a function's name), `Place`, and
   tuples and mappings of these. No " at ", no "s" for a plural, nothing shortened or rounded. A rule always passes
   every fact of its template: an unknown value is None, and an empty one is "" or (). If several rules name one cause,
   each passes a fact `variant`, a word by which the template selects its text, and the facts of its variant. A fact
   may not be called `ranks`, `rank`, `place`, `step` or `remedy`, which every template has already. Readers see the
   facts under `facts` of the finding in report.json, so choose names that they understand.
4. **Template.** `claim` in the cause's section of `texts/causes.toml` is the sentence, in Jinja2 with `if` and filters
   only, and `advice` is what to do; without `advice` the `remedy` is shown. Line breaks and indentation count as one
   space; `{%- if child %}` takes the space before it away. In addition to the facts a template has

       ranks, rank   the ranks of the explanation, and the first of them (None where there is none)
       place, step   the place and step of the explanation
       remedy        the remedy of the section, as a sentence

   and the filters of `texts/words.py`:

       {{ ranks|ranks }}               rank 1; ranks 0, 2; ranks 0-511 and 3 more
       {{ "waits"|agree(ranks) }}      waits for one rank, wait for several; also for "is", "does", and for a number
       {{ line|at }}                   " at own/train.py:12" with its leading space; "" for None
       {{ function|inside }}           " in step"; "" for ""
       {{ seen|counted("step") }}      1 step, 3 steps; a second argument is the plural
       {{ message|shorten(120) }}      one line of at most 120 characters
       {{ kept|bytes }}                1.5 GiB
       {{ quiet_s|fixed(0) }}          a number without decimals; `general` is Python's "g"
       {{ child|process }}             4711 (python worker.py), from `process_facts`
       {{ child.blocked_in|child_wait }}   a read or write: the texts of [child_wait] in causes.toml
       {{ step|in_step }}              " in step 3"; "" for None; `of_step` likewise
       {{ names|first_few(count) }}    a, b, c and 2 more
       {{ own|call }}                  all_reduce #13 of group tp at own/train.py:30, from `call_facts`
       {{ entered|callers }}           rank 0 called all_reduce #6, ranks 1, 2 called barrier #6, from `ranks_by_facts`
       {{ sizes|on_ranks("{n} B") }}   4 B on rank 0, 2 B on ranks 1, 2, from `ranks_by_facts`

   If several causes share their claims, these are in `[shared]` by variant, and each cause has `{% include variant %}`.
   Any other wording of a value becomes a filter there, never code in a rule. A missing fact is an error, and so is
   printing None: the report then shows the cause with its facts, and lists the error under "not captured". So print
   an optional fact only within `{% if %}`.
5. **Order.** Enter the rule in `RULES` below. The first answer is the cause.
6. **Fault.** Show it by a program in tests/faults with a healthy twin (`shown_by` in the row), and write tests in
   tests/core that the rule answers, and that something else explains the run.

No rule changes a verdict: `core/verdict/proof.py` decides what is a HANG. A mechanism that only stacks show is read in
`core/evidence/stacks.py` and kept in a field of `Wait`.

`python tests/frozen/freeze.py` shows which frozen judgements a change touches, and tests/texts renders every template
with and without each optional fact.

If the evidence leaves something open, add an `OpenQuestion(code=..., facts={...})` to `left_open=`. Its code is a key
of `[left_open]` in `texts/causes.toml`, with a template of the same kind.
'''

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from nsa_harness.core.diagnosis.explanation import Rule
from nsa_harness.core.diagnosis.rules import (
    autograd,
    calls_differ,
    failures,
    group_waits,
    host_waits,
    p2p,
    resources,
    silent_faults,
    threads,
)


class RulePhase(StrEnum):
    """The phases in their order: first those that look for the cause, then those that note findings of any run."""

    NOT_JUDGED = "not judged"
    FIRST_FAILURE = (
        "first failure in time"  # a failure that shows its reason: other ranks then wait for the failed rank
    )
    WAIT_CYCLE = "wait cycle outside collectives"  # group creation and transfers, which change the later calls of ranks
    RANKS_DIFFER = "ranks differ"
    WAITS_BY_ITSELF = "a rank waits by itself"
    SLOW = "slow"
    FALLBACK = "fallback"  # how the first rank ended: last, because diverging ranks end each other
    TRAINING = "silent faults of the training"
    PROGRAM = "what the program's own tables show"
    SURROUNDINGS = "silent faults around the training"


NOTED = (RulePhase.TRAINING, RulePhase.PROGRAM, RulePhase.SURROUNDINGS)
CAUSES = tuple(phase for phase in RulePhase if phase not in NOTED)

# If two rules of a phase answer one run, the first one wins. So the rule that shows more, or that explains the other,
# comes first.
RULES: Mapping[RulePhase, tuple[Rule, ...]] = {
    RulePhase.NOT_JUDGED: (failures.not_judged,),
    RulePhase.FIRST_FAILURE: (
        autograd.static_graph_changed,
        autograd.ready_twice,
        autograd.checkpoint_recompute_mismatch,
        autograd.inplace_modification,
        autograd.model_mismatch,
        autograd.reentrant_no_grad_input,
        autograd.nothing_to_differentiate,
        failures.came_too_late,
        group_waits.store_given_up,
        resources.host_oom,
        resources.cuda_oom,
        resources.cuda_assert,
        resources.disk_full,
        autograd.rank_conditional_unused_params,
        resources.infra,
        autograd.unused_params,
        resources.dataloader_worker_died,
        failures.exception,
    ),
    RulePhase.WAIT_CYCLE: (
        group_waits.rendezvous_missing_rank,
        p2p.p2p_unmatched,
        group_waits.group_creation_subset,
        group_waits.store_key_missing,
    ),
    RulePhase.RANKS_DIFFER: (calls_differ.cross_group_deadlock, calls_differ.calls_differ),
    RulePhase.WAITS_BY_ITSELF: (
        host_waits.stopped_process,
        host_waits.debugger_waits,
        threads.gil_held_native,
        threads.native_busy_loop,
        resources.shutdown_hang,
        threads.thread_died,
        host_waits.dataloader_worker_blocked,
        host_waits.fork_lock,
        host_waits.pipe_full,
        host_waits.backward_function_blocked,
        host_waits.lock_cycle,
        host_waits.infinite_loop,
        threads.pool_worker_lost,
        threads.open_thread_wait,
        threads.livelock,
        host_waits.starved,
        host_waits.blocked_io,
        group_waits.transport,
    ),
    RulePhase.SLOW: (failures.slow,),
    RulePhase.FALLBACK: (
        failures.never_arrived,
        failures.rank_absent,
        failures.not_delivered,
        failures.early_exit,
        failures.bad_exit,
        failures.killed,
        failures.crashed,
        failures.unknown,
    ),
    RulePhase.TRAINING: (
        silent_faults.shared_file,
        silent_faults.unwaited_collective,
        silent_faults.batches_given_up,
        silent_faults.uninitialised_parameters,
        silent_faults.nan,
        silent_faults.replica_divergence,
        autograd.silent_checkpoint,
        silent_faults.no_gradient,
        silent_faults.memory_growth,
        silent_faults.input_bound,
    ),
    RulePhase.PROGRAM: (),  # `diagnose` takes the rules of the program
    RulePhase.SURROUNDINGS: (
        resources.idle_device,
        silent_faults.dirty_exit,
        failures.orphan_process,
        failures.retracted_hang,
        autograd.find_unused_needless,
        autograd.gradient_order_differs,
    ),
}
