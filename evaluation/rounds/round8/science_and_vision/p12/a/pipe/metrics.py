import math


def psnr(pred, target):
    """Peak signal to noise ratio in dB, the peak being the range of the target."""
    peak = (target.max() - target.min()).item()
    mse = (pred - target).pow(2).mean().item()
    if peak <= 0 or mse <= 0:
        return None
    return 10 * math.log10(peak ** 2 / mse)


class PsnrMeter:
    def __init__(self):
        self.values = []

    def update(self, pred, target):
        for a, b in zip(pred, target):
            value = psnr(a, b)
            if value is not None:
                self.values.append(value)

    def pop(self):
        mean = sum(self.values) / max(1, len(self.values))
        self.values = []
        return mean
