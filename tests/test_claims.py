"""`mrp claims`: what is measured, the rules of the verdicts, and what is said where something is missing."""

import json
import re
import statistics

import pytest
import torch
from transformers import AutoTokenizer

from hub_cards.tasks.tasks import TASKS
from mrp_trainer.checkpoints.head_files import save_head
from mrp_trainer.commands.claims import samples_of_task
from mrp_trainer.commands.cli import main
from mrp_trainer.evaluation.claim_rules import (
    CLAIMS,
    FAILS,
    HOLDS,
    IN_PART,
    NO_FULL_HEAD,
    NO_HEAD,
    NOT_MEASURED,
    Scale,
)
from mrp_trainer.evaluation.claims import Decoded, check_claims, judge_claim, modes_of
from mrp_trainer.evaluation.decoding import decode_batch, prompt_ids
from mrp_trainer.evaluation.kl_between_states import kl_by_depth
from mrp_trainer.evaluation.runs import Settings

ROWS = [{"prompt": f"what is {word} ?", "answer": word} for word in ("one", "two", "three")]
LARGE = Scale(parameters=10**10, block_size=16, device="cuda", dtype="float32", batch_size=1)


def odd(text, row):
    return len(text) % 2


@pytest.fixture
def setup(tiny_model, word_tokenizer):
    return tiny_model(block_size=8, vocab_size=20), word_tokenizer


def settings(**changes):
    return Settings(**{"modes": {"static": {}}, "scorer": "odd", "max_new_tokens": 12, "batch_size": 2} | changes)


# -- measured on a model


def test_spec_is_lossless_and_every_claim_has_a_row(setup, tmp_path):
    seen = []
    rows = check_claims(*setup, ROWS, odd, settings(), tmp_path, on_row=seen.append)
    assert [row.name for row in rows] == list(CLAIMS)
    assert rows == seen
    by_name = {row.name: row for row in rows}
    lossless = by_name["lossless"]
    assert (lossless.figures["prompts"], lossless.figures["tokens"], lossless.verdict) == (1.0, 1.0, HOLDS)
    assert "100.0% of the answers" in lossless.here
    assert by_name["gain"].figures["saved"] == by_name["drafter"].figures["saved_head"]
    static = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()][: len(ROWS)]
    assert by_name["remask"].figures["static"] == pytest.approx(statistics.mean(len(r["text"]) % 2 for r in static))


def test_a_head_whose_output_is_zero_removes_no_kl(setup, tmp_path):
    model, tokenizer = setup
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    (row,) = check_claims(model, tokenizer, ROWS, odd, settings(), tmp_path, ["residual"])
    assert row.figures["before"][0] > 0
    assert row.figures["residual"] == pytest.approx(row.figures["before"])


def test_without_a_scorer_agreement_with_static_is_used_and_named(setup, tmp_path):
    (row,) = check_claims(*setup, ROWS, None, settings(scorer="none"), tmp_path, ["remask"])
    assert row.figures["score"] == "share identical to static" and row.figures["static"] == 1.0
    assert row.here.startswith("share identical to static")
    assert "no scorer" in row.reason or row.verdict.startswith(NOT_MEASURED)


def test_without_a_head_only_claims_about_the_backbone_are_measured(tiny_model, word_tokenizer, tmp_path):
    model = tiny_model(num_mrp_layers=0, vocab_size=20)
    rows = check_claims(model, word_tokenizer, ROWS, odd, settings(), tmp_path)
    assert {row.name: row.verdict for row in rows if row.figures is None} == dict.fromkeys(
        ("residual", "unverified", "gain", "drafter", "remask"), NO_HEAD
    )
    lossless = next(row for row in rows if row.name == "lossless")
    assert lossless.figures["modes"] == ["spec-2-self", "spec-4-self", "spec-8-self"]
    assert lossless.verdict == HOLDS


def test_without_a_full_head_the_rows_say_which_option_is_missing(setup, tmp_path):
    rows = check_claims(*setup, ROWS, odd, settings(), tmp_path, ["residual", "unverified"])
    assert [row.verdict for row in rows] == [NO_FULL_HEAD] * 2
    assert all("--full-head FOLDER" in row.verdict and row.figures["residual"] for row in rows)


