import copy


class EarlyStopping:
    """Keeps the weights of the best epoch and says when to stop."""

    def __init__(self, patience, min_delta=1e-3):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.best_epoch, self.weights = float("-inf"), -1, None

    def on_validation(self, epoch, value, module):
        if value > self.best + self.min_delta:
            self.best, self.best_epoch = value, epoch
            self.weights = copy.deepcopy(module.state_dict())
        return epoch - self.best_epoch >= self.patience


class History:
    def __init__(self):
        self.rows = []

    def on_validation(self, epoch, value, module):
        self.rows.append((epoch, round(value, 4)))
        return False
