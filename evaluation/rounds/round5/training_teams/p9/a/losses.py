import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from gather import gather


class PairLoss(nn.Module):
    """Image to text retrieval over the texts of all ranks; rows without a caption do not count."""

    def __init__(self, temperature=0.1):
        super().__init__()
        self.log_t = nn.Parameter(torch.tensor(temperature).log())

    def forward(self, img, txt, has_caption):
        img, txt = F.normalize(img, dim=-1), F.normalize(txt, dim=-1)
        all_txt = gather(txt)
        logits = img @ all_txt.T / self.log_t.exp()
        target = dist.get_rank() * len(img) + torch.arange(len(img))
        rows = F.cross_entropy(logits, target, reduction="none")
        keep = has_caption.float()
        return (rows * keep).sum() / keep.sum().clamp(min=1)
