import torch.nn.functional as F


def multi_task(ctr_logit, cvr_logit, click, convert, weights):
    """CTR on all impressions, CVR on the clicked ones."""
    parts = {"ctr": F.binary_cross_entropy_with_logits(ctr_logit, click)}
    cvr = F.binary_cross_entropy_with_logits(cvr_logit, convert, reduction="none")
    parts["cvr"] = (cvr * click).sum() / click.sum().clamp(min=1)
    return sum(weights[name] * value for name, value in parts.items()), parts