def test_only_a_head_that_is_full_is_compared_as_such(setup, tmp_path):
    with pytest.raises(ValueError, match="mrp_residual true"):
        check_claims(*setup, ROWS, odd, settings(), tmp_path, ["residual"], full=setup[0])


def test_each_claim_decodes_no_more_than_it_needs():
    assert list(modes_of(["similarity", "residual"], 8, has_head=True)) == ["static"]
    assert list(modes_of(["gain"], 8, has_head=True)) == ["static", "spec-2", "spec-4", "spec-8"]


def test_a_lead_is_the_mean_of_paired_differences_with_its_standard_error():
    scores = {"static": [1, 0, 1, 1], "other": [0, 0, 1, 0]}
    filler = {"token_ids": [1], "forwards": 1, "head_forwards": 0, "seconds": 1.0, "proposed": [0], "accepted": [0]}
    filler |= {"position_tokens": [1], "position_forwards": [1]}
    records = [
        filler | {"mode": mode, "index": index, "score": score}
        for mode, column in scores.items()
        for index, score in reversed(list(enumerate(column)))  # the order that a resumed run may leave
    ]
    lead = Decoded(records, list(scores), scored=True).lead("static", "other")
    gaps = [1, 0, 0, 1]
    assert lead["mean"] == statistics.mean(gaps)
    assert lead["error"] == pytest.approx(statistics.stdev(gaps) / len(gaps) ** 0.5)


# -- rules, on figures made up


def lead(mean, error=0.01):
    return {"mean": mean, "error": error}


def similarity(kl, unrelated=10.0):
    return {"kl_by_distance": kl, "kl_unrelated": unrelated}


def residual(head, full, before=(1.0, 2.0)):
    return {"before": list(before), "residual": head, "full": full}


def unverified(full, gap):
    return {"score": "accuracy", "static": 0.8, "residual": [0.8, 0.7], "full": [0.6, full], "lead": gap}


def gain(saved, time_ratio):
    figures = {"steps": [2, 4], "static_forwards": 100, "saved": saved, "time_ratio": time_ratio}
    return figures | {"acceptance": [[0.5], [0.5, 0.2]]}


def drafter(*leads):
    saved = [0.3] * len(leads)
    figures = {"steps": list(range(2, 2 + len(leads))), "lead": list(leads), "saved_head": saved, "saved_self": saved}
    return figures | {"acceptance_head": [[0.5]] * len(leads), "acceptance_self": [[], *[[0.75]] * (len(leads) - 1)]}


def remask(dynamic=0.4, **leads):
    names = ("leave_one_out", "confidence", "residual")
    return {
        "score": "accuracy",
        "static": 0.8,
        "dynamic": dynamic,
        "remask": {name: dynamic + leads.get(name, lead(0.0))["mean"] for name in names},
        "lead": {name: leads.get(name, lead(0.0)) for name in names},
        "tokens_per_forward": dict.fromkeys(("static", "dynamic", *names), 2.0),
    }


