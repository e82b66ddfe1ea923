"""Draft graphs: which states get a place in a verification, and what the alternatives of a step save."""

import pytest
import torch
from decoding_calls import generate, random_prompts, sharp_head
from test_block_border import ABSENT

from modeling_mrp.draft_graph import CandidateCount, ChosenNodes, DraftGraph, Nodes, merged

MASK = 9


def nodes(*entries, depth=0):
    """Nodes of one row from pairs (tokens, weight)."""
    blocks = torch.tensor([[list(tokens) for tokens, _ in entries]])
    weight = torch.tensor([[weight for _, weight in entries]], dtype=torch.float)
    return Nodes(blocks, weight, torch.full(weight.shape, depth), torch.arange(weight.shape[1])[None])


def live(some: Nodes):
    """Tokens and weight of the nodes of the first row that are not padding."""
    weighed = zip(some.blocks[0].tolist(), some.weight[0].tolist(), strict=True)
    return [(tuple(tokens), round(weight, 6)) for tokens, weight in weighed if weight > 0]


def test_equal_states_become_one_node_with_the_sum_of_the_weights():
    steps = nodes(((1, MASK), 0.25), ((MASK, 2), 0.5), ((1, MASK), 0.125), ((3, MASK), 0.0))
    assert live(merged(steps, torch.ones(1, 4))) == [((MASK, 2), 0.5), ((1, MASK), 0.375)]


def test_a_merged_node_continues_from_the_likeliest_step_and_is_no_heavier_than_the_node_before():
    steps = nodes(((1, 2), 0.3), ((1, 2), 0.4))
    one = merged(steps, torch.tensor([[0.45, 0.6]]))
    assert live(one) == [((1, 2), 0.6)]
    assert one.source[0, 0] == 1


def no(count):
    return torch.zeros(1, count, dtype=torch.bool)


def graph_of(places, tokens=(1, MASK, MASK)):
    return DraftGraph(torch.tensor([tokens]), torch.tensor([True]), places)


def candidates_of(graph):
    chosen = graph.chosen(MASK)
    deepest = max(int(piece.depth.max()) for piece in graph.nodes)
    return chosen.candidates(CandidateCount(*map(int, chosen.size)), deepest, MASK)


def test_the_heaviest_nodes_of_all_depths_get_the_places():
    graph = graph_of(4)
    level = graph.add(nodes(((1, 2, MASK), 0.6), ((1, MASK, 3), 0.3), ((1, 4, MASK), 0.1), depth=1), no(3), no(3))
    assert live(level) == [((1, 2, MASK), 0.6), ((1, MASK, 3), 0.3), ((1, 4, MASK), 0.1)]
    level = graph.add(nodes(((1, 2, 5), 0.5), ((1, 6, 3), 0.05), depth=2), no(2), no(2))
    assert live(level) == [((1, 2, 5), 0.5)]
    candidates = candidates_of(graph)
    assert candidates.blocks[0].tolist() == [[1, MASK, MASK], [1, 2, MASK], [1, 2, 5], [1, MASK, 3]]
    assert candidates.depth[0].tolist() == [0, 1, 2, 1]
    assert candidates.live.all() and candidates.opens is None


def test_a_complete_state_takes_two_places_together_with_the_opening_state():
    graph = graph_of(4, (1, 2, MASK))
    graph.add(nodes(((1, 2, 3), 0.7), ((1, 2, 4), 0.3), depth=1), ~no(2), ~no(2))
    candidates = candidates_of(graph)
    assert candidates.blocks[0].tolist() == [[1, 2, MASK], [1, 2, 3], [MASK, MASK, MASK]]
    assert candidates.opens[0].tolist() == [False, False, True]
    assert candidates.stream[0].tolist() == [1, 0, 3]  # the complete state is a clean block


@pytest.mark.parametrize("places", [2, 3])
def test_a_complete_state_without_a_place_for_the_opening_state_gets_none_either(places):
    graph = graph_of(places)
    graph.add(nodes(((1, 2, MASK), 0.9), depth=1), no(1), no(1))
    graph.add(nodes(((1, 2, 3), 0.8), depth=2), ~no(1), ~no(1))
    assert int(graph.chosen(MASK).size.most) == 2
    assert candidates_of(graph).blocks[0].tolist() == [[1, MASK, MASK], [1, 2, MASK]]


def test_a_heavier_complete_state_of_a_later_depth_takes_the_opening_state_over():
    graph = graph_of(8)
    graph.add(nodes(((1, 2, MASK), 0.8), ((1, 5, 6), 0.1), depth=1), *2 * [torch.tensor([[False, True]])])
    graph.add(nodes(((1, 2, 3), 0.7), depth=2), ~no(1), ~no(1))
    candidates = candidates_of(graph)
    assert candidates.blocks[0].tolist() == [[1, MASK, MASK], [1, 2, MASK], [1, 2, 3], [MASK, MASK, MASK]]


def test_a_settled_state_that_ends_the_row_gets_no_place():
    graph = graph_of(8, (1, 2, MASK))
    graph.add(nodes(((1, 2, 3), 0.7), depth=1), ~no(1), no(1))
    assert int(graph.chosen(MASK).size.most) == 1


def test_with_every_state_a_state_before_it_has_a_place(tiny_model, monkeypatch):
    """Otherwise the walk over confirmed states could never reach it."""
    seen = []
    original = ChosenNodes.candidates
    monkeypatch.setattr(ChosenNodes, "candidates", lambda self, *a: (seen.append(original(self, *a)), seen[-1])[1])
    model = sharp_head(tiny_model(block_size=8))
    for prompt in random_prompts():
        generate(model, {"input_ids": torch.tensor([prompt])}, mrp_mode="spec", mrp_candidates=12, max_new_tokens=24)
    drafts = 0
    for candidates in seen:
        blocks, depth = candidates.blocks[0], candidates.depth[0]
        for index in (candidates.live[0] & (depth > 0)).nonzero()[:, 0]:
            kept = blocks == model.config.mask_token_id
            before = ((blocks == blocks[index]) | kept).all(-1) & (depth == depth[index] - 1) & candidates.live[0]
            assert before.any()
            drafts += 1
    assert drafts > 100, drafts


def test_alternatives_save_forwards_where_a_chain_of_as_many_states_breaks_off(tiny_model):
    model = sharp_head(tiny_model(block_size=8, initializer_range=0.1), scale=0.5)
    forwards = {}
    for name, options in {"chain": {"mrp_steps": 8}, "graph": {"mrp_candidates": 8}}.items():
        forwards[name] = 0
        for prompt in random_prompts():
            inputs = {"input_ids": torch.tensor([prompt])}
            _, output = generate(model, inputs, mrp_mode="spec", max_new_tokens=32, eos_token_id=ABSENT, **options)
            forwards[name] += int(output.stats.backbone_forwards)
    assert forwards["graph"] < forwards["chain"]


def test_all_drafts_of_a_depth_count_as_one_proposal(tiny_model):
    model = sharp_head(tiny_model(block_size=8))
    _, output = generate(
        model, {"input_ids": torch.arange(4, 9)[None]}, mrp_mode="spec", mrp_candidates=8, max_new_tokens=24
    )
    assert (output.stats.drafts_accepted <= output.stats.drafts_proposed).all()
    assert (output.stats.drafts_proposed <= output.stats.backbone_forwards[:, None]).all()
