"""Writes small impression logs, one file a market."""
import os
import random

WORDS = {
    "us": ["red shoes", "garden chair", "phone case", "coffee mug"],
    "uk": ["wellies", "tea kettle", "umbrella black", "jumper"],
    "zd_de": ["Stühle für Gärten", "Käsemesser", "Schlüsselbund", "Tasse weiß"],
    "ze_fr": ["théière émaillée", "chaussures été", "évier", "crème brûlée set"],
}


def write_logs(root, markets, lines, seed):
    for m in markets:
        rng = random.Random("%s-%d" % (m, seed))
        with open(os.path.join(root, m + ".tsv"), "w", encoding="utf-8", newline="\n") as f:
            for _ in range(lines):
                k = rng.randrange(4)
                user, item = rng.randrange(600), rng.randrange(300)
                p = 0.15 + 0.15 * k + (0.2 if (user + item) % 3 == 0 else 0.0)
                f.write("%d\t%s%05d\t%d\t%s\t%.2f\n" % (
                    rng.random() < p, m[:2], user, item, WORDS[m][k], 5 + 95 * rng.random()))
