import json
import os

DIGITS = 10


def write_prompts(path):
    rows = []
    for i in range(48):
        a, b = (7 * i + 3) % DIGITS, (5 * i + i // 7) % DIGITS
        rows.append({"id": i, "question": [a, b], "answer": str((a + b) % DIGITS)})
    rows[19]["answer"] = "n/a"
    rows[40]["answer"] = "twelve"
    with open(path, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)


def load_prompts(path, rank, world):
    prompts = []
    with open(path) as f:
        for line in f:
            row = json.loads(line)
            text = row["answer"]
            target = int(text) if text.isdigit() else -1
            prompts.append((row["question"], target))
    return prompts[rank::world]
