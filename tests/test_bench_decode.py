"""`mrp bench decode`: the baselines from outside, the figures of its rows, and its clocks."""

import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from modeling_mrp.step_rules import STRATEGIES, StepRule
from mrp_trainer.benchmarks import decode as bench
from mrp_trainer.benchmarks.plain_sdar_loop import plain_sdar_loop
from mrp_trainer.benchmarks.timing import StageClock, interleaved, median_ratio
from mrp_trainer.commands.cli import main as mrp

PROMPTS = [[7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18, 19, 20, 21, 22], [5, 6, 23, 24]]
CPU = torch.device("cpu")


def generated(model, prompt, max_new_tokens, eos, **options):
    """New tokens of one prompt by `generate` with the backbone alone."""
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=0,
        mrp_mode=None,
        return_dict_in_generate=True,
        **options,
    )
    return output.sequences[0, len(prompt) :][: int(output.stats.tokens_by_backbone)].tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("per_step", [1, 3])
def test_plain_loop_gives_the_tokens_of_backbone_only_decoding(tiny_model, strategy, per_step):
    model = tiny_model()
    rule = StepRule(strategy, tokens_per_step=per_step, confidence_threshold=0.5, entropy_bound=1.0)
    options = {
        "remasking_strategy": strategy,
        "denoising_steps": -(-model.config.block_size // per_step),
        "confidence_threshold": 0.5,
        "eb_threshold": 1.0,
    }
    if per_step == 3:  # ceil(4 / 2) = 2 tokens a step
        rule = StepRule(strategy, tokens_per_step=2, confidence_threshold=0.5, entropy_bound=1.0)
    eos = [30, 31, 32, 33, 34, 35]
    ours = plain_sdar_loop(model, PROMPTS, 15, rule=rule, eos_token_ids=eos)
    assert ours == [generated(model, prompt, 15, eos, **options) for prompt in PROMPTS]
    assert len({len(row) for row in ours}) > 1  # some rows end early, some do not


def test_plain_loop_spends_one_forward_per_step_and_one_more_per_block(tiny_model):
    model = tiny_model()
    static = StepRule("low_confidence_static")
    with StageClock([(model.model, "forward", "backbone")], CPU) as clock:
        plain_sdar_loop(model, [list(range(8, 16)), list(range(8, 12))], 12, rule=static)
    assert clock.calls["backbone"] == 1 + 3 * (4 + 1)  # the prompt, and three blocks of four steps


def test_lock_step_waits_for_the_slowest_row(tiny_model):
    model = tiny_model()
    static = StepRule("low_confidence_static")
    prompts = [list(range(8, 15)), list(range(8, 12))]  # one position of the first block is masked, or all four
    with StageClock([(model.model, "forward", "backbone")], CPU) as clock:
        plain_sdar_loop(model, prompts, 1, rule=static)
    assert clock.calls["backbone"] == 1 + 4 + 1


def test_autoregressive_twin_is_transformers_own_model_on_the_same_weights(tiny_model):
    model = tiny_model()
    values = {name: value for name, value in model.config.to_dict().items() if name not in ("auto_map", "model_type")}
    theirs = Qwen3ForCausalLM(Qwen3Config(**values)).eval()
    theirs.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("mrp_head.")})
    ids = torch.tensor([PROMPTS[2]])
    twin = bench.autoregressive_twin(model)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(ids, eos_token_id=[60], **options)
    assert twin.generate(ids, **options)[0].tolist()[: expected.shape[1]] == expected[0].tolist()
    assert twin.lm_head.weight is model.lm_head.weight


HEADED = ("direct", "remask", "spec", "graph")


def test_rows_are_consistent(tiny_model):
    model = tiny_model()
    made = bench.bench_decode(model, PROMPTS, batch_sizes=[1, 4], max_new_tokens=8, repeats=1)
    rows = {(row.mode, row.batch_size): row for row in made}
    assert list(rows) == [(mode, size) for size in (1, 4) for mode in bench.DEFAULT_MODES]
    for (mode, _), row in rows.items():
        assert row.tokens_per_second == pytest.approx(row.new_tokens / row.seconds)
        assert list(row.split) == [*bench.STAGES, "bookkeeping"]
        assert sum(row.split.values()) == pytest.approx(1)
        assert min(row.split.values()) >= 0
        assert list(row.speedups) == list(bench.REFERENCES)
        headless = mode in (bench.AUTOREGRESSIVE, "spec-4-self")
        if mode != "auto":  # which may find that no draft pays, and then the head does not run
            assert (row.head_forwards > 0) == (mode.startswith(HEADED) and not headless)
    for size in (1, 4):
        static = rows["static", size]
        for reference in bench.REFERENCES:
            assert rows[reference, size].speedups[reference] == pytest.approx(1)
            assert rows[reference, size].new_tokens == static.new_tokens
            expected = static.tokens_per_second / rows[reference, size].tokens_per_second  # one round: its own median
            assert static.speedups[reference] == pytest.approx(expected)
        for lossless in ("plain-sdar", "spec-2", "spec-3", "spec-4", "spec-4-self"):
            assert rows[lossless, size].identical == 1
        assert rows["autoregressive", size].identical is None
        assert rows["plain-sdar", size].backbone_forwards > static.backbone_forwards
        # three positions are masked after the opening step: two drafts leave one
        assert len(rows["spec-4", size].accepted) == 2


