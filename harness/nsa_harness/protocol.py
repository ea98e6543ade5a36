"""The interface between nsa-harness and the training processes, such as the status file format.

This module is loaded by file path into the user's processes, so it uses only the standard library and Python 3.9.

The status file (in file names: board) is one memory-mapped file per process. The training threads write it, and another
process reads it without a lock. All integers are little-endian. Times are CLOCK_MONOTONIC nanoseconds, which are
comparable between the processes of one host.

    header   0 ..  256
    gaps   256 ..  384   longest pause after a progress event of each kind, one u64 per kind
    slots  384 .. 2432   SLOTS x 64 bytes, each for one writing thread and with a checksum
    steps       ..       STEPS ring of finished optimizer steps
    calls       ..       CALLS ring of collectives and store waits that were called from Python
    facts       ..       FACTS pairs of strings (name, value), such as the members of a process group
    nodes       ..       NODES lines of call stacks, each with the node of the line that called it
    totals      ..       TOTALS counts and hashes of all calls in a process group
    loaders     ..       LOADERS ring of DataLoaders, and how far the latest iterator of each is
    keys        ..       KEYS lines that set store keys, each with its latest key
    forwards    ..       FORWARDS ring of modules whose forward began
    strings     ..       append-only table: u16 length, UTF-8 bytes
"""

import struct

# Environment variables of a rank. Users do not set these, and a nested nsa-harness removes them.
ENV_RUN = "_NSA_HARNESS_RUN"  # tag of the attempt, which identifies every process of the run
ENV_PROBE_DIRECTORY = "_NSA_HARNESS_BOARDS"  # node-local probe directory: status files and the files below
ENV_PROBE = "_NSA_HARNESS_PROBE"  # one of the PROBE_ values; absent = full
ENV_OWNER = "_NSA_HARNESS_RANK_PID"  # pid of the process to which RANK belongs; its children ignore RANK
ENV_AGENT_STORE = "_NSA_HARNESS_AGENT_STORE"  # host:port of the store of torchrun's agent, which started this rank
ENV_SOLO = "_NSA_HARNESS_SOLO"  # the launch is a single process without RANK, which is rank 0
ENV_ANOMALY = "_NSA_HARNESS_ANOMALY"  # if present, switch on autograd's anomaly detection
ENV_CHECKPOINT_DEBUG = "_NSA_HARNESS_CHECKPOINT_DEBUG"  # if present, switch on gradient checkpointing's debug mode
# "on" or "off": record which lines of the program are executed; absent = only if it costs nothing, see COVERAGE_SINCE
ENV_COVERAGE = "_NSA_HARNESS_COVERAGE"
ENV_TRANSFERS = "_NSA_HARNESS_TRANSFERS"  # if present, record each transfer of a batch_isend_irecv call
ENV_GROWTH = "_NSA_HARNESS_GROWTH"  # if present, find the lines whose allocations grow
ENV_NO_VALUES = "_NSA_HARNESS_NO_VALUES"  # if present, read no values of the program's variables
ENV_FAULT = "_NSA_HARNESS_FAULT"  # JSON of the planted fault, absent without one
# JSON: {"values": true, "experiment": null}. If present, record the statements that the program executes.
ENV_RECORD = "_NSA_HARNESS_RECORD"
ENV_PREFIX = "_NSA_HARNESS_"

PROBE_OFF = "off"
PROBE_STATUS = "board"  # only progress events, collectives and the heartbeat
PROBE_FULL = "full"  # also health samples, the uncaught exception, stacks on a fatal signal, flight recorder at exit

# Files in the probe directory, all named by process id.
STATUS_FILE = "{pid}.board"
STACKS = "{pid}.stacks.txt"  # written by faulthandler on a fatal signal, or on the signal of STACKS_SIGNAL_OFFSET
RAISED = "{pid}.raised.json"  # the exception that ends the program
FLIGHT = "{pid}.flight.json"  # the flight recorder in torch's format (entries, pg_status), on request and at exit
HEALTH_SAMPLES = "{pid}.looks.jsonl"  # samples of parameters, losses and memory at some steps, one per line
COVERAGE = "{pid}.coverage"  # the program's lines in the order of their first execution, memory-mapped
VALUES = (
    "{pid}.values.json"  # values of the names on the stacks: on request, at an exception, and when the program leaves
)
TROUBLE = "{pid}.trouble.jsonl"  # parts of the probe that failed and were switched off, one per line
EXPERIMENT = "{pid}.experiment.jsonl"  # what an experiment changed in this process, one event per line
EXPERIMENT_VALUES = "experiment.values"  # the values that the reference rank of an experiment publishes
RECORDING = "{pid}.record"  # the statements that a process executed; see the end of this module
NCCL_DUMP = "nccl_trace_rank_{rank}"  # written by torch itself, in its pickled form, before it aborts a rank
SOCKET = "{pid}.sock"  # torch's worker server, which responds without the GIL
SOCKET_PATH_LIMIT = 107  # bytes of a path that fit into sockaddr_un

