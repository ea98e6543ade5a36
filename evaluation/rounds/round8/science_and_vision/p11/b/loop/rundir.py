from datetime import datetime


def make_run_dir(root, rank):
    """runs/<date>_<time>: a fresh folder for each launch."""
    path = root / datetime.now().strftime("%Y%m%d_%H%M%S_%f")
    path.mkdir(parents=True, exist_ok=True)
    return path
