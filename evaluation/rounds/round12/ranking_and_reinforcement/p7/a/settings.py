CFG = {
    "folder": "work",
    "log": "work/purchases.csv",
    "window": 4,
    "batch": 6,
    "dim": 16,
    "lr": 0.3,
    "epochs": 2,
    "seed": 2,
}
