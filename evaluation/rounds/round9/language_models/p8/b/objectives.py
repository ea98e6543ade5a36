import torch.nn.functional as F


def multi_task(ctr_logit, cvr_logit, click, convert, weights):
    """CTR on all impressions, CVR on the clicked ones."""
    parts = {"ctr": F.binary_cross_entropy_with_logits(ctr_logit, click)}
    clicked = click > 0
    if clicked.any():
        parts["cvr"] = F.binary_cross_entropy_with_logits(cvr_logit[clicked], convert[clicked])
    return sum(weights[name] * value for name, value in parts.items()), parts
