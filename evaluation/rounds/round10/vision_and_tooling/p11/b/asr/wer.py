import numpy as np


def edit_distance(ref, hyp):
    d = np.arange(len(hyp) + 1)
    for i, r in enumerate(ref, 1):
        prev, d[0] = d[0], i
        for j, h in enumerate(hyp, 1):
            cur = min(d[j] + 1, d[j - 1] + 1, prev + (r != h))
            prev, d[j] = d[j], cur
    return int(d[-1])


def utterance_wer(ref, hyp):
    return edit_distance(ref, hyp) / len(ref)
