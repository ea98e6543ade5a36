"""Small residual classifier with batch statistics shared over the data parallel group."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

_REGISTRY = {}


def register_model(fn):
    _REGISTRY[fn.__name__] = fn
    return fn


def create_model(name, **kwargs):
    return _REGISTRY[name](**kwargs)


class _GroupSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class CrossReplicaBatchNorm2d(nn.BatchNorm2d):
    """nn.SyncBatchNorm has no CPU kernel, this one does the same with sum and sum of squares."""

    def forward(self, x):
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(x)
        n = x.numel() / x.size(1)
        stats = torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), x.new_tensor([n])])
        stats = _GroupSum.apply(stats)
        s, sq, total = stats.split([self.num_features, self.num_features, 1])
        mean = s / total
        var = (sq / total - mean * mean).clamp_min(0.0)
        with torch.no_grad():
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(var.detach(), self.momentum)
            self.num_batches_tracked += 1
        x = (x - mean[None, :, None, None]) * torch.rsqrt(var + self.eps)[None, :, None, None]
        return x * self.weight[None, :, None, None] + self.bias[None, :, None, None]


def convert_bn(module):
    out = module
    if type(module) is nn.BatchNorm2d:
        out = CrossReplicaBatchNorm2d(module.num_features, module.eps, module.momentum)
        out.load_state_dict(module.state_dict())
    for name, child in module.named_children():
        out.add_module(name, convert_bn(child))
    return out


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.down = nn.Conv2d(cin, cout, 1, stride, bias=False) if stride != 1 or cin != cout else nn.Identity()

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNetTiny(nn.Module):
    def __init__(self, num_classes=10, width=8, drop_rate=0.0):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = BasicBlock(width, width, 1)
        self.layer2 = BasicBlock(width, width * 2, 2)
        self.drop = nn.Dropout(drop_rate)
        self.fc = nn.Linear(width * 2, num_classes)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(self.drop(x.mean((2, 3))))


@register_model
def resnet_tiny(**kwargs):
    return ResNetTiny(**kwargs)


@register_model
def resnet_tiny_w16(**kwargs):
    return ResNetTiny(width=16, **kwargs)
