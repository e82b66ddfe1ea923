"""Draft graphs: the states that a round may pass through, and which of them are worth a place in its verification.

A node is a state of the block at a depth. The current block is at depth 0, and every draft step leads one depth
further. Alternatives of a step lead to different nodes, and two orders of the same reveals meet again in one:

    depth 0          depth 1            depth 2            depth 3
                   .- a _ c _ ---.
    a _ _ _ -------+             +----- a b c _ ---------- a b c d      complete: the opening state of the next
                   '- a b _ _ -+-'                                      block (see drafting.py) goes with it
                               '------- a b _ d

The *weight* of a node estimates the probability that decoding passes through it: the sum, over the steps that lead to
it, of the weight of the node before times the probability of the step. A node that is confirmed saves one forward, so
the C places of a verification go to the heaviest nodes. No node is heavier than the heaviest node before it, so that
with every node that has a place, a path to it has one too.
"""

from typing import NamedTuple

import torch

from .cached_forwards import Candidates
from .masks import CLEAN


class Nodes(NamedTuple):
    """Nodes of every row; one with weight 0 is padding.

    Attributes:
        blocks: tokens of the states, [R, N, B].
        weight: their weights, [R, N].
        depth: their depths, [R, N].
        source: which estimate of the logits their next step reads, [R, N].
    """

    blocks: torch.Tensor
    weight: torch.Tensor
    depth: torch.Tensor
    source: torch.Tensor

    def take(self, index: torch.Tensor) -> "Nodes":
        """Return the nodes with the given indices [R, n]."""
        blocks = self.blocks.gather(1, index[..., None].expand(-1, -1, self.blocks.shape[2]))
        return Nodes(blocks, *(field.gather(1, index) for field in self[1:]))

    def weighing(self, weight: torch.Tensor) -> "Nodes":
        """Return the nodes with other weights [R, N]."""
        return self._replace(weight=weight)

    def order(self) -> torch.Tensor:
        """Return the indices of the nodes by decreasing weight, the earlier first where weights are equal, [R, N]."""
        return self.weight.sort(dim=1, descending=True, stable=True).indices


def join(*nodes: Nodes) -> Nodes:
    """Concatenate the nodes of every row."""
    if len(nodes) == 1:
        return nodes[0]
    return Nodes(*(torch.cat(fields, dim=1) for fields in zip(*nodes, strict=True)))


def merged(nodes: Nodes, weight_before: torch.Tensor) -> Nodes:
    """Merge nodes with equal states, and put them in order of decreasing weight.

    The node that remains continues from the most likely of the steps that lead to it.

    Args:
        nodes: results of steps from nodes of one depth, one node per step.
        weight_before: weight of the node before each step, [R, N].
    """
    if nodes.weight.shape[1] == 1:
        return nodes
    order = nodes.order()
    nodes, weight_before = nodes.take(order), weight_before.gather(1, order)
    equal = (nodes.blocks[:, :, None] == nodes.blocks[:, None]).all(-1)  # [R, N, N]
    remains = ~equal.tril(-1).any(-1)
    total = (equal * nodes.weight[:, None]).sum(-1)
    bound = (equal * weight_before[:, None]).amax(-1)
    return nodes.weighing(torch.where(remains, torch.minimum(total, bound), 0.0))


