from dataclasses import asdict, dataclass


@dataclass
class DPOSettings:
    customer: str = "acme-legal"
    beta: float = 0.1
    lr: float = 5e-4
    epochs: int = 2
    batch_size: int = 8
    n_pairs: int = 96
    prompt_len: int = 8
    answer_len: int = 12
    vocab: int = 120
    ref_seed: int = 7
    cache_dir: str = "ref_cache"

    def reference_view(self):
        """The fields that influence the reference log-probabilities."""
        keep = ("customer", "n_pairs", "prompt_len", "answer_len", "vocab", "ref_seed")
        return {k: v for k, v in asdict(self).items() if k in keep}
