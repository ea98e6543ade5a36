CFG = {
    "seed": 12,
    "epochs": 4,
    "batch": 16,
    "lr": 0.2,
    "dataset": {"type": "captions", "size": 320, "kinds": 10},
    "model": {"type": "dual", "tokens": 30, "dim": 16},
    "hooks": [{"type": "clamp", "high": 3.0}, {"type": "text"}, {"type": "save", "folder": "work"}],
}