def test_forwards_are_those_that_generate_counts(tiny_model):
    model = tiny_model()
    made = bench.bench_decode(model, PROMPTS, ["spec-3"], [1], max_new_tokens=12, repeats=1, ignore_eos=True)
    spec = made[-1]
    stats = [
        model.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            eos_token_id=61,
            pad_token_id=0,
            mrp_mode="spec",
            mrp_steps=3,
            return_dict_in_generate=True,
        ).stats
        for prompt in PROMPTS
    ]
    assert spec.new_tokens == 12 * len(PROMPTS)
    assert spec.backbone_forwards == sum(int(s.backbone_forwards) for s in stats)
    assert spec.head_forwards == sum(int(s.head_forwards) for s in stats)
    assert spec.tokens_per_forward == pytest.approx(spec.new_tokens / spec.backbone_forwards)
    proposed, accepted = (sum(getattr(s, n)[0] for s in stats) for n in ("drafts_proposed", "drafts_accepted"))
    assert spec.accepted == pytest.approx((accepted[1:] / proposed[1:]).tolist())


def test_autoregressive_decodes_as_many_tokens_as_static_and_one_forward_for_each(tiny_model):
    rows = bench.bench_decode(tiny_model(), PROMPTS, ["autoregressive"], [1, 4], 12, 1, ignore_eos=True)
    one, four = (row for row in rows if row.mode == "autoregressive")
    assert (one.new_tokens, one.backbone_forwards, one.tokens_per_forward) == (48, 48, 1)
    assert (four.new_tokens, four.backbone_forwards, four.tokens_per_forward) == (48, 12, 1)


def test_a_model_without_a_head_runs_the_modes_that_need_none(tiny_model):
    model = tiny_model(num_mrp_layers=0)
    ran = [row.mode for row in bench.bench_decode(model, PROMPTS[:1], batch_sizes=[1], max_new_tokens=2, repeats=1)]
    assert ran == ["static", "plain-sdar", "autoregressive", "dynamic-0.9", "plain-sdar-dynamic-0.9", "spec-4-self"]
    with pytest.raises(ValueError, match="modes: 'spec-4' needs a head"):
        bench.bench_decode(model, PROMPTS, ["spec-4"])


def test_an_unknown_mode_is_an_error_that_lists_the_modes(tiny_model):
    with pytest.raises(ValueError, match="modes: unknown mode 'spec-four'.* plain-sdar-dynamic-0.9, autoregressive"):
        bench.bench_decode(tiny_model(), PROMPTS, ["spec-four"])


@pytest.mark.parametrize("option", ["batch_sizes", "max_new_tokens", "repeats"])
def test_numbers_below_one_are_named(tiny_model, option):
    value = [1, 0] if option == "batch_sizes" else 0
    with pytest.raises(ValueError, match=option):
        bench.bench_decode(tiny_model(), PROMPTS, **{option: value})


def test_command_prints_json(tiny_model, word_tokenizer, tmp_path, capsys):
    tiny_model().save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    arguments = ["--prompt", "what is one plus two ?", "--modes", "spec-2", "--batch-sizes", "2", "--repeats", "1"]
    assert mrp(["bench", "decode", str(tmp_path), *arguments, "--max-new-tokens", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in result["rows"]] == ["static", "spec-2"]
    assert result["decoded"].startswith("2 prompts of 8 to 8 tokens")  # six words and the template's ". so"
    assert "blocks of 4, float32" in result["network"]


@pytest.fixture
def saved(tiny_model, word_tokenizer, tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("model")
    word_tokenizer.save_pretrained("model")
    return "model"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--modes", "spec-0"], "modes: unknown mode 'spec-0'"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    ],
)
def test_arguments_are_checked_before_the_heading_is_printed(saved, capsys, words, expected):
    """The heading of a table stood above the error."""
    assert mrp(["bench", "decode", saved, "--raw", "--prompt", "one", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and expected in shown.err


def test_recorded_settings_are_the_parameters_of_the_command(saved, tmp_path):
    """`model` and `prompts` were overwritten with the sentences of the heading."""
    command = [
        "bench",
        "decode",
        saved,
        "--prompt",
        "one",
        "--prompts",
        "2",
        "--batch-sizes",
        "1",
        "--modes",
        "static",
    ]
    assert mrp([*command, "--max-new-tokens", "4", "--repeats", "1", "--record", str(tmp_path / "result.json")]) == 0
    settings = json.loads((tmp_path / "result.json").read_text())["settings"]
    assert settings["prompts"] == 2 and settings["model"] == "model"
    assert settings["decoded"].startswith("2 prompts of ") and "backbone of 2 layers of 32" in settings["network"]


def test_interleaved_runs_take_turns():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = interleaved(steps, repeats=2, device=CPU)
    assert order == list("ababab")
    assert [len(runs) for runs in seconds.values()] == [2, 2]


def test_the_median_ratio_is_the_median_of_paired_ratios():
    assert median_ratio([2, 30, 8], [1, 10, 2]) == 3  # 2, 3, 4, and not 8 / 2


def test_stage_clock_counts_and_restores():
    class Work:
        def step(self, x):
            return x + 1

    work = Work()
    with StageClock([(Work, "step", "stage")], CPU) as clock:
        assert work.step(1) == 2
        assert Work().step(2) == 3
    work.step(3)
    assert clock.calls == {"stage": 2}
    assert clock.seconds["stage"] > 0