@pytest.mark.parametrize(
    "name, figures, verdict, reason",
    [
        ("similarity", similarity([1.0, 2.0]), HOLDS, ""),
        ("similarity", similarity([1.0, 0.9]), IN_PART, "10% as far .* does not rise"),
        ("similarity", similarity([5.0, 6.0]), IN_PART, "50% as far"),
        ("similarity", similarity([5.1, 6.0]), FAILS, "51%"),
        ("similarity", similarity([], 0.0), NOT_MEASURED + "blocks of one token", ""),
        ("residual", residual([0.5, 1.0], [0.6, 1.1]), HOLDS, ""),
        ("residual", residual([0.5, 1.0], [0.6, 0.9]), IN_PART, "at least as good at depth 2"),
        ("residual", residual([0.5, 2.0], [0.6, 3.0]), IN_PART, "removes no KL at depth 2"),
        ("residual", residual([0.5, 1.0], [0.5, 0.9]), FAILS, "depth 1, 2"),
        ("residual", residual([0.5, 1.0], None), NO_FULL_HEAD, ""),
        ("unverified", unverified(0.4, lead(0.3)), HOLDS, ""),
        ("unverified", unverified(0.5, lead(0.2)), IN_PART, "more than half"),
        ("unverified", unverified(0.1, lead(0.2, 0.1)), FAILS, "twice the standard error"),
        ("unverified", unverified(0.0, None) | {"full": None}, NO_FULL_HEAD, ""),
        ("lossless", {"modes": ["spec-2"], "prompts": 1.0, "tokens": 1.0}, HOLDS, ""),
        ("lossless", {"modes": ["spec-2"], "prompts": 0.9, "tokens": 0.99}, FAILS, "mrp verify"),
        ("gain", gain([0.3, 0.5], [0.9, 1.1]), HOLDS, ""),
        ("gain", gain([0.3, 0.5], [0.9, 1.0]), IN_PART, "on cuda in batches of 1"),
        ("gain", gain([0.0, -0.1], [1.2, 1.1]), FAILS, "no draft saves a forward"),
        ("drafter", drafter(lead(1.0), lead(2.0)), HOLDS, ""),
        ("drafter", drafter(lead(1.0), lead(0.01)), IN_PART, "at K = 3 .* 75% of its next choices"),
        ("drafter", drafter(lead(-1.0), lead(0.0)), FAILS, "at K = 2, 3 "),
        ("remask", remask(confidence=lead(0.1)), HOLDS, "by criterion confidence"),
        ("remask", remask(leave_one_out=lead(0.1)), IN_PART, "only by leave_one_out"),
        ("remask", remask(confidence=lead(0.1, 0.06)), FAILS, "no criterion"),
        ("remask", remask(dynamic=0.8, confidence=lead(0.1)), NOT_MEASURED + "the low threshold loses", ""),
    ],
)
def test_verdicts_follow_from_the_figures_by_the_rule(name, figures, verdict, reason):
    row = judge_claim(name, figures, LARGE)
    assert row.verdict.startswith(verdict)
    assert (row.reason == "") == (reason == "")
    assert re.search(reason, row.reason)
    assert row.here and row.rule.startswith("holds: ")


def test_rounding_excuses_differences_below_float32_only():
    figures = {"modes": ["spec-2"], "prompts": 0.9, "tokens": 0.95}
    half = Scale(10**10, 16, "cuda", "bfloat16", 1)
    assert judge_claim("lossless", figures, half).verdict == IN_PART
    assert judge_claim("lossless", figures | {"tokens": 0.94}, half).verdict == FAILS
    assert judge_claim("lossless", figures, LARGE).verdict == FAILS


def test_a_small_backbone_is_named_where_a_claim_does_not_simply_hold():
    small = Scale(1_800_000, 8, "cpu", "float32", 1)
    assert "1.8 million parameters, blocks of 8" in judge_claim("similarity", similarity([5.0, 6.0]), small).reason
    assert judge_claim("similarity", similarity([1.0, 2.0]), small).reason == ""
    assert "million" not in judge_claim("similarity", similarity([5.0, 6.0]), LARGE).reason


# -- the command


