"""Define the answer to why the ranks of a recorded run took different ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.report import Place

RETURNED = "return"  # name of the value that a function returned


class OriginKind(StrEnum):
    """The kind of statement or event that made a value differ between the ranks."""

    RANK = "rank"  # the number of the rank, of its host or of its device
    ENVIRONMENT = "environment"  # an environment variable
    FILE = "file"  # the content or the existence of a file
    LENGTH = "length"  # the length of a dataset, loader or shard
    RANDOM = "random"  # a random draw
    CLOCK = "clock"
    HASH_ORDER = "hash_order"  # the order of a set or of hashes of strings
    LEAK = "leak"  # a call that only some ranks make changes state that outlives the call
    MISSING_REDUCTION = "missing_reduction"  # a value computed from this rank's own data, never made equal
    PEER_VALUE = "peer_value"  # a value received from another rank
    OTHER_RANKS_FILE = "other_ranks_file"  # a file that another rank wrote or removed
    RESTORED_STATE = "restored_state"  # state loaded from a checkpoint
    STALE_PARAMETERS = "stale_parameters"  # parameters made after those of the model were collected to make them equal
    EARLY_COPY = "early_copy"  # a copy of a model, made before the weights were made equal
    UNSYNCHRONIZED = "unsynchronized"  # a backward pass whose gradients DDP does not average
    DISCARDED_RESULT = "discarded_result"  # a collective on a copy, which nothing uses afterwards
    SKIPPED_COLLECTIVE = "skipped_collective"  # a condition that skipped a collective on all ranks
    EXCEPTION = "exception"  # an exception that only some ranks raised
    CALL = "call"  # a call that only some ranks make
    LEFT_OUT = "left_out"  # a function that ended before a call for which a thread waits
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class RankValues:
    """A name and its value on each rank at the same point of the program. A rank without a value is left out."""

    name: str
    values: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Division:
    """The statement after which ranks took different ways."""

    place: Place
    occurrence: int  # the number of this execution among the rank's executions of the statement, from 1
    ways: tuple[tuple[tuple[int, ...], Place | None], ...]  # ranks, and their next statement; None: they ended here
    condition: str  # source text of the condition, iterable or call; "" if there is none
    values: tuple[RankValues, ...]  # the values that decide
    step: int | None = None  # the training step, counted by optimizer steps, from 1


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A source line that may have to change."""

    place: Place
    kind: OriginKind
    ranks: tuple[int, ...]  # the ranks that differ from the majority, or from rank 0
    name: str = ""  # the variable or attribute that first differs, such as "stopper.bad"; "" if there is none
    occurrence: int = 1
    values: tuple[RankValues, ...] = ()
    chain: tuple[tuple[Place, str], ...] = ()  # from the origin to the division: lines, and the name assigned there
    is_provable: bool = True  # False: this line is the effect of a difference before it, whatever an experiment shows
    caller: Place | None = None  # for a leak: the statement that only some ranks executed


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why the ranks took different ways. `candidates` has the most likely line first and may be empty."""

    candidates: tuple[Candidate, ...]
    division: Division | None
    ends: tuple[tuple[tuple[int, ...], Place | None, str], ...]  # ranks, where they stopped, and the operation there
    notes: tuple[str, ...] = ()  # codes of what limits the answer: "truncated", "no_difference", "one_rank"


@dataclass(frozen=True, kw_only=True)
class SilentDifference:
    """Replicas of a model that differ between the ranks of a run that passed, as a finding of the run says."""

    kind: str  # how the ranks at fault were found, or the kind of the replica: `identified_by` of the finding
    names: tuple[str, ...] = ()  # parameters that differ


class ExperimentKind(StrEnum):
    """The kind of change that an experiment makes in a further run. Experiments are tried in this order."""

    UNDO_LEAK = "undo_leak"  # restore the value, or the state of the generators, that only the extra call changed
    FIX_HASH_SEED = "fix_hash_seed"  # set PYTHONHASHSEED, so that sets have the same order on all ranks
    SHARE_GENERATOR = "share_generator"  # give all ranks the generator state of one rank
    EQUAL_LENGTH = "equal_length"  # cut a sequence of all ranks to the length that it has on one rank
    SET_VALUE = "set_value"  # give all ranks the value of one rank
    SHARE_EXCEPTION = "share_exception"  # raise the exception of one rank on all ranks
    FORCE_BRANCH = "force_branch"  # let all ranks go the way of one rank; at the division, this proves no origin


@dataclass(frozen=True, kw_only=True)
class PlannedExperiment:
    """A change to one value, generator or branch of a run, which shows whether a candidate is the origin."""

    kind: ExperimentKind
    candidate: int  # index in `Explanation.candidates`
    place: Place  # the statement at which the change is made
    name: str = ""  # the variable or attribute that is set; "" if there is none
    occurrence: int = 1  # the first execution of the statement at which the change is made
    is_of_decision: bool = False  # the change is made at no candidate of the explanation, so it cannot exclude one
    proves_origin: bool = True  # False: success proves only the decision, and not where the difference comes from
    origin: Candidate | None = None  # the candidate that a success proves, if it is not `candidate`
    # The value of "experiment" in _NSA_HARNESS_RECORD, for the interventions in the ranks.
    instruction: Mapping[str, object]
    env: tuple[tuple[str, str], ...] = ()  # environment variables of the run, in addition


class ExperimentResult(StrEnum):
    """The result of the run of an experiment."""

    WENT_ON = "went_on"  # every rank got past the point of the failure, or to its end
    SECOND_CAUSE = "second_cause"  # every rank got past the point, and then the ranks stopped somewhere else
    FAILED = "failed"  # the ranks took different ways nevertheless
    RACE = "race"  # the ranks got past the point although nothing was changed, so the failure depends on chance
    INCONCLUSIVE = "inconclusive"  # the run ended in another way, perhaps because of the change
    NOT_MADE = "not_made"  # the change could not be made, or the recording does not show whether it was made
