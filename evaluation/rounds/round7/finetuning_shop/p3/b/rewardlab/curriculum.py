class Curriculum:
    """Raises the admitted difficulty linearly from start to 1.0."""

    def __init__(self, start, total_steps):
        self.start = start
        self.total_steps = total_steps

    def level(self, step):
        f = min(1.0, step / max(1, self.total_steps - 1))
        return self.start + (1.0 - self.start) * f


class CurriculumBatches:
    def __init__(self, pool, curriculum, batch_size):
        self.pool = pool
        self.curriculum = curriculum
        self.batch_size = batch_size
        self.cursor = 0

    def draw(self, step):
        level = self.curriculum.level(step)
        batch = []
        while len(batch) < self.batch_size:
            pair = self.pool[self.cursor % len(self.pool)]
            self.cursor += 1
            if pair.difficulty <= level:
                batch.append(pair)
        return batch
