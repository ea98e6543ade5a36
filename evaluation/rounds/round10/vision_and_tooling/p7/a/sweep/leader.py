from .space import RandomSearch, key_of


class Leader:
    """Runs on the first rank of a group: draws trials and remembers what they scored."""

    def __init__(self, board, seed):
        self.board = board
        self.search = RandomSearch(seed)
        self.scores = {}

    def next_trial(self, trial):
        params = self.search.ask()
        for _ in range(50):
            if key_of(params) not in self.scores:
                break
            params = self.search.ask()
        self.board.publish(trial, params)
        return params

    def report(self, params, score):
        key = key_of(params)
        self.scores[key] = min(score, self.scores.get(key, score))

    def best(self):
        key = min(self.scores, key=self.scores.get)
        return self.scores[key], key