FLIGHT_HANDLER = "fr_trace_json"  # the worker server's handler: POST /handler/NAME

STACKS_SIGNAL_OFFSET = 7  # SIGRTMIN + 7: a real-time signal, sent only if SigCgt shows that the process handles it

U64 = struct.Struct("<Q")

MAGIC = b"NSABOARD"
LAYOUT = 3
LAYOUT_2 = 2  # fewer calls, without call stacks; no nodes, totals, loaders, keys, forwards and mode

HEADER_SIZE = 256
# magic, layout, size, pid, rank (-1 unknown), world_size (-1 unknown), padding, created_ns
IDENTITY = struct.Struct("<8sIIIiiIQ")
IDENTITY_AT = 0
HEARTBEAT = struct.Struct("<QI")  # time of the last heartbeat, number of the last answered request
HEARTBEAT_AT = 64
REQUEST = struct.Struct("<I")  # number of requests by the controller; the heartbeat thread then writes FLIGHT
REQUEST_AT = 80
END = struct.Struct("<QI")  # time of the orderly end, flags
END_AT = 96
END_RAISED = 1
END_ATEXIT = 2
COLLECTIVES = struct.Struct("<QQQ")  # enqueued, completed, time of the last change: sums over process groups
COLLECTIVES_AT = 128
STRINGS_USED = struct.Struct("<II")  # bytes used, entries
STRINGS_USED_AT = 160
LAST_LINE = struct.Struct("<I")  # string number: the main thread's innermost line outside torch at the last heartbeat
LAST_LINE_AT = 176
CLOCK = struct.Struct("<q")  # CLOCK_REALTIME minus CLOCK_MONOTONIC at creation; the recorder uses CLOCK_REALTIME
CLOCK_AT = 184
FACTS_USED = struct.Struct("<I")
FACTS_USED_AT = 192
DEVICE = struct.Struct("<QQQ")  # CUDA events recorded, events that the device has reached, time of the last reached
DEVICE_AT = 200
NODES_USED = struct.Struct("<I")
NODES_USED_AT = 224
MODE = struct.Struct("<I")  # MODE_ flags of the latest outermost forward; 0 = no forward so far
MODE_AT = 228
MODE_KNOWN = 1
MODE_TRAINING = 2
MODE_GRADIENTS = 4

# Kinds of progress events. The number is the index into the gap table: never renumber without a new LAYOUT.
KINDS = (
    "none",
    "start",  # the probe has started
    "imported",  # torch.distributed is imported
    "init",  # the default process group is up
    "data",  # a batch is being fetched
    "forward",  # a module's forward begins
    "backward",  # the backward pass reaches a module's output
    "optimizer",  # optimizer.step begins
    "step",  # optimizer.step is done
    "collective",  # a collective is called from Python
    "returned",  # a collective returned
    "raised",  # an uncaught exception
    "exit",  # interpreter exit
)
KIND = {name: number for number, name in enumerate(KINDS)}
VALUES_REQUEST = struct.Struct(
    "<I"
)  # number of requests by other processes, from 1; the heartbeat thread then writes VALUES
VALUES_REQUEST_AT = 232
VALUES_ANSWER = struct.Struct("<I")  # number of the last answered request, from 1; 0: this process reads no values
VALUES_ANSWER_AT = 236

GAPS_AT = HEADER_SIZE
GAP = struct.Struct("<Q")
GAP_COUNT = 16

SLOTS = 32
SLOT_SIZE = 64
SLOTS_AT = GAPS_AT + GAP_COUNT * GAP.size
# native thread id (0 = free), time, events so far, event, position, check = time ^ events ^ event ^ position.
# A thread has one slot for training events and one for all other events (calls, start, exit), so a collective or an
# exit does not hide the module in which it happened. `position` counts the process's training events in the step. A
# reader copies a slot without a lock, and recognises a slot that is only partly written by its wrong check.
SLOT = struct.Struct("<QQQQQQ")
# `event` packs the kind, the string number and the step into one number. Only the step is computed at each event.
EVENT_KIND_SHIFT = 48
EVENT_STRING_SHIFT = 32
EVENT_STRING_MASK = 0xFFFF
EVENT_STEP_MASK = 0xFFFFFFFF