@pytest.fixture
def folder(tiny_model, word_tokenizer, tmp_path, monkeypatch):
    tiny_model(vocab_size=20, block_size=8).save_pretrained(tmp_path / "model")
    save_head(tiny_model(vocab_size=20, block_size=8, mrp_residual=False), tmp_path / "full")
    word_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "prompts.txt").write_text("what is one ?\n\nso then\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMAND = ["claims", "model", "--data", "data.jsonl", "--scorer", "exact", "--max-new-tokens", "8"]


def run(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def timeless(row):
    return {name: value for name, value in row["figures"].items() if name != "time_ratio"}


def test_json_holds_each_claim_with_the_command_that_repeats_it(folder, capsys):
    report = json.loads(run(capsys, *COMMAND, "--full-head", "full", "--json", "--output", "answers"))
    assert (report["model"], report["prompts"]) == ("model", 3)
    assert report["note"] is None
    assert set(report["scale"]) == {"parameters", "block_size", "device", "dtype", "batch_size"}
    assert [row["name"] for row in report["rows"]] == list(CLAIMS)
    for row in report["rows"]:
        assert set(row) == {
            "name", "claim", "published", "here", "verdict", "reason", "rule", "figures", "command"
        }  # fmt: skip
        assert row["verdict"] in (HOLDS, IN_PART, FAILS) or row["verdict"].startswith(NOT_MEASURED)
        assert row["command"].endswith(f"--full-head full --max-new-tokens 8 --only {row['name']}")
    assert {"results.jsonl", "manifest.json", "full-head"} <= {path.name for path in (folder / "answers").iterdir()}
    for row in report["rows"][2:3] + report["rows"][4:5]:
        (again,) = json.loads(run(capsys, *row["command"].split()[1:], "--json"))["rows"]
        assert timeless(again) == timeless(row)


def test_json_holds_the_note_on_samples_that_are_left_out(folder, capsys, monkeypatch):
    """Only the heading of the text said that some samples were missing."""
    monkeypatch.setattr("mrp_trainer.commands.claims.embedded_task", lambda *_: TASKS["words"])
    monkeypatch.setattr(type(TASKS["words"]), "note", lambda self, split, count: "2 of 5 are left out")
    command = ["claims", "words", "--prompts", "2", "--only", "lossless", "--max-new-tokens", "4", "--json"]
    assert json.loads(run(capsys, *command))["note"] == "2 of 5 are left out"


def test_a_full_head_is_measured_on_the_same_states(folder, capsys, tiny_model):
    (row,) = json.loads(run(capsys, *COMMAND, "--full-head", "full", "--only", "residual", "--json"))["rows"]
    figures = row["figures"]
    full = tiny_model(vocab_size=20, block_size=8, mrp_residual=False)
    tokenizer = AutoTokenizer.from_pretrained("model", trust_remote_code=False, config=full.config)
    prompts = [prompt_ids(tokenizer, one) for one in ROWS]
    answers = [decode_batch(full, [prompt], {"mrp_mode": None}, 8)[0].token_ids for prompt in prompts]
    expected = kl_by_depth(full, list(zip(prompts, answers, strict=True)), 4)
    assert figures["before"] == pytest.approx(expected["before"])
    assert figures["full"] == pytest.approx(expected["after"])
    assert figures["residual"] != pytest.approx(expected["after"])


def test_text_and_markdown_show_every_claim(folder, capsys):
    arguments = ["claims", "model", "--prompt-file", "prompts.txt", "--raw", "--max-new-tokens", "4"]
    text = run(capsys, *arguments, "--only", "similarity,remask")
    assert text.startswith("2 prompts, greedy, batches of 16, cpu, float32")
    assert all(f"\n{name}: " in text for name in ("similarity", "remask"))
    assert "mrp claims model --prompt-file prompts.txt --max-new-tokens 4 --raw --only remask" in text
    table = run(capsys, *arguments, "--only", "similarity,lossless", "--markdown").splitlines()
    cells = [line.count(" | ") for line in table if line.startswith("| ")]
    assert cells == [3, 3, 3]  # head and two claims
    assert any("**holds**" in line and "--only lossless" in line for line in table)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["model"], "model is not an embedded checkpoint, so give --data FILE"),
        (["model", "--prompt-file", "prompts.txt", "--scorer", "exact"], "give --data FILE"),
        (["model", "--data", "data.jsonl", "--prompt-file", "prompts.txt"], "give one of them"),
        (["model", "--data", "data.jsonl", "--prompts", "1"], "--prompts must be at least 2, got 1"),
        (["model", "--data", "data.jsonl", "--only", "losless"], "Did you mean 'lossless'"),
        (["model", "--data", "data.jsonl", "--full-head", "residual"], "the head in residual is residual"),
        (["model", "--data", "data.jsonl", "--full-head", "other"], "was trained on"),
    ],
)
def test_bad_arguments_end_with_one_line(folder, capsys, tiny_model, arguments, expected):
    save_head(tiny_model(vocab_size=20, block_size=8), folder / "residual")
    save_head(tiny_model(seed=1, vocab_size=20, block_size=8, mrp_residual=False), folder / "other")
    assert main(["claims", *arguments]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err and shown.out == ""


def test_an_embedded_checkpoint_uses_its_own_held_out_samples_and_scorer():
    from hub_cards.tasks.tasks import TASKS

    task = TASKS["words"]
    found = samples_of_task(task, 3)
    rows, scorer = found.rows, found.scorer
    samples = task.held_out("test", 3)
    assert [row["prompt"] for row in rows] == [sample.prompt for sample in samples]
    assert [scorer(sample.answer, row) for sample, row in zip(samples, rows, strict=True)] == [True] * 3
    assert not any(scorer(samples[0].answer, row) for row in rows[1:])
    assert (found.scorer_name, found.raw) == (task.right_when, True)
