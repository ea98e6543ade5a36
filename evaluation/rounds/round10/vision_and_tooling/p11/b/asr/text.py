import re

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
FILLERS = {"uh", "um", "hm", "eh"}


def encode(s):
    return [ALPHABET.index(c) + 1 for c in s]


def decode_greedy(frame_ids):
    out, prev = [], 0
    for i in frame_ids:
        if i != prev and i != 0:
            out.append(ALPHABET[i - 1])
        prev = i
    return "".join(out)


def normalise(s):
    """Lower case, letters only, no filler words: what the score is about."""
    words = re.sub("[^a-z ]", "", s.lower()).split()
    return [w for w in words if w not in FILLERS]
