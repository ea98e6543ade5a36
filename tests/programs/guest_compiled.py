"""A compiled step with a collective in its graph: how many operations, graphs, breaks and recompilations it takes."""

import torch
import torch.distributed as dist
from torch import nn

OPERATIONS: list[int] = []


def count(graph: torch.fx.GraphModule, _inputs: object) -> object:
    OPERATIONS.append(len(list(graph.graph.nodes)))
    return graph.forward


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        mean = loss.detach() + 0
        dist.all_reduce(mean)
        return loss + 0 * mean

    compiled = torch.compile(loss_of, backend=count)
    for _ in range(3):
        loss = compiled(torch.ones(2, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    counters = torch._dynamo.utils.counters
    print(OPERATIONS, dict(counters["graph_break"]), dict(counters["recompiles"]), counters["stats"]["unique_graphs"])
    print(loss.item().hex())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
