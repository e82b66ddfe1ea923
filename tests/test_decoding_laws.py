"""The laws that every decoding mode keeps: spec is lossless, rows are independent, and forwards are counted."""

import pytest
import torch
from decoding_calls import SAMPLING, batch, generate, random_prompts, rows_without_padding, sharp_head
from plain_loop import plain_decode

RULES = {
    "low_confidence_static": {},
    "low_confidence_static-2": {"denoising_steps": 4},
    "low_confidence_dynamic": {"confidence_threshold": 0.35},
    "sequential": {"denoising_steps": 8},
    "entropy_bounded": {"eb_threshold": 1.5},
}


def options_of(rule):
    return {"remasking_strategy": rule.removesuffix("-2")} | RULES[rule]


@pytest.fixture(scope="module")
def prompts():
    return random_prompts()


# -- law 3: backbone-only decoding equals the plain loop


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_backbone_only_equals_the_plain_loop(tiny_model, prompts, rule, side):
    model = tiny_model(block_size=8)
    new, _ = generate(model, batch(prompts, side), **options_of(rule))
    options = options_of(rule)
    per_step = -(-8 // options.get("denoising_steps", 8))
    for prompt, row in zip(prompts, rows_without_padding(new), strict=True):
        expected = plain_decode(
            model, prompt, 13, rule=options["remasking_strategy"], tokens_per_step=per_step, threshold=0.35, bound=1.5,
            eos=(1, 7),
        )  # fmt: skip
        assert row == expected


def test_sampling_equals_the_plain_loop(tiny_model, prompts):
    model = tiny_model(block_size=8)
    torch.manual_seed(5)
    seed = torch.randint(2**62, ()).item()
    new, _ = generate(model, batch(prompts), do_sample=True, temperature=0.8, top_k=0)
    for prompt, row in zip(prompts, rows_without_padding(new), strict=True):
        assert row == plain_decode(model, prompt, 13, temperature=0.8, seed=seed, eos=(1, 7))


def test_reveal_steps_count_the_denoising_steps_of_each_block(tiny_model, prompts):
    """One token a step: the new tokens of a block carry the numbers 0, 1, 2, ... once each; the prompt has none."""
    inputs = batch(prompts)
    _, output = generate(tiny_model(block_size=8), inputs, eos_token_id=None)
    width = inputs["input_ids"].shape[1]
    assert (output.reveal_steps[:, :width] == -1).all()
    for prompt, steps in zip(prompts, output.reveal_steps[:, width:].tolist(), strict=True):
        blocks = [[s for i, s in enumerate(steps) if (len(prompt) + i) // 8 == b] for b in range(6)]
        for block in blocks[: (len(prompt) + 13) // 8]:  # a last block that is cut off may leave numbers out
            assert sorted(block) == list(range(len(block)))


# -- law 1: spec equals backbone-only decoding


@pytest.mark.parametrize("draft", ["head", "self"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampling"])
def test_spec_returns_the_tokens_of_backbone_only_decoding(tiny_model, prompts, rule, draft, sampling):
    model = sharp_head(tiny_model(block_size=8, initializer_range=0.15))
    inputs = batch(prompts)
    options = options_of(rule) | sampling
    expected, plain = generate(model, inputs, **options)
    accepted = 0
    for steps in (1, 2, 3, 5, 8):
        new, output = generate(model, inputs, mrp_mode="spec", mrp_steps=steps, mrp_draft=draft, **options)
        assert new.tolist() == expected.tolist(), f"K = {steps}"
        assert torch.equal(output.reveal_steps, plain.reveal_steps)
        accepted += output.stats.drafts_accepted.sum()
    assert accepted > 0


@pytest.mark.parametrize("share", [1, 2, 7])
@pytest.mark.parametrize("threshold", [None, 0.3])
def test_spec_is_lossless_for_every_way_of_drafting(tiny_model, prompts, share, threshold):
    model = sharp_head(tiny_model(block_size=8))
    inputs = batch(prompts)
    expected, _ = generate(model, inputs)
    options = {"mrp_mode": "spec", "mrp_steps": 8, "mrp_drafts_per_head_step": share, "mrp_draft_threshold": threshold}
    new, output = generate(model, inputs, **options)
    assert new.tolist() == expected.tolist()
    assert output.stats.backbone_forwards.sum() < generate(model, inputs)[1].stats.backbone_forwards.sum()


def test_spec_is_lossless_with_more_steps_than_masks(tiny_model, prompts):
    model = sharp_head(tiny_model(block_size=8))
    inputs = batch(prompts)
    expected, _ = generate(model, inputs)
    assert generate(model, inputs, mrp_mode="spec", mrp_steps=40)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("draft", ["head", "self"])
def test_token_acceptance_reveals_only_what_the_backbone_would_choose(tiny_model, prompts, draft):
    """With a floor of 1 only the backbone's own next step passes; with 0 any token that it would choose."""
    model = sharp_head(tiny_model(block_size=8))
    inputs = batch(prompts)
    expected, _ = generate(model, inputs)
    options = {"mrp_mode": "spec", "mrp_steps": 4, "mrp_draft": draft, "mrp_acceptance": "token"}
    strict, output = generate(model, inputs, mrp_acceptance_floor=1.0, **options)
    _, lossless = generate(model, inputs, **options | {"mrp_acceptance": "exact"})
    assert strict.tolist() == expected.tolist()
    assert output.stats.drafts_accepted.tolist() == lossless.stats.drafts_accepted.tolist()
    _, free = generate(model, inputs, mrp_acceptance_floor=0.0, **options)
    assert free.stats.backbone_forwards.sum() <= lossless.stats.backbone_forwards.sum()


# -- law 2: a row in a batch equals the row alone


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "mode",
    [
        {"mrp_mode": None},
        {"mrp_mode": "spec", "mrp_steps": 4},
        {"mrp_mode": "spec", "mrp_steps": 4, "mrp_draft": "self", "mrp_acceptance": "token"},
        {"mrp_mode": "direct", "mrp_steps": 2},
        {"mrp_mode": "remask", "confidence_threshold": 0.3},
        {"mrp_mode": "remask", "confidence_threshold": 0.3, "remask_criterion": "confidence"},
        {"mrp_mode": "remask", "confidence_threshold": 0.3, "remask_criterion": "residual", "remask_threshold": 0.1},
    ],
    ids=lambda mode: "-".join(str(value) for value in mode.values()),
)
@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampling"])
def test_a_row_in_a_padded_batch_equals_the_row_alone(tiny_model, prompts, side, mode, sampling):
    model = sharp_head(tiny_model(block_size=8), 0.2)
    together, output = generate(model, batch(prompts, side), **mode, **sampling)
    for index, prompt in enumerate(prompts):
        alone, own = generate(model, {"input_ids": torch.tensor([prompt])}, **mode, **sampling)
        width = alone.shape[1]
        assert together[index, :width].tolist() == alone[0].tolist()
        assert together[index, width:].eq(0).all()
        assert output.stats.backbone_forwards[index] == own.stats.backbone_forwards[0]
        assert output.stats.head_forwards[index] == own.stats.head_forwards[0]
        assert output.tokens_per_forward[index] == own.tokens_per_forward[0]


class RowCounter:
    """The rows of every forward of the backbone, counted in its mask: the tokens may be packed."""

    def __init__(self, module):
        self.rows = []
        self.handle = module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, inputs, options):
        self.rows.append(len(options["attention_mask"]["full_attention"]))


@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("mode", [None, "spec", "direct", "remask"])
def test_ended_rows_leave_the_batch_without_changing_the_others(tiny_model, prompts, mode, sampling):
    """Rows end after 2, 4, ... tokens; each is then what it is alone, and the last ones decode by themselves."""
    model = sharp_head(tiny_model(block_size=8), 0.2)
    limits = torch.tensor([2, 4, 40, 8, 21])
    width = max(map(len, prompts))
    options = {"mrp_mode": mode, "confidence_threshold": 0.3, "max_new_tokens": 40, "eos_token_id": None} | sampling
    counter = RowCounter(model.model)

    def at_limit(ids, scores, **_):
        return ids.shape[1] - width >= limits

    together, output = generate(model, batch(prompts), stopping_criteria=[at_limit], pad_token_id=0, **options)
    counter.handle.remove()
    assert counter.rows[0] == 5 and counter.rows[-1] == 1
    assert counter.rows == sorted(counter.rows, reverse=True)
    stats = output.stats
    for index, (prompt, limit) in enumerate(zip(prompts, limits.tolist(), strict=True)):
        alone, own = generate(model, {"input_ids": torch.tensor([prompt])}, **options)
        assert together[index, :limit].tolist() == alone[0, :limit].tolist()
        assert together[index, limit:].eq(0).all()
        steps = output.reveal_steps[index, width : width + limit]
        assert steps.tolist() == own.reveal_steps[0, len(prompt) : len(prompt) + limit].tolist()
        assert stats.tokens_by_head[index] + stats.tokens_by_backbone[index] == limit
        if limit == 40:  # the others stop before what they decode alone
            for name, value in vars(own.stats).items():
                assert getattr(stats, name)[index].tolist() == value[0].tolist(), name


# -- law 4: a head of zeros changes nothing


def test_direct_with_a_head_of_zeros_reveals_from_stale_logits(tiny_model, prompts):
    """Backbone step and K head steps on unchanged logits: the K + 1 most confident tokens of the state at once."""
    model = tiny_model(block_size=8)
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    inputs = batch(prompts)
    direct, _ = generate(model, inputs, mrp_mode="direct", mrp_steps=1)
    stale, _ = generate(model, inputs, denoising_steps=4)
    assert direct.tolist() == stale.tolist()


def test_spec_with_a_head_of_zeros_is_self_drafting(tiny_model, prompts):
    model = tiny_model(block_size=8)
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    inputs = batch(prompts)
    head, with_head = generate(model, inputs, mrp_mode="spec", mrp_steps=4)
    own, without = generate(model, inputs, mrp_mode="spec", mrp_steps=4, mrp_draft="self")
    assert head.tolist() == own.tolist() == generate(model, inputs)[0].tolist()
    assert with_head.stats.backbone_forwards.tolist() == without.stats.backbone_forwards.tolist()
    assert with_head.stats.head_forwards.sum() > 0 == without.stats.head_forwards.sum()


# -- law 5: every forward is counted


class ForwardCounter:
    """Counts the calls of a module and the tokens of each row that the calls carry."""

    def __init__(self, module):
        self.calls = 0
        self.handle = module.register_forward_hook(self._count)

    def _count(self, *_):
        self.calls += 1


@pytest.mark.parametrize("mode", [None, "spec", "direct", "remask"])
def test_every_forward_is_in_the_statistics(tiny_model, prompts, mode):
    model = sharp_head(tiny_model(block_size=8), 0.2)
    for prompt in prompts:
        backbone, head = ForwardCounter(model.model), ForwardCounter(model.mrp_head)
        inputs = {"input_ids": torch.tensor([prompt])}
        new, output = generate(model, inputs, mrp_mode=mode, confidence_threshold=0.3)
        backbone.handle.remove(), head.handle.remove()
        assert output.stats.backbone_forwards.tolist() == [backbone.calls]
        assert output.stats.head_forwards.tolist() == [head.calls]
        assert output.stats.prefill_forwards.tolist() == [int(len(prompt) >= 8)]
        tokens = len(rows_without_padding(new)[0])
        assert output.stats.tokens_by_backbone + output.stats.tokens_by_head == tokens
        assert output.tokens_per_forward.tolist() == pytest.approx([tokens / backbone.calls])


def test_static_decoding_takes_one_forward_per_token_and_none_to_store(tiny_model):
    model = tiny_model(block_size=8)
    prompt = torch.arange(4, 12)[None]
    _, output = generate(model, {"input_ids": prompt}, max_new_tokens=24, eos_token_id=None)
    assert output.stats.backbone_forwards.tolist() == [24]
