"""`mrp eval`: decoding with its cost, going on after a kill, figures, KL, calibration and the command."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from plain_loop import plain_decode
from transformers import AutoTokenizer

from modeling_mrp import MRPForDiffusionLM
from modeling_mrp.options import DecodingOptions
from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.commands.cli import main
from mrp_trainer.data.collator import MRPCollator
from mrp_trainer.evaluation.frontier import area_under_parallelism, pareto_front
from mrp_trainer.evaluation.head_probe import calibrate, kl_by_depth, store_threshold
from mrp_trainer.evaluation.modes import KINDS, grid
from mrp_trainer.evaluation.runs import RevealTrace, Settings, decode_batch, evaluate, load_rows, prompt_ids
from mrp_trainer.evaluation.summary import summarise, table

PROMPTS = [[5, 9, 12], [7, 30, 8, 41, 6, 22, 13]]  # with 9 new tokens both end with a block of 4
ROWS = [{"prompt": f"what is {word} ?", "answer": word} for word in ("one", "two", "three", "two", "two")]
MODES = grid(["spec", "dynamic"], [0.5], [3], block_size=4)


def first_is_odd(text, row):
    return len(text) % 2


@pytest.fixture
def setup(tiny_model, word_tokenizer):
    return tiny_model(), word_tokenizer


# -- decoding


def test_a_forward_that_was_taken_back_is_nobodys():
    """Round 1 shows b, round 2 takes it back for a and c, round 3 shows it again: b costs the third."""
    trace = RevealTrace(mask_token_id=3, max_new_tokens=3)
    trace.put(torch.tensor([[5, 6]]))
    for draft in ([3, 8, 3], [7, 3, 9], [7, 8, 9]):
        trace.put_draft(torch.tensor([draft]))
    assert trace.costs(0, 3).tolist() == [0.5, 1.0, 0.5]


@pytest.mark.parametrize("mode", ["static", "static-2", "spec-3", "spec-3-self", "direct-2", "remask-residual-0.3"])
def test_the_tokens_of_a_row_cost_all_its_forwards_together(tiny_model, mode):
    modes = grid(KINDS, [0.3], [2, 3], block_size=4)
    results = decode_batch(tiny_model(), PROMPTS, modes[mode] | {"eos_token_id": None}, max_new_tokens=9)
    for result in results:
        assert sum(result["position_forwards"]) == pytest.approx(result["forwards"], abs=1e-5)
        assert sum(result["position_tokens"]) == len(result["token_ids"]) == 9
    # 9 tokens behind 3 or 7: positions 3, 0..3, 0..3 of their blocks
    assert results[0]["position_tokens"] == results[1]["position_tokens"] == [2, 2, 2, 3]


def test_one_token_a_step_costs_one_forward_at_every_position(tiny_model):
    for result in decode_batch(tiny_model(), PROMPTS, {"mrp_mode": None, "eos_token_id": None}, max_new_tokens=9):
        assert result["position_forwards"] == [2, 2, 2, 3]


def test_only_new_tokens_up_to_the_end_of_text_count(tiny_model):
    model = tiny_model()
    free = plain_decode(model, PROMPTS[1], 24)
    end = free[10]
    results = decode_batch(model, PROMPTS, {"mrp_mode": "spec", "eos_token_id": end}, max_new_tokens=24)
    expected = [plain_decode(model, prompt, 24, eos=(end,)) for prompt in PROMPTS]
    assert [result["token_ids"] for result in results] == expected
    assert len(expected[1]) <= 11


def test_a_forward_is_shared_by_the_tokens_that_it_revealed():
    trace = RevealTrace(mask_token_id=3, max_new_tokens=4)
    trace.put(torch.tensor([[7, 7], [7, 7]]))
    trace.put_draft(torch.tensor([[3, 5, 3, 3, 3], [6, 3, 3, 3, 3]]))  # wider than what is asked for
    trace.put_draft(torch.tensor([[9, 5, 3, 8, 3], [6, 6, 3, 3, 3]]))
    for column in ([9, 6], [5, 6], [4, 0], [8, 0]):
        trace.put(torch.tensor(column))
    assert trace.rounds[0].tolist() == [2, 1, 3, 2]
    assert trace.costs(0, 4).tolist() == [0.5, 1, 1, 0.5]
    assert trace.costs(1, 2).tolist() == [1, 1]


def test_the_checkpoints_own_mode_does_not_leak_into_the_grid(tiny_model):
    model = tiny_model()
    plain = decode_batch(model, PROMPTS, {"mrp_mode": None, "eos_token_id": None}, max_new_tokens=9)
    model.generation_config.mrp_mode = "direct"
    model.generation_config.denoising_steps = 1
    again = decode_batch(model, PROMPTS, {"mrp_mode": None, "eos_token_id": None}, max_new_tokens=9)
    assert [r["token_ids"] for r in again] == [r["token_ids"] for r in plain]
    assert [r["forwards"] for r in again] == [9, 9]


# -- a run and its continuation


def timeless(records):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def settings(**changes):
    values = {"modes": MODES, "scorer": "odd", "max_new_tokens": 6, "batch_size": 2, "seed": 5}
    return Settings(**values | changes)


SAMPLED = {"do_sample": True, "temperature": 1.0}  # equal prompts in one batch draw different samples


class Killed(BaseException):
    pass


def test_a_run_that_was_killed_while_scoring_goes_on_as_if_nothing_had_happened(setup, tmp_path):
    whole = evaluate(*setup, ROWS, first_is_odd, settings(options=SAMPLED), tmp_path / "whole")
    calls = []

    def killed_at_the_eighth(text, row):
        calls.append(text)
        if len(calls) == 8:  # the first of two in the last full batch of the second mode
            raise Killed
        return first_is_odd(text, row)

    with pytest.raises(Killed):
        evaluate(*setup, ROWS, killed_at_the_eighth, settings(options=SAMPLED), tmp_path / "cut")
    path = tmp_path / "cut" / "results.jsonl"
    kept = path.read_bytes()
    assert kept.count(b"\n") == 7
    path.write_bytes(kept + b'{"mode": "spec-3", "ind')  # half a line
    rest = []

    def counting(text, row):
        rest.append(text)
        return first_is_odd(text, row)

    resumed = evaluate(*setup, ROWS, counting, settings(options=SAMPLED), tmp_path / "cut")
    assert timeless(resumed) == timeless(whole)
    assert len(rest) == len(ROWS) * len(MODES) - 7
    assert path.read_bytes().startswith(kept)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert timeless(lines) == timeless(whole)


def test_a_finished_run_decodes_nothing_again(setup, tmp_path, monkeypatch):
    first = evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path)
    monkeypatch.setattr("mrp_trainer.evaluation.runs.decode_batch", None)
    assert evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path) == first


def test_another_run_in_the_folder_is_refused_and_the_difference_named(setup, tiny_model, tmp_path):
    model, tokenizer = setup
    one_mode = settings(modes={"static": {"mrp_mode": None}}, max_new_tokens=1)
    evaluate(model, tokenizer, ROWS[:2], first_is_odd, one_mode, tmp_path)
    for rows, ours, changed, part in (
        (ROWS[:2], model, replace(one_mode, max_new_tokens=2), "settings.max_new_tokens"),
        (ROWS[1:3], model, one_mode, "prompts.sha256"),
        (ROWS[:2], tiny_model(seed=1), one_mode, "model.backbone_hash, model.head_hash"),
    ):
        with pytest.raises(ValueError, match=f"differs in {part}:"):
            evaluate(ours, tokenizer, rows, first_is_odd, changed, tmp_path)


def test_the_manifest_says_what_was_run(setup, tmp_path):
    evaluate(*setup, ROWS[:1], first_is_odd, settings(modes={"static": {"mrp_mode": None}}), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert manifest["settings"]["seed"] == 5
    assert manifest["settings"]["modes"] == {"static": {"mrp_mode": None}}
    assert manifest["prompts"]["count"] == 1
    assert manifest["machine"]["device"] == "cpu"


def test_a_run_that_failed_before_its_first_result_keeps_nobody_out(setup, tmp_path):
    with pytest.raises(ValueError, match="scorer 'x' failed on row 1 of the data: KeyError"):
        evaluate(*setup, ROWS, lambda text, row: row["none"], settings(scorer="x"), tmp_path)
    assert (tmp_path / "manifest.json").exists()
    records = evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path)
    assert records and json.loads((tmp_path / "manifest.json").read_text())["settings"]["scorer"] != "x"


def test_a_damaged_result_is_named(setup, tmp_path):
    evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path)
    (tmp_path / "results.jsonl").write_text("no json\n")
    with pytest.raises(ValueError, match="results.jsonl is damaged .*choose another output folder"):
        evaluate(*setup, ROWS, first_is_odd, settings(), tmp_path)


def test_a_score_that_is_none_is_refused(setup, tmp_path):
    with pytest.raises(ValueError, match=r"scorer 'odd' must return a bool or a share in 0..1, got 2"):
        evaluate(*setup, ROWS, lambda text, row: 2, settings(), tmp_path)


def test_a_mode_that_the_checkpoint_cannot_run_is_refused_before_anything_is_decoded(
    tiny_model, word_tokenizer, tmp_path
):
    with pytest.raises(ValueError, match="needs a residual head"):
        evaluate(tiny_model(num_mrp_layers=0), word_tokenizer, ROWS, first_is_odd, settings(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- data and grid


@pytest.mark.parametrize(
    "content, expected",
    [
        ('{"prompt": "a"}\n{"prompt"\n', "line 2: no JSON"),
        ('{"prompt": "a"}\n\n{"question": "b"}\n', "line 3: expected an object with 'prompt' or 'messages'"),
        ("[1]\n", "line 1: expected an object"),
        ("\n", "holds no rows"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, expected):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=expected):
        load_rows(path)


def test_prompts_and_messages_go_through_the_chat_template(word_tokenizer):
    chat = [{"role": "user", "content": "what is one ?"}]
    templated = prompt_ids(word_tokenizer, {"messages": chat})
    assert templated == word_tokenizer("what is one ? . so")["input_ids"]
    assert prompt_ids(word_tokenizer, {"prompt": "what is one ?"}) == templated
    assert prompt_ids(word_tokenizer, {"prompt": chat}) == templated
    assert prompt_ids(word_tokenizer, {"prompt": "what is"}, raw=True) == word_tokenizer("what is")["input_ids"]
    with pytest.raises(ValueError, match="no chat template"):
        prompt_ids(word_tokenizer, {"messages": chat}, raw=True)


# -- figures


def test_the_area_under_parallelism_is_the_published_formula():
    weight = math.exp(-3 * (1 - 0.78 / 0.8))
    area = area_under_parallelism([(3.0, 0.5), (1.0, 0.8), (2.0, 0.78)])  # the last loses more than 5 points
    assert area == pytest.approx(100 * (0.8 + (0.8 + 0.78 * weight) / 2))
    assert area_under_parallelism([(1.0, 1.0)]) == 100
    assert area_under_parallelism([(1.0, 0.8), (2.0, 0.8)], best_accuracy=1.0) == pytest.approx(
        100 * (0.8 + 0.8 * math.exp(-0.6))
    )


def test_the_pareto_front_is_what_nothing_dominates():
    rng = random.Random(0)
    points = [(rng.randint(1, 9) / 2, rng.randint(0, 9) / 9) for _ in range(60)]

    def dominated(p):
        return any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)

    assert pareto_front(points) == sorted({p for p in points if not dominated(p)})


def record(mode, index, score, tokens, forwards, proposed=(0,), accepted=(0,), seconds=1.0):
    return {
        "mode": mode,
        "index": index,
        "score": score,
        "token_ids": tokens,
        "forwards": forwards,
        "head_forwards": 0,
        "proposed": list(proposed),
        "accepted": list(accepted),
        "position_tokens": [len(tokens), 0],
        "position_forwards": [forwards, 0.0],
        "seconds": seconds,
    }


RECORDS = [
    record("static", 0, 1.0, [4, 5], 2, seconds=3.0),
    record("static", 1, 0.0, [6, 7], 2, seconds=3.0),
    record("spec-3", 0, 1.0, [4, 5], 1, (0, 3, 1), (0, 2, 0)),
    record("spec-3", 1, 1.0, [6, 8], 1, (0, 1, 1), (0, 1, 1)),
]


def test_figures_of_a_mode():
    summary = summarise(RECORDS, ["static", "spec-3"])
    static, spec = summary["rows"]
    assert (static["accuracy"], static["tokens_per_forward"], static["on_front"]) == (0.5, 1.0, False)
    assert static["standard_error"] == pytest.approx(0.5)  # sqrt(0.5 / 2), the sample variance over n
    assert (spec["accuracy"], spec["tokens_per_forward"], spec["on_front"]) == (1.0, 2.0, True)
    assert (spec["time_ratio"], spec["identical"]) == (3.0, 0.5)
    assert spec["acceptance"] == [0.75, 0.5]
    assert spec["tokens_per_forward_by_position"] == [2.0, None]
    assert summary["aup"] == 200  # the front is one point
    static_height = 0.5 * math.exp(-1.5)
    assert summary["aup_by_family"] == {"spec": pytest.approx(100 * (0.5 + (static_height + 1) / 2))}


def test_the_table_shows_every_mode():
    summary = summarise(RECORDS, ["static", "spec-3"]) | {"kl": {"before": [0.4, 0.8], "after": [0.1, 0.2]}}
    text = table(summary)
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:4]] == ["static", "spec-3"]
    assert "0.400 > 0.100, 0.800 > 0.200" in text
    assert "front: 200.0" in text


# -- KL and calibration


def test_kl_by_depth_is_that_of_whole_distributions(tiny_model):
    model, steps = tiny_model(), 2
    samples = [([5, 9, 12], [20, 21, 22, 23, 24, 25]), ([7, 30, 8, 41, 6], [33, 34, 35, 36]), ([5], [])]
    figures = kl_by_depth(model, samples, steps, seed=4)
    rows = [
        {"input_ids": p + a, "answer_mask": [0] * len(p) + [1] * len(a), "lengths": [len(p + a)], "sample_ids": [i]}
        for i, (p, a) in enumerate(samples[:2])
    ]
    batch = MRPCollator(4, 3, steps, seed=4)(rows)
    shared = {"clean_ids": batch["clean_ids"], "segment_ids": batch["segment_ids"]}
    with torch.no_grad():
        out = model(batch["input_ids"], revealed_ids=batch["revealed_ids"], **shared)
        for k in range(steps):
            weight = batch["loss_weight"][:, k]
            b = model(batch["revealed_ids"][:, k], **shared).logits.log_softmax(-1)
            for name, logits in (("before", out.logits), ("after", out.corrected_logits[:, k])):
                kl = torch.nn.functional.kl_div(logits.log_softmax(-1), b, log_target=True, reduction="none").sum(-1)
                assert figures[name][k] == pytest.approx(float((kl * weight).sum() / weight.sum()), rel=1e-4)


def test_calibration_takes_the_candidate_of_the_highest_value(setup):
    model, tokenizer = setup
    chosen = settings(max_new_tokens=12, batch_size=5, options={"eos_token_id": None})
    seen = []
    best = calibrate(
        model, tokenizer, ROWS, first_is_odd, chosen, candidates=(1e9, 0.0, 1.0), on_candidate=seen.append
    )
    prompts = [prompt_ids(tokenizer, row) for row in ROWS]

    def figures(options):
        decoded = decode_batch(model, prompts, options | chosen.options, 12)
        texts = [tokenizer.decode(result["token_ids"], skip_special_tokens=True) for result in decoded]
        right = sum(first_is_odd(text, None) for text in texts) / len(texts)
        return right, sum(map(len, (r["token_ids"] for r in decoded))) / sum(r["forwards"] for r in decoded)

    reference, _ = figures({"mrp_mode": None})
    assert [figures_of["remask_threshold"] for figures_of in seen] == [0.0, 1.0, 1e9]
    for candidate in seen:
        accuracy = candidate["accuracy"]
        weight = min(1.0, math.exp(-3 * (1 - accuracy / reference)))
        assert candidate["value"] == pytest.approx(accuracy * weight * candidate["tokens_per_forward"])
    assert best == max(seen, key=lambda candidate: candidate["value"])["remask_threshold"]
    # masking nothing again is SDAR's own threshold decoding
    dynamic = {"mrp_mode": None, "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.5}
    assert (seen[-1]["accuracy"], seen[-1]["tokens_per_forward"]) == pytest.approx(figures(dynamic))


def test_calibration_without_a_right_answer_says_so(setup):
    with pytest.raises(ValueError, match="no answer to 1 prompts was right"):
        calibrate(*setup, ROWS[:1], lambda text, row: 0, settings(max_new_tokens=2), candidates=(1.0,))


def test_a_stored_threshold_is_what_the_residual_criterion_uses(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    store_threshold(tmp_path, 2.0)
    config = MRPForDiffusionLM.from_pretrained(tmp_path).config
    options = DecodingOptions.resolve({"mrp_mode": "remask", "remask_criterion": "residual"}, config)
    assert options.keep_threshold == 2.0


def test_a_threshold_is_stored_in_our_checkpoints_only(golden_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((golden_folder / "config.json").read_bytes())
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match="no folder of a converted checkpoint"):
            store_threshold(folder, 2.0)


# -- the command


@pytest.fixture
def folder(tiny_model, word_tokenizer, tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "odd_scorer.py").write_text("def score(text, row):\n    return len(text) % 2\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMAND = ["eval", "model", "--data", "data.jsonl", "--scorer", "odd_scorer:score", "--max-new-tokens", "4"]


def test_the_command_writes_and_prints_the_summary_and_does_it_again(folder, capsys):
    command = [
        *COMMAND,
        "--modes",
        "spec",
        "--steps",
        "2",
        "--compare",
        "--thresholds",
        "0.5",
        "--limit",
        "3",
        "--json",
    ]
    assert main(command) == 0
    summary = json.loads(capsys.readouterr().out)
    modes = ["static", "spec-2", "static-2", "static-4", "dynamic-0.5", "wide-narrow-0.5", "spec-2-self"]
    assert [row["mode"] for row in summary["rows"]] == modes
    assert summary["rows"][1]["identical"] == summary["rows"][6]["identical"] == 1.0
    assert len(summary["kl"]["before"]) == len(summary["kl"]["after"]) >= 1
    out = folder / "eval-model"
    assert json.loads((out / "summary.json").read_text()) == summary
    written = {path.name for path in out.iterdir()}
    assert {"results.jsonl", "manifest.json", "summary.md", "frontier.png", "frontier.svg", "kl.png"} <= written
    assert main([*command, "--no-plots"]) == 0
    assert json.loads(capsys.readouterr().out) == summary


def test_a_full_head_runs_the_modes_that_a_head_drafts_in_the_same_table(tiny_model, folder, capsys):
    full = tiny_model(mrp_residual=False)
    save_head(full, folder / "head")
    command = [*COMMAND, "--full-head", "head", "--no-plots", "--json", "--steps", "2", "--thresholds", "0.5"]
    assert main([*command, "--compare"]) == 0
    rows = {row["mode"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [mode for mode in rows if mode.endswith("-full")] == ["spec-2-full", "direct-2-full"]
    assert rows["spec-2-full"]["identical"] == 1.0
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompts = [prompt_ids(tokenizer, row) for row in ROWS]
    expected = decode_batch(full, prompts, {"mrp_mode": "direct", "mrp_steps": 2}, max_new_tokens=4)
    assert rows["direct-2-full"]["forwards"] == sum(result["forwards"] for result in expected)
    records = [json.loads(line) for line in (folder / "eval-model/full-head/results.jsonl").read_text().splitlines()]
    found = [record["token_ids"] for record in records if record["mode"] == "direct-2"]
    assert found == [result["token_ids"] for result in expected]
    assert main([*command, "--modes", "dynamic"]) == 2
    assert "the grid holds neither direct nor spec drafted by a head" in capsys.readouterr().err


def test_a_grid_of_ones_own_and_options_for_all_modes(folder, capsys):
    (folder / "grid.yaml").write_text("slow: {}\ndeep: {mrp_mode: spec, mrp_steps: 4, mrp_draft_threshold: 0.1}\n")
    assert main([*COMMAND, "--grid", "grid.yaml", "--no-plots", "--limit", "2", "--suppress_tokens", "[5]"]) == 0
    assert "| deep " in capsys.readouterr().out
    records = [json.loads(line) for line in (folder / "eval-model" / "results.jsonl").read_text().splitlines()]
    assert [record["mode"] for record in records] == ["slow", "slow", "deep", "deep"]
    assert all(5 not in record["token_ids"] for record in records)


def test_a_checkpoint_without_a_head_runs_the_modes_that_need_none(tiny_model, folder, capsys):
    tiny_model(num_mrp_layers=0).save_pretrained(folder / "model")
    assert main([*COMMAND, "--steps", "2", "--thresholds", "0.5", "--no-plots", "--limit", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    modes = ["static", "static-2", "static-4", "dynamic-0.5", "wide-narrow-0.5", "spec-2-self"]
    assert [row["mode"] for row in summary["rows"]] == modes
    assert "kl" not in summary


def test_the_command_calibrates_and_stores(folder, capsys):
    (folder / "odd_scorer.py").write_text("def score(text, row):\n    return 1\n")
    assert main([*COMMAND, "--calibrate", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    stored = json.loads((folder / "model" / "config.json").read_text())["calibrated_remask_threshold"]
    assert printed == {"calibrated_remask_threshold": stored, "prompts": 2}
    assert stored in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@pytest.mark.parametrize(
    "extra, expected",
    [
        (["--steps", "two"], "Invalid value for '--steps'"),
        (["--modes", "sepc"], "Did you mean 'spec'"),
        (["--skip", "9"], "no row of data.jsonl is left: --skip 9, --limit None"),
        (["--mrp_mode", "spec"], "options holds mrp_mode"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--pad-token-id", "5"], "--pad_token_id cannot be set here; use --max-new-tokens or --batch-size"),
        (["--grid", "grid.yaml", "--compare"], "--grid grid.yaml lists the modes itself: leave --compare out"),
        (["--grid", "broken.yaml"], "--grid broken.yaml is not valid YAML"),
        (["--calibrate", "2", "--limit", "1"], "leave --limit out"),
        (["--calibrate", "2", "--head", "head"], "leave --head out (mrp convert --head"),
        (["--device", "xpu9"], "--device xpu9 cannot be used here"),
    ],
)
def test_bad_arguments_end_with_one_line(folder, capsys, extra, expected):
    (folder / "broken.yaml").write_text("a: [")
    assert main([*COMMAND, *extra]) == 2
    assert expected in capsys.readouterr().err
