"""`generate` as users of transformers know it: streamers, criteria, processors, scores and statistics."""

import time

import pytest
import torch
import transformers
from golden_values import load_golden
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MaxTimeCriteria, PreTrainedTokenizerFast, StoppingCriteria, TextStreamer
from transformers.generation.streamers import BaseStreamer

from modeling_mrp import MRPGenerateOutput

PROMPT = torch.tensor([[5, 6, 7]])
MODES = {
    "backbone": {"mrp_mode": None},
    "spec": {"mrp_mode": "spec", "mrp_steps": 4},
    "self": {"mrp_mode": "spec", "mrp_steps": 4, "mrp_draft": "self"},
    "token": {"mrp_mode": "spec", "mrp_steps": 4, "mrp_acceptance": "token", "mrp_acceptance_floor": 0.0},
    "direct": {"mrp_mode": "direct", "mrp_steps": 2},
    "remask": {"mrp_mode": "remask", "confidence_threshold": 0.3},
    "remask-confidence": {"mrp_mode": "remask", "confidence_threshold": 0.3, "remask_criterion": "confidence"},
    "remask-residual": {
        "mrp_mode": "remask",
        "confidence_threshold": 0.3,
        "remask_criterion": "residual",
        "remask_threshold": 0.5,
    },
    "remask-backbone": {
        "mrp_mode": "remask",
        "confidence_threshold": 0.3,
        "remask_criterion": "backbone",
        "remask_threshold": 0.8,
    },
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@pytest.fixture
def model(tiny_model):
    """Block 8; the head's residuals are small against the logits, so that drafts are sometimes right."""
    model = tiny_model(block_size=8)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return model


@pytest.fixture
def batch():
    """Prompts of 3, 8 and 12 tokens, left-padded."""
    generator = torch.Generator().manual_seed(1)
    ids, mask = torch.zeros(3, 12).long(), torch.zeros(3, 12).long()
    for row, length in enumerate((3, 8, 12)):
        ids[row, -length:] = torch.randint(4, 61, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, **options):
    options = {"max_new_tokens": 20, "eos_token_id": None} | options
    return model.generate(**inputs, **options, return_dict_in_generate=True)


class Recorder(BaseStreamer):
    """Keeps what a streamer receives, in order."""

    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(("put", value.clone()))

    def end(self):
        self.events.append(("end", None))

    def values(self, kind):
        return [value for name, value in self.events if name == kind]


class DraftRecorder(Recorder):
    def put_draft(self, value, **kwargs):
        self.events.append(("draft", value.clone()))


# -- golden decoding


@pytest.mark.parametrize("mode", [None, "spec"])
def test_the_golden_sequence(golden_folder, mode):
    model, golden = load_golden(golden_folder)
    prompt, sequence = golden["greedy.prompt"], golden["greedy.sequence"]
    count = len(sequence) - len(prompt)
    new = model.generate(prompt[None], max_new_tokens=count, eos_token_id=None, mrp_mode=mode)
    assert new[0].tolist() == sequence.tolist()


def test_the_golden_reveal_order(golden_folder):
    """One token a step, seen through the drafts: the position that changes between one and the next."""
    model, golden = load_golden(golden_folder)
    prompt, sequence, mask = golden["greedy.prompt"], golden["greedy.sequence"], model.config.mask_token_id
    streamer, row = DraftRecorder(), [mask] * len(sequence)
    row[: len(prompt)] = prompt.tolist()
    count = len(sequence) - len(prompt)
    model.generate(prompt[None], max_new_tokens=count, eos_token_id=None, mrp_mode=None, streamer=streamer)
    order, done = [], 0
    for kind, value in streamer.events:
        if kind == "draft":
            shown = row[:done] + value[0].tolist()
        elif kind == "put":
            done += value.numel()
            shown = row[: done - value.numel()] + value.flatten().tolist()
        changed = [at for at in range(len(prompt), len(shown)) if kind != "end" and shown[at] != row[at]]
        assert len(changed) <= 1
        for at in changed:
            assert row[at] == mask
            row[at] = shown[at]
            order.append(at)
    assert row == sequence.tolist()
    assert order == golden["greedy.reveal_order"].tolist()


# -- streamers


@every_mode
def test_a_streamer_sees_the_columns_in_order(model, mode):
    streamer = Recorder()
    output = generate(model, {"input_ids": PROMPT}, streamer=streamer, **mode)
    prompt, *tokens = streamer.values("put")
    assert prompt.tolist() == PROMPT.tolist()
    assert all(token.shape == (1,) for token in tokens)
    assert torch.cat(tokens).tolist() == output.sequences[0, 3:].tolist()
    assert [kind for kind, _ in streamer.events].count("end") == 1 and streamer.events[-1][0] == "end"


def test_a_streamer_of_a_batch_gets_a_column_once_every_row_has_it(model, batch):
    streamer = Recorder()
    output = generate(model, batch, streamer=streamer, mrp_mode="spec")
    columns = torch.stack(streamer.values("put")[1:], dim=1)
    assert torch.equal(columns, output.sequences[:, 12:])


@every_mode
def test_drafts_show_the_block_in_progress(model, mode):
    """Every draft continues what was put: its revealed tokens, except those masked again, become the output."""
    streamer = DraftRecorder()
    output = generate(model, {"input_ids": PROMPT}, streamer=streamer, **mode)
    final, mask, done, drafts = output.sequences[0].tolist(), model.config.mask_token_id, 0, 0
    for kind, value in streamer.events:
        if kind == "put":
            done += value.numel()
        elif kind == "draft":
            drafts += 1
            shown = value[0].tolist()
            assert 0 < len(shown) <= 8 and done + len(shown) <= len(final)
            assert mask in shown
            if mode["mrp_mode"] != "remask":
                assert all(token in (mask, final[done + at]) for at, token in enumerate(shown))
    assert drafts >= 3


def test_text_streamers_of_transformers(model, word_tokenizer, capsys):
    plain = model.generate(PROMPT, max_new_tokens=10, eos_token_id=None)
    text = word_tokenizer.decode(plain[0])
    model.generate(PROMPT, max_new_tokens=10, eos_token_id=None, streamer=TextStreamer(word_tokenizer))
    assert capsys.readouterr().out.strip() == text.strip()


def test_diffusion_streamer_of_transformers_shows_drafts(model, word_tokenizer, capsys):
    if not hasattr(transformers, "TextDiffusionStreamer"):
        pytest.skip(f"transformers {transformers.__version__} has no TextDiffusionStreamer")
    streamer = transformers.TextDiffusionStreamer(word_tokenizer)
    model.generate(PROMPT, max_new_tokens=10, eos_token_id=None, streamer=streamer)
    shown = capsys.readouterr().out
    assert "[MASK]" in shown and "\033[J" in shown  # drafts, and their removal


# -- where a row ends


def prompt_and_free_run(model, count=20):
    """New tokens of the prompt when nothing stops it."""
    return model.generate(PROMPT, max_new_tokens=count, eos_token_id=None)[0, 3:].tolist()


class StopAt(StoppingCriteria):
    """Stops a row at a length of its own; notes the shapes it was asked about."""

    def __init__(self, lengths):
        self.lengths = torch.tensor(lengths)
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return input_ids.shape[1] >= self.lengths


@every_mode
def test_stopping_criteria_see_every_column_and_end_rows_one_by_one(model, batch, mode):
    free = generate(model, batch, **mode).sequences
    criterion = StopAt([12 + 3, 12 + 11, 12 + 6])
    output = generate(model, batch, stopping_criteria=[criterion], pad_token_id=0, **mode)
    assert criterion.seen == list(range(13, 24))
    for row, count in enumerate((3, 11, 6)):
        assert output.sequences[row, 12 : 12 + count].tolist() == free[row, 12 : 12 + count].tolist()
        assert output.sequences[row, 12 + count :].eq(0).all()
    assert output.sequences.shape == (3, 23)
    stats = output.stats
    assert (stats.tokens_by_backbone + stats.tokens_by_head).tolist() == [3, 11, 6]


def letter_tokenizer():
    """Token i is the i-th letter of the alphabet."""
    letters = {chr(ord("a") + index): index for index in range(20)}
    tokenizer = Tokenizer(models.BPE(letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("mode", [None, "spec"])
@pytest.mark.parametrize("at", [0, 3, 4, 9, 17])
def test_stop_strings(tiny_model, mode, at):
    """A stop string over two tokens, wherever it lies in a block or across a border."""
    model, tokenizer = tiny_model(vocab_size=20), letter_tokenizer()
    free = model.generate(PROMPT, max_new_tokens=24, eos_token_id=None)[0, 3:].tolist()
    text = tokenizer.decode(free)
    stop = text[at : at + 2]
    output = model.generate(
        PROMPT, max_new_tokens=24, eos_token_id=None, mrp_mode=mode, stop_strings=stop, tokenizer=tokenizer
    )
    assert output[0, 3:].tolist() == free[: text.index(stop) + 2]


def test_several_ends_of_text_and_padding_behind_them(model, batch):
    free = generate(model, batch).sequences[:, 12:]
    ends = [free[0, 4].item(), free[1, 9].item()]
    output = generate(model, batch, eos_token_id=ends, pad_token_id=0).sequences[:, 12:]
    for row in range(3):
        expected = free[row].tolist()
        stop = next((at + 1 for at, token in enumerate(expected) if token in ends), 20)
        assert output[row].tolist() == (expected[:stop] + [0] * 20)[: output.shape[1]]


def test_max_length_counts_the_prompt(model):
    free = prompt_and_free_run(model)
    assert model.generate(PROMPT, max_length=9, eos_token_id=None)[0, 3:].tolist() == free[:6]


def test_max_time_stops_at_a_block(model):
    """The first forward takes longer than allowed: the row ends with the first columns that are ready."""
    free = prompt_and_free_run(model)
    assert MaxTimeCriteria(1e-6)(PROMPT, None).all()
    started = time.perf_counter()
    output = model.generate(PROMPT, max_new_tokens=200, max_time=1e-6, eos_token_id=None)
    assert output[0, 3:].tolist() == free[:1]
    assert time.perf_counter() - started < 10


# -- processors and scores


@every_mode
def test_logits_processors_hold_in_every_mode(model, batch, mode):
    allowed = torch.tensor([10, 20, 30])

    def only_allowed(_, scores):
        return torch.full_like(scores, -torch.inf).index_copy(1, allowed, scores[:, allowed])

    new = generate(model, batch, logits_processor=[only_allowed], **mode).sequences[:, 12:]
    assert set(new.flatten().tolist()) <= set(allowed.tolist())
    assert len(set(new.flatten().tolist())) > 1


@pytest.mark.parametrize(
    "options", [{"suppress_tokens": None}, {"bad_words_ids": None}], ids=["suppress", "bad_words"]
)
def test_forbidden_tokens_never_come(model, options):
    common = sorted(set(prompt_and_free_run(model)))[:3]
    name = next(iter(options))
    value = common if name == "suppress_tokens" else [[token] for token in common]
    for mode in (MODES["backbone"], MODES["spec"], MODES["direct"]):
        new = generate(model, {"input_ids": PROMPT}, **{name: value}, **mode).sequences[0, 3:]
        assert not set(new.tolist()) & set(common)


@every_mode
@pytest.mark.parametrize("sampling", [False, True])
def test_scores_are_the_rows_at_which_the_tokens_were_revealed(model, batch, mode, sampling):
    """Greedy: each token is the argmax of its row; sampling with top-k 1: the only one that is left."""
    options = {"do_sample": True, "top_k": 1, "temperature": 0.7} if sampling else {}
    output = generate(model, batch, output_scores=True, **options, **mode)
    assert len(output.scores) == 20
    scores = torch.stack(output.scores, dim=1)
    assert scores.shape == (3, 20, 61)
    assert torch.equal(scores.argmax(-1), output.sequences[:, 12:])
    assert scores[..., model.config.mask_token_id].eq(-torch.inf).all()
    if sampling:
        assert torch.isfinite(scores).sum(-1).eq(1).all()
    assert generate(model, batch, **options, **mode).scores is None


def test_scores_of_spec_are_those_of_backbone_only(model, batch):
    plain = torch.stack(generate(model, batch, output_scores=True).scores)
    spec = torch.stack(generate(model, batch, output_scores=True, **MODES["spec"]).scores)
    finite = torch.isfinite(plain)
    assert torch.equal(finite, torch.isfinite(spec))
    torch.testing.assert_close(spec[finite], plain[finite], atol=1e-4, rtol=1e-5)


# -- output and statistics


@every_mode
@pytest.mark.parametrize("ends", [None, [5, 9, 14, 33, 40, 52]])
def test_statistics_count_the_forwards_of_every_row(model, batch, mode, ends):
    options = {"eos_token_id": ends, "pad_token_id": 0, **mode}
    output = generate(model, batch, **options)
    stats = output.stats
    calls = {"backbone": 0, "head": 0}
    model.model.register_forward_hook(lambda *_: calls.update(backbone=calls["backbone"] + 1))
    model.mrp_head.register_forward_hook(lambda *_: calls.update(head=calls["head"] + 1))
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        calls.update(backbone=0, head=0)
        generate(model, {"input_ids": ids[mask][None]}, **options)
        assert calls == {"backbone": stats.backbone_forwards[row], "head": stats.head_forwards[row]}
    assert stats.prefill_forwards.tolist() == [0, 1, 1]
    tokens = stats.tokens_by_backbone + stats.tokens_by_head
    new = output.sequences[:, 12:]
    for row, count in enumerate(tokens.tolist()):
        assert new[row, count:].eq(0).all()
        assert count == new.shape[1] or new[row, count - 1].item() in ends
    torch.testing.assert_close(output.tokens_per_forward, tokens / stats.backbone_forwards)


def test_tokens_are_attributed_to_who_chose_them(model):
    inputs = {"input_ids": PROMPT[:, :1]}
    assert generate(model, inputs, max_new_tokens=23).stats.tokens_by_head.tolist() == [0]
    direct = generate(model, inputs, max_new_tokens=23, mrp_mode="direct", mrp_steps=1).stats
    # blocks of 7, 8 and 8 tokens, each revealed by turns
    assert direct.tokens_by_backbone.tolist() == [4 + 4 + 4] and direct.tokens_by_head.tolist() == [3 + 4 + 4]
    spec = generate(model, inputs, max_new_tokens=23, **MODES["spec"]).stats
    assert spec.tokens_by_head.tolist() == spec.drafts_accepted.sum(1).tolist()
    own = generate(model, inputs, max_new_tokens=23, **MODES["self"]).stats
    assert own.tokens_by_head.tolist() == [0] and own.drafts_accepted.sum() > 0


def test_drafts_are_counted_by_depth(model, batch):
    stats = generate(model, batch, **MODES["spec"]).stats
    assert stats.drafts_proposed.shape == stats.drafts_accepted.shape == (3, 4)
    assert stats.drafts_proposed[:, 0].eq(0).all() and stats.drafts_accepted[:, 0].eq(0).all()
    assert (stats.drafts_accepted <= stats.drafts_proposed).all()
    assert (stats.drafts_accepted[:, 1:-1] >= stats.drafts_accepted[:, 2:]).all()  # a chain is accepted up to a depth
    # static, one token a step: what was accepted are the forwards saved, in whole blocks up to the row's end
    plain = generate(model, batch).stats.backbone_forwards
    saved = plain - generate(model, batch, **MODES["spec"]).stats.backbone_forwards
    assert saved.tolist() == stats.drafts_accepted.sum(1).tolist()


def test_the_kinds_of_output(model):
    plain = model.generate(PROMPT, max_new_tokens=5, eos_token_id=None)
    assert isinstance(plain, torch.Tensor) and plain.dtype == torch.long
    output = model.generate(PROMPT, max_new_tokens=5, eos_token_id=None, return_dict_in_generate=True)
    assert isinstance(output, MRPGenerateOutput) and torch.equal(output.sequences, plain)
    assert set(output.keys()) == {"sequences", "reveal_steps", "tokens_per_forward", "stats"}
    assert output.tokens_per_forward.tolist() == [1.0]


def test_prompts_come_back_as_given(model, batch):
    for side in (lambda x: x, lambda x: x.flip(1)):
        inputs = {name: side(value) for name, value in batch.items()}
        assert torch.equal(generate(model, inputs).sequences[:, :12], inputs["input_ids"])


def test_return_sequences_follow_their_prompt(model, batch):
    torch.manual_seed(0)
    output = generate(model, batch, do_sample=True, num_return_sequences=3, temperature=2.0)
    assert torch.equal(output.sequences[:, :12], batch["input_ids"].repeat_interleave(3, 0))
    assert output.stats.backbone_forwards.shape == (9,)
    new = output.sequences[:, 12:].unflatten(0, (3, 3)).tolist()
    assert all(len(set(map(tuple, samples))) == 3 for samples in new)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_generation_leaves_the_model_as_it_was(model):
    """Training mode, gradients and stored options are the caller's; a call in training mode gives the same tokens."""
    expected = generate(model, {"input_ids": PROMPT}, **MODES["direct"]).sequences
    model.train()
    model.mrp_head.norm.eval()  # whoever set it so wants it back so
    options = dict(vars(model.generation_config))
    assert torch.equal(generate(model, {"input_ids": PROMPT}, **MODES["direct"]).sequences, expected)
    assert model.training and model.mrp_head.training and torch.is_grad_enabled()
    assert not model.mrp_head.norm.training
    assert vars(model.generation_config) == options
    model.gradient_checkpointing_enable()
    assert torch.equal(generate(model, {"input_ids": PROMPT}, **MODES["direct"]).sequences, expected)


def test_the_checkpoints_default_mode_is_used_unless_another_is_asked_for(model):
    model.generation_config.mrp_mode = "direct"
    assert generate(model, {"input_ids": PROMPT}).stats.head_forwards.sum() > 0
    expected = generate(model, {"input_ids": PROMPT}, mrp_mode="remask").stats
    assert expected.tokens_by_head.sum() == 0
    plain = generate(model, {"input_ids": PROMPT}, mrp_mode=None).stats
    assert plain.head_forwards.sum() == 0
