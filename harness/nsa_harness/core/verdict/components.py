"""The strongly connected components of a graph: sets of nodes in which each node can be reached from each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def components(edges: Mapping[Node, Iterable[Node]]) -> dict[Node, int]:
    """Return the number of the component of each node. `edges` maps each node to its targets, which are nodes too.

    The time is proportional to the number of nodes and edges (Tarjan, Depth-first search and linear graph algorithms,
    SIAM J. Comput. 1, 1972).
    """
    number: dict[Node, int] = {}  # of each visited node, in the order of the search
    low: dict[Node, int] = {}  # the smallest number of an open node that is known to be reachable from the node
    component: dict[Node, int] = {}
    open_nodes: list[Node] = []  # visited nodes whose component is not known yet
    for start in edges:
        if start in number:
            continue
        number[start] = low[start] = len(number)
        open_nodes.append(start)
        path = [(start, iter(edges[start]))]
        while path:
            node, targets = path[-1]
            for target in targets:
                if target not in number:
                    number[target] = low[target] = len(number)
                    open_nodes.append(target)
                    path.append((target, iter(edges[target])))
                    break
                if target not in component:
                    low[node] = min(low[node], number[target])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == number[node]:
                    while node not in component:
                        component[open_nodes.pop()] = number[node]
    return component


def final_nodes(edges: Mapping[Node, Iterable[Node]]) -> set[Node]:
    """Return the nodes from which every reachable node leads back to them: no edge leaves their component."""
    component = components(edges)
    left = {component[node] for node in edges if any(component[target] != component[node] for target in edges[node])}
    return {node for node in edges if component[node] not in left}