STEPS = 256
# step (from 1, 0 = empty), time, parameters with a gradient when the optimizer began, training events in the step
STEP = struct.Struct("<QQII")
STEPS_AT = SLOTS_AT + SLOTS * SLOT_SIZE

CALLS = 1024
LAYOUT_2_CALLS = 256
# number (from 1, 0 = empty), time of the call, time of its return (0 = not returned), elements, step, position, string
# numbers of op, group, place, dtype and store key (or ""), flags, global rank of the peer (-1 = none), node of the call
# stack, native thread id (0 = unknown). A place is "file:line:function". A batch_isend_irecv call has its transfers
# instead of a store key, with ENV_TRANSFERS: "isend 1 8 float32;irecv 0 8 float32" (operation, peer, elements, dtype).
CALL = struct.Struct("<QQQQIIHHHHHBxiHxxI")
LAYOUT_2_CALL = struct.Struct("<QQQQIIHHHHHxxi")
CALL_GRADIENTS = 1  # gradients are enabled at the call
CALL_NO_GRADIENTS = 2  # with neither flag: unknown
CALL_HEAD = struct.Struct("<QQ")  # the first two fields of CALL
CALL_RETURNED_AT = 16
CALL_KEY_AT = 48
STRING_NUMBER = struct.Struct("<H")
# Prefix of an op that is a lasting wait for a store key or an asynchronous collective. Short waits are not written, so
# waits must not be counted or compared between ranks.
WAIT = "wait "
CALLS_AT = STEPS_AT + STEPS * STEP.size

FACTS = 128
FACT = struct.Struct("<HH")  # string numbers of a FACT_ name and its value
# Followed by the group's name. The value has the global ranks of its members: "0-3,6", or "0-12/4" for every fourth.
FACT_GROUP = "group "
FACT_BACKEND = "backend"  # the backend of the default process group: "gloo", "cpu:gloo,cuda:nccl"
FACT_MESH = "mesh"  # the value has the rank's coordinates: "dp=0 tp=1"
# Followed by a number. The value has the step, the type and the place: "3 ValueError run.py:30:forward".
FACT_CAUGHT = "caught "
# Followed by the same number. The value is overwritten: "1 0000000012 0000000057 0000000009". It has the number again,
# how often the exception was raised at this place, the latest step, and the node of the program's own lines.
FACT_CAUGHT_AGAIN = "again "
# Followed by the same number and the number of a handler. The value is "10 3.0 run.py:30:main". Its first digit is 1 if
# the exception was caught there and not raised again, the second digit is 1 if it had left a module's forward. Both
# digits are overwritten.
FACT_HANDLED = "handled "
FACT_STEPPED = "stepped from"  # the lines that called the optimizer, innermost first: "run.py:30:step < run.py:88:main"
CHAIN_JOIN = " < "
FACT_EXITED_FROM = "left from"  # the lines that called sys.exit or os._exit, innermost first
# Followed by a process id. The lines of the program that stopped this process with os.kill, innermost first.
FACT_STOPPED = "stopped "
STOP_SIGNALS = (19, 20, 21, 22)  # SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU
# The line that called a reentrant checkpoint for which no input requires a gradient.
FACT_CHECKPOINT_INPUT = "checkpoint without gradient"
# "none" until the program creates an optimizer of torch. Without an optimizer, no steps can be counted.
FACT_OPTIMIZER = "optimizer"
FACT_NODES = "autograd nodes"  # number of nodes in the first backward graph; NODES_LIMIT means that many or more
NODES_LIMIT = 50_000
FACTS_AT = CALLS_AT + CALLS * CALL.size

NODES = 4096
# string number of a place; number of the node that called it, which is smaller, 0 = none. Node 0 is an unknown stack.
NODE = struct.Struct("<HH")
NODES_AT = FACTS_AT + FACTS * FACT.size

TOTALS = 256
# string number of the group; calls so far, without transfers and waits; their hash, which is equal for equal calls in
# the same order; check = group ^ calls ^ hash. The hash is FNV-1a with 64 bits over the calls: (hash ^ call) *
# HASH_FACTOR, with call = (crc32(operation) << 32 ^ crc32(lines of its call stack, innermost first)) + elements. The
# elements are added only for EQUAL_SIZES.
TOTAL = struct.Struct("<QQQQ")
HASH_START, HASH_FACTOR, HASH_MASK = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1
# Operations whose sizes are equal on all ranks. In other operations sizes may differ: only the root of a scatter has
# the data, objects have any size, and all_to_all and (with NCCL) all_gather and reduce_scatter may be uneven.
EQUAL_SIZES = frozenset((
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "_all_gather_base", "all_gather_into_tensor",
    "all_gather_single", "_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single",
))  # fmt: skip
TOTALS_AT = NODES_AT + NODES * NODE.size