class DraftGraph:
    """The heaviest nodes of every row, at most as many as one verification has places.

    The backbone's step on the node before a complete state gives the complete state itself, so a complete state is
    worth its place only together with the opening state of the next block. One such pair is kept per row, apart from
    the other nodes: the one with the heaviest complete state.

    Args:
        block: current block of every row, [R, B].
        rows: which rows take part, boolean [R].
        places: the most states C per row that one verification reads.
    """

    def __init__(self, block: torch.Tensor, rows: torch.Tensor, places: int) -> None:
        zero = torch.zeros_like(rows, dtype=torch.long)[:, None]
        self.places = places
        self.start = Nodes(block[:, None], rows.float()[:, None], zero, zero)  # the current block
        self.nodes = [self.start]  # nodes that may get a place, in pieces
        self.complete: list[Nodes] = []  # complete states that the opening state of the next block may follow

    def add(self, nodes: Nodes, settled: torch.Tensor, continues: torch.Tensor) -> Nodes:
        """Add the nodes of the next depth, and drop the lightest nodes if there are more than places.

        Args:
            nodes: the nodes.
            settled: which of them need no further step, boolean [R, N].
            continues: which of those the opening state of the next block may follow, boolean [R, N].

        Returns:
            The nodes that have a place and from which drafting may continue; the others have weight 0.
        """
        self.complete.append(nodes.weighing(torch.where(continues, nodes.weight, 0.0)))
        nodes = nodes.weighing(nodes.weight.masked_fill(settled, 0.0))
        self.nodes.append(nodes)
        width = sum(piece.weight.shape[1] for piece in self.nodes)
        if width <= self.places:
            return nodes
        everything = join(*self.nodes)
        order = everything.order()
        self.nodes = [everything.take(order[:, : self.places])]
        placed = order.argsort(1)[:, -nodes.weight.shape[1] :] < self.places
        return nodes.weighing(torch.where(placed, nodes.weight, 0.0))

    def chosen(self, mask_token_id: int) -> "ChosenNodes":
        """Choose the nodes that get a place: the heaviest and, if it is heavy enough, the heaviest complete state.

        Args:
            mask_token_id: id of [MASK].
        """
        nodes, complete = join(*self.nodes), join(*self.complete)
        nodes, complete = nodes.take(nodes.order()), complete.take(complete.order()[:, :1])
        # with the complete state goes the opening state: the two of them take the last two places
        heavier = (nodes.weight >= complete.weight).sum(1, keepdim=True)
        pair = (complete.weight > 0) & (heavier + 2 <= self.places)  # [R, 1]
        number = torch.arange(nodes.weight.shape[1], device=pair.device)
        others = nodes.weighing(nodes.weight.masked_fill(pair & (number + 2 >= self.places), 0.0))
        complete = complete.weighing(complete.weight * pair)
        placed = others.weight > 0
        count = placed.sum(1) + 2 * pair[:, 0]
        masked = ((others.blocks == mask_token_id) & placed[..., None]).sum()
        total_masked = masked + pair.sum() * complete.blocks.shape[2]
        size = CandidateCount(count.amax(), count.sum(), total_masked, pair.any())
        return ChosenNodes(others, complete, size)


class CandidateCount(NamedTuple):
    """How many nodes are candidates: scalars on the device, or their values.

    Attributes:
        most: candidates of the row with the most.
        total: candidates of all rows.
        masked: masked positions of all of them.
        crossing: whether any row has an opening state.
    """

    most: torch.Tensor | int
    total: torch.Tensor | int
    masked: torch.Tensor | int
    crossing: torch.Tensor | int


class ChosenNodes(NamedTuple):
    """The nodes of a graph that get a place; the others have weight 0.

    Attributes:
        others: nodes that are not complete, [R, N].
        complete: a complete state per row, [R, 1].
        size: how many there are, on the device.
    """

    others: Nodes
    complete: Nodes
    size: CandidateCount

    def candidates(self, size: CandidateCount, deepest: int, mask_token_id: int) -> Candidates:
        """Return the nodes as candidates.

        Args:
            size: their numbers, on the host.
            deepest: greatest depth of a node.
            mask_token_id: id of [MASK].
        """
        others, complete = self.others, self.complete
        opening = complete._replace(
            blocks=torch.full_like(complete.blocks, mask_token_id), depth=torch.zeros_like(complete.depth)
        )
        everything = join(others, complete, opening)
        order = everything.order()[:, : size.most]
        nodes = everything.take(order)
        # a complete state is a clean block to the opening state after it, and hidden from the states of its own block
        number = others.weight.shape[1]
        is_complete, is_opening = order == number, order == number + 1
        stream = torch.where(is_complete, CLEAN, torch.arange(1, order.shape[1] + 1, device=order.device))
        opens = is_opening & (nodes.weight > 0) if size.crossing else None
        totals = {"total_live": size.total, "total_masked": size.masked}
        return Candidates(nodes.blocks, nodes.weight > 0, stream, nodes.depth, deepest=deepest, opens=opens, **totals)
