from contextlib import nullcontext


class Accumulator:
    """Splits an optimizer step into micro batches; gradients are reduced once per step."""

    def __init__(self, model, micro_batches):
        self.model, self.micro_batches = model, micro_batches

    def _reduces(self, index):
        return (index + 1) % self.micro_batches == 0

    def backward(self, batches, loss_fn):
        total = 0.0
        for index, batch in enumerate(batches):
            context = nullcontext() if self._reduces(index) else self.model.no_sync()
            with context:
                loss = loss_fn(self.model, batch) / self.micro_batches
                loss.backward()
            total += loss.item()
        return total