LOADERS = 64
# number (from 1, 0 = empty), batches of the latest iterator, iterators so far, node of the line that made it, ended
LOADER = struct.Struct("<QQIHBx")
LOADERS_AT = TOTALS_AT + TOTALS * TOTAL.size

KEYS = 32
# how often a line set a store key (0 = empty), time, node of this line, length of the latest key, the latest key
KEY_LIMIT = 124  # bytes of a key; a longer key is cut at its start
KEY = struct.Struct(f"<QQHH{KEY_LIMIT}s")
KEYS_AT = LOADERS_AT + LOADERS * LOADER.size

FORWARDS = 1024
# number (from 1, 0 = empty), its `event`, string number of the program's line that called it, native thread id
FORWARD = struct.Struct("<QQHxxI")
FORWARDS_AT = KEYS_AT + KEYS * KEY.size

STRINGS_AT = FORWARDS_AT + FORWARDS * FORWARD.size
# A string takes at least 3 bytes, so its number fits into 16 bits. String 0 is ""; it is also used if the table is
# full.
STRINGS_SIZE = 196608
STRING_LIMIT = 400  # bytes of one string; a longer one is cut
STRING_LENGTH = struct.Struct("<H")

STATUS_FILE_SIZE = STRINGS_AT + STRINGS_SIZE

# The coverage file has the format of a recording, with the records RECORD_STRING, RECORD_THREAD and RECORD_LINE.
# Python 3.12 executes a line more slowly ever after it was reported, because it does not restore the combined
# instruction at its start: a loop of pure Python takes 3 % more instructions (benchmarks/results/coverage_cost.json).
COVERAGE_SINCE = (3, 13)
COVERAGE_SIZE = 1 << 20  # room for about 26,000 lines
# The recording of a process is one memory-mapped file: a header, and then records until the first length of 0. A record
# is RECORD_HEAD with the length of its body and its kind, and the body. The body is written before the head, so a
# reader never sees a part of a record. The body of RECORD_STRING is UTF-8, and the string gets the next number, from 0.
# Every other body consists of signed 64-bit numbers. A value is four of them: the strings of its name, its type and its
# text, and its identity.
RECORDING_MAGIC = b"NSARECRD"
RECORDING_LAYOUT = 1
RECORDING_LIMIT = 64 << 20  # bytes of one file
# magic, layout, pid, version of Python (major, minor), rank and world_size (-1 unknown), flags
RECORDING_HEADER = struct.Struct("<8sIIIIiiI")
RECORDING_HEADER_SIZE = 64
# number of the DataLoader worker + 1 (0 = the process is a rank, -1 = another process), process id of the parent
RECORDING_CHILD = struct.Struct("<iI")
RECORDING_CHILD_AT = 40
RECORDING_FULL = 1  # flag: the file has reached its limit, or the disk is full
RECORDING_PROGRESS = struct.Struct("<Q")  # statements executed for the first time, and communications
RECORDING_PROGRESS_AT = 48
RECORD_HEAD = struct.Struct("<II")
RECORD_NUMBERS_LIMIT = 4096  # numbers in the body of a record

RECORD_STRING = 1
RECORD_CODE = 2  # number, strings of file and qualified name, first line
RECORD_THREAD = 3  # number, string of the name
RECORD_ENTER = 4  # activation, code, thread, order of the calling execution (0 = none), arguments
RECORD_EXECUTE = 5  # activation, order, line, whether values are recorded, values read
RECORD_WRITES = 6  # order of the execution, values assigned
RECORD_LEAVE = 7  # activation, whether it returned, strings of type and text of the result, its identity
RECORD_RAISED = 8  # order of the execution, strings of type and message
RECORD_HANDLED = 9  # order of the execution that raised
# order, order of the calling execution, string of the operation, root, peer, tag, string of the dtype, number of ranks,
# ranks, shape. RECORD_ABSENT stands for a missing number.
RECORD_COMMUNICATION = 10
RECORD_RETURNED = 11  # order of the communication, string of the type of the exception that left it
RECORD_DRAW = 12  # order of the execution, strings of the generator, its state before and its state after
RECORD_TRUNCATED = 13  # activation in which further executions are not recorded
RECORD_PROBLEM = 14  # string that says what is missing in the recording
RECORD_LINE = 15  # thread, string of the file, line, time of its first execution in the process
RECORD_ABSENT = -(2**62)
