import torch.distributed as dist

from channel import Channel


class LengthCurriculum:
    """Rank 0 decides about the next sequence length from its view of the validation loss."""

    def __init__(self, lengths, target):
        self.lengths, self.target, self.stage = lengths, target, 0
        self.channel = Channel("curriculum")

    @property
    def length(self):
        return self.lengths[self.stage]

    def update(self, val_loss):
        if dist.get_rank() == 0:
            if val_loss < self.target * (1 + 0.1 * self.stage) and self.stage + 1 < len(self.lengths):
                self.stage += 1
            self.channel.publish({"stage": self.stage, "val": round(val_loss, 4)})
        else:
            self.stage = self.channel.fetch()["stage"]
