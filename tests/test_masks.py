"""The attention rule against a slow version of it, token by token."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from modeling_mrp import masks
from modeling_mrp.masks import CLEAN, PADDING, TokenLayout, attention_mask, join, segment_positions, stream_layout


def plain_row(length, size, segment=None):
    segment = torch.zeros(1, length, dtype=torch.long) if segment is None else segment
    return stream_layout(segment, segment_positions(segment), size, stream=CLEAN, context=CLEAN)


def dense(q, k=None):
    return attention_mask(q, k or q, "sdpa", torch.float32)[:, 0]


def test_a_plain_row_is_block_causal():
    for size, length in ((1, 5), (3, 8), (4, 4), (8, 5)):
        expected = [[k // size <= q // size for k in range(length)] for q in range(length)]
        assert dense(plain_row(length, size))[0].tolist() == expected


def test_a_block_size_of_one_is_causal():
    assert torch.equal(dense(plain_row(6, 1))[0], torch.ones(6, 6).tril().bool())


def test_noisy_streams_see_earlier_clean_blocks_and_themselves():
    """[x_t | x_1 | x_0]: the clean stream is block causal, no noisy stream sees another."""
    size, length = 4, 10
    segment = torch.zeros(1, length, dtype=torch.long)
    positions = segment_positions(segment)
    streams = [1, 2, CLEAN]
    tokens = join([stream_layout(segment, positions, size, stream, CLEAN) for stream in streams])
    visible = dense(tokens)[0]
    for q in range(3 * length):
        for k in range(3 * length):
            (q_stream, q_at), (k_stream, k_at) = divmod(q, length), divmod(k, length)
            same = q_stream == k_stream and q_at // size == k_at // size
            clean = k_stream == 2 and k_at // size < q_at // size
            assert visible[q, k] == (same or clean)


def test_nothing_crosses_a_segment_and_blocks_count_from_its_start():
    segment = torch.tensor([[4, 4, 4, 4, 4, 9, 9, 9, PADDING, PADDING]])
    visible = dense(plain_row(10, 2, segment))[0]
    starts = {4: 0, 9: 5}
    for q in range(8):
        for k in range(8):
            own, other = segment[0, q].item(), segment[0, k].item()
            expected = own == other and (k - starts[own]) // 2 <= (q - starts[own]) // 2
            assert visible[q, k] == expected
    assert not visible[:8, 8:].any() and not visible[8:, :8].any()
    assert visible.any(-1).all()  # no row is empty, padding included: a softmax over nothing is NaN


def test_segment_positions_count_runs():
    segment = torch.tensor([[7, 7, 7, 2, 2, -1, -1], [-1, -1, 0, 0, 0, 0, 5]])
    assert segment_positions(segment).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 0]]
    assert segment_positions(torch.zeros(1, 1, dtype=torch.long)).tolist() == [[0]]


def random_tokens(rows, length, seed, shadows):
    generator = torch.Generator().manual_seed(seed)
    low_high = [(-2, 2), (0, 4), (-2 if shadows else 0, 3), (0, 3), *([(0, 4)] if shadows else [])]
    return TokenLayout(*(torch.randint(low, high, (rows, length), generator=generator) for low, high in low_high))


@pytest.mark.parametrize("shadows", [False, True])
def test_all_attention_implementations_get_the_same_mask(shadows):
    q, k = random_tokens(3, 17, 0, shadows), random_tokens(3, 29, 1, shadows)
    visible = attention_mask(q, k, "sdpa", torch.float32)
    assert visible.shape == (3, 1, 17, 29) and visible.dtype == torch.bool
    for row in range(3):
        for i in range(17):
            for j in range(29):
                a, b = (t.map(lambda field, at=at, row=row: field[row, at].item()) for t, at in ((q, i), (k, j)))
                if a[2] < 0:
                    own = a[1] == b[1] and b[2] == (a[2] if a[4] == b[4] else -a[2])
                else:
                    own = a[1] == b[1] and a[2] == b[2]
                context = b[2] == a[3] and b[1] < a[1]
                assert visible[row, 0, i, j] == (a[0] == b[0] and (own or context))
    for dtype in (torch.float32, torch.bfloat16):
        additive = attention_mask(q, k, "eager", dtype)
        assert additive.dtype == dtype and torch.equal(additive == 0, visible)
        assert additive[~visible].eq(torch.finfo(dtype).min).all()
    block_mask = attention_mask(q, k, "flex_attention", torch.float32)
    rows, queries, keys = (torch.arange(n) for n in (3, 17, 29))
    mod = block_mask.mask_mod(rows[:, None, None], 0, queries[None, :, None], keys[None, None])
    assert torch.equal(mod[:, None], visible)


SIZES = [(2, 256, 256), (3, 300, 300), (1, 128, 700), (1, 700, 128), (5, 1, 1), (4, 200, 840), (2, 129, 129)]


@pytest.mark.parametrize("shadows", [False, True])
@pytest.mark.parametrize(("rows", "queries", "keys"), SIZES)
def test_tiles_equal_those_that_pytorch_computes(rows, queries, keys, shadows):
    q, k = (random_tokens(rows, length, seed, shadows) for seed, length in enumerate((queries, keys)))
    for tokens in (q, k):
        tokens.segment[:, 128:] = 0  # some tiles are seen whole, some in part, some not at all
        tokens.stream[:, 128:] = 1
        tokens.block[:, 128:] = torch.arange(max(0, tokens.block.shape[1] - 128)) // 256
    ours = attention_mask(q, k, "flex_attention", torch.float32)
    theirs = create_block_mask(ours.mask_mod, rows, None, queries, keys, device="cpu")
    assert ours.shape == theirs.shape
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        ours_now, theirs_now = getattr(ours, name), getattr(theirs, name)
        assert torch.equal(ours_now, theirs_now) and ours_now.dtype == theirs_now.dtype, name


@pytest.mark.parametrize("shadows", [False, True])
def test_masks_of_many_shapes_share_at_most_two_compiled_graphs(monkeypatch, shadows):
    """torch.compile stops compiling after 8 graphs, and the mask is dense from then on.

    It once made an extra graph for a single row, for a single tile, and for queries that are also the keys, so a few
    batches of different sizes used up the limit.
    """
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(masks, "_pairs_per_tile", masks.compiled_pairs_per_tile.__wrapped__())
    for rows, queries, keys in SIZES:
        q, k = random_tokens(rows, queries, 0, shadows), random_tokens(rows, keys, 1, shadows)
        attention_mask(q, q, "flex_attention", torch.float32)
        with torch.no_grad():
            attention_mask(q, k, "flex_attention", torch.float32)
    assert 1 <= len(graphs) <= 2


def test_an_unknown_attention_implementation_is_refused():
    tokens = plain_row(4, 2)
    with pytest.raises(ValueError, match="attn_implementation must be .*'flash_attention_2'"):
        attention_mask(tokens, tokens, "flash_attention_2", torch.float32)
