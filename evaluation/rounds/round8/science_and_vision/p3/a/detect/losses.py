import torch
import torch.distributed as dist
import torch.nn.functional as F


class DetectionLoss:
    def __init__(self, cells, size=32.0, box_weight=2.0):
        self.cells, self.size, self.box_weight = cells, size, box_weight

    def assign(self, boxes, shape):
        obj = torch.zeros(shape[0], self.cells, self.cells)
        reg = torch.zeros(shape[0], 4, self.cells, self.cells)
        for b, bx in enumerate(boxes):
            if len(bx) == 0:
                continue
            c = ((bx[:, :2] + bx[:, 2:]) / 2 / self.size * self.cells).long().clamp(0, self.cells - 1)
            obj[b, c[:, 1], c[:, 0]] = 1
            reg[b, :, c[:, 1], c[:, 0]] = (bx / self.size).T
        return obj, reg

    def __call__(self, pred, boxes):
        obj, reg = self.assign(boxes, pred.shape)
        count = obj.sum().reshape(1)
        dist.all_reduce(count)
        count = (count / dist.get_world_size()).clamp(min=1.0)
        cls = F.binary_cross_entropy_with_logits(pred[:, 0], obj, reduction="sum") / count
        box = (F.l1_loss(pred[:, 1:], reg, reduction="none") * obj[:, None]).sum() / count
        total = (cls + self.box_weight * box).squeeze()
        return total, {"total": total.item(), "cls": cls.item(), "box": box.item()}
