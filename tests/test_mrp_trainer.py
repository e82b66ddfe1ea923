"""MRPTrainer on a tiny model: the loss, what is trained, checkpoints, and the figures that it logs."""

import dataclasses
import json

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer import MRPTrainer, MRPTrainingArguments
from mrp_trainer.confident_reveal import reveal_most_confident
from mrp_trainer.data.corruption import loss_normaliser, loss_weights, revealed_states
from mrp_trainer.evaluation.head_metrics import HeadMetrics, by_depth, measure_head

LENGTH = 24


def rows(count=32, length=LENGTH, prompt=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(5, 61, (length,), generator=generator).tolist(),
            "answer_mask": [0] * prompt + [1] * (length - prompt),
            "lengths": [length],
            "sample_ids": [number],
        }
        for number in range(count)
    ]


@pytest.fixture
def loaded_model(tiny_model, tmp_path):
    """A function that saves a tiny model and loads it from the folder, as users do."""

    def load(**options):
        folder = tmp_path / f"model-{sorted(options.items())}"
        tiny_model(**options).save_pretrained(folder)
        return MRPForDiffusionLM.from_pretrained(folder)

    return load


@pytest.fixture
def make_trainer(loaded_model, tmp_path):
    def make(model=None, train=None, evaluate=None, **options):
        model = loaded_model() if model is None else model
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "unroll_steps": 2,
            "use_cpu": True,
            "disable_tqdm": True,
        }
        args = MRPTrainingArguments(**defaults | options)
        dataset = Dataset.from_list(rows() if train is None else train)
        return MRPTrainer(model, args, train_dataset=dataset, eval_dataset=evaluate)

    return make


def backbone_bytes(model):
    return {n: t.clone() for n, t in model.state_dict().items() if not n.startswith("mrp_head.")}


def head_of(model):
    return {n: t.clone() for n, t in model.mrp_head.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert [n for n in left if not torch.equal(left[n], right[n])] == []


def golden_batch(folder, mask_token_id):
    golden = load_file(folder / "expected.safetensors")
    ids, answer = golden["train.input_ids"], golden["train.labels"] != -100
    reveal_step = golden["train.masked"] * (2 - golden["train.reveal"])
    p_mask = golden["train.p_mask"][:, None].expand(ids.shape)
    noisy, states = revealed_states(ids, reveal_step, 1, mask_token_id)
    return golden, {
        "input_ids": noisy,
        "revealed_ids": states,
        "clean_ids": ids,
        "segment_ids": torch.zeros_like(ids),
        "loss_weight": loss_weights(reveal_step, p_mask, 1),
        "normaliser": loss_normaliser(reveal_step, p_mask, answer, 1),
    }


def test_loss_and_gradient_equal_the_golden_values(golden_folder, make_trainer, monkeypatch):
    model = MRPForDiffusionLM.from_backbone(golden_folder)
    trainer = make_trainer(model, unroll_steps=1)
    golden, batch = golden_batch(golden_folder, model.config.mask_token_id)
    forward, hidden = model.forward, {}

    def keep_hidden(**inputs):
        hidden["out"] = forward(**inputs)
        hidden["out"].corrected_hidden_states.retain_grad()
        return hidden["out"]

    monkeypatch.setattr(model, "forward", keep_hidden)
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    torch.testing.assert_close(loss.detach(), golden["train.loss"], rtol=1e-5, atol=0)
    gradient, expected = hidden["out"].corrected_hidden_states.grad[:, 0], golden["train.grad_residual_hidden"]
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_training_lowers_the_kl_and_leaves_the_backbone_alone(make_trainer):
    data = rows(16)
    trainer = make_trainer(train=data, evaluate=Dataset.from_list(data), max_steps=60, learning_rate=3e-3)
    before, model = backbone_bytes(trainer.model), trainer.model
    modes = []
    model.model.register_forward_hook(lambda module, *_: modes.append(module.training))
    first = trainer.evaluate()
    trainer.train()
    last = trainer.evaluate()
    for depth in (1, 2):
        assert last[f"eval_kl_after_{depth}"] < 0.8 * first[f"eval_kl_after_{depth}"]
        assert last[f"eval_kl_before_{depth}"] == first[f"eval_kl_before_{depth}"]
    assert_same(backbone_bytes(model), before)
    assert modes
    assert not any(modes)


def test_fresh_head_starts_at_the_uncorrected_kl_and_improves_on_it(tiny_model, make_trainer, tmp_path):
    tiny_model(num_mrp_layers=0).save_pretrained(tmp_path / "base")
    model = MRPForDiffusionLM.from_backbone(tmp_path / "base", num_mrp_layers=1)
    data = rows(16)
    trainer = make_trainer(model, data, Dataset.from_list(data), max_steps=150, learning_rate=3e-3, logging_steps=50)
    first = trainer.evaluate()
    trainer.train()
    last = trainer.evaluate()
    for depth in (1, 2):
        assert first[f"eval_kl_removed_{depth}"] == pytest.approx(0, abs=1e-6)
        assert last[f"eval_kl_removed_{depth}"] > 0.1


def test_raw_data_are_prepared_with_the_tokenizer(tiny_model, word_tokenizer, tmp_path):
    args = MRPTrainingArguments(str(tmp_path), use_cpu=True)
    raw = Dataset.from_list([{"prompt": "what is one ?", "completion": "so two ."}] * 3)
    trainer = MRPTrainer(
        tiny_model(), args, train_dataset=raw, eval_dataset={"held": raw}, processing_class=word_tokenizer
    )
    for dataset in (trainer.train_dataset, trainer.eval_dataset["held"]):
        assert sum(map(sum, dataset["answer_mask"])) == 3 * 4  # three words and the end of the text
    assert trainer.evaluate()["eval_held_loss"] >= 0


def test_only_the_head_is_optimized(make_trainer):
    trainer = make_trainer()
    trainer.create_optimizer()
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in trainer.model.mrp_head.parameters()}


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulated_batches_give_the_step_of_one_large_batch(make_trainer, accumulation):
    options = {"max_steps": 2, "logging_steps": 2, "optim": "sgd", "max_grad_norm": 1e9, "learning_rate": 0.1}
    whole = make_trainer(per_device_train_batch_size=8, **options)
    parts = make_trainer(
        per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation, **options
    )
    start = head_of(whole.model)
    for trainer in (whole, parts):
        trainer.train()
    for name, value in head_of(whole.model).items():
        moved = (value - start[name]).norm()
        assert moved > 0
        assert (value - head_of(parts.model)[name]).norm() <= 1e-4 * moved
    assert whole.state.log_history[0]["loss"] == pytest.approx(parts.state.log_history[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_resumed_run_is_bit_exact(make_trainer, tmp_path, stop):
    """Steps 1 to 8 are two epochs of four: the stops lie inside an epoch, at its end and inside the second."""
    options = {"train": rows(16), "max_steps": 8, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(output_dir=str(tmp_path / "whole"), **options)
    whole.train()
    resumed = make_trainer(output_dir=str(tmp_path / "resumed"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert_same(head_of(resumed.model), head_of(whole.model))
    kept = ("loss", "grad_norm", "kl_after_1", "expected_tokens_per_forward")
    logs = [{k: log.get(k) for k in kept} for log in whole.state.log_history if log["step"] > stop]
    again = [{k: log.get(k) for k in kept} for log in resumed.state.log_history if log["step"] > stop]
    assert again == logs


def test_checkpoint_holds_the_head_and_not_the_backbone(make_trainer, tmp_path):
    trainer = make_trainer(save_strategy="steps", save_steps=4)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-4"
    tensors = load_file(folder / "mrp_head.safetensors")
    assert_same(tensors, head_of(trainer.model))
    heads = sum(t.numel() for t in tensors.values())
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    moments = [s["exp_avg"].numel() for s in optimizer["state"].values()]
    assert sum(moments) == heads
    assert not list(folder.glob("model*.safetensors"))
    assert json.loads((folder / "mrp_head_config.json").read_text())["num_mrp_layers"] == 1


def test_resuming_on_another_backbone_is_refused(make_trainer, loaded_model, tmp_path):
    make_trainer(max_steps=1, save_strategy="steps", save_steps=1).train()
    other = make_trainer(loaded_model(seed=9), max_steps=2)
    with pytest.raises(ValueError, match="belongs to"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


def test_batch_with_nothing_supervised_still_has_a_zero_gradient_for_every_head_tensor(make_trainer):
    trainer = make_trainer(train=rows(4, prompt=LENGTH) + rows(1), train_sampling_strategy="sequential")
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["loss_weight"] == 0).all()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert loss == 0
    gradients = {n: p.grad for n, p in trainer.model.mrp_head.named_parameters()}
    assert [n for n, g in gradients.items() if g is None or g.any()] == []


def test_noise_changes_from_epoch_to_epoch(make_trainer):
    trainer = make_trainer(train=rows(4), max_steps=3, train_sampling_strategy="sequential")
    seen = []
    compute = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **kw: (
        seen.append(inputs["input_ids"]),
        compute(model, inputs, **kw),
    )[1]
    trainer.train()
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_confident_reveal_shows_the_position_that_the_backbone_is_surest_of(make_trainer):
    trainer = make_trainer(unroll_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    model, mask = trainer.model, trainer.model.config.mask_token_id
    changed = reveal_most_confident(model, batch, model.lm_head.weight, steps=1)
    logits = model(batch["input_ids"], clean_ids=batch["clean_ids"], segment_ids=batch["segment_ids"]).logits
    logits[..., mask] = -torch.inf
    confidence = logits.softmax(-1).amax(-1)
    for row in range(4):
        for block in range(LENGTH // 4):
            masked = [i for i in range(4 * block, 4 * block + 4) if batch["input_ids"][row, i] == mask]
            shown = [i for i in masked if changed["revealed_ids"][row, 0, i] != mask]
            assert shown == ([max(masked, key=lambda i: confidence[row, i])] if masked else [])
    assert torch.equal(changed["loss_weight"] > 0, changed["revealed_ids"] == mask)


def test_reveal_confident_trains_on_the_most_confident_reveals(make_trainer):
    random, confident = make_trainer(), make_trainer(reveal="confident")
    batch = next(iter(random.get_train_dataloader()))
    changed = reveal_most_confident(random.model, batch, random.model.lm_head.weight, steps=2)
    assert not torch.equal(changed["revealed_ids"], batch["revealed_ids"])
    loss = confident.compute_loss(confident.model, batch)
    assert loss == random.compute_loss(random.model, changed) != random.compute_loss(random.model, batch)


def test_head_that_is_the_backbone_itself_removes_all_kl(make_trainer):
    trainer = make_trainer()
    batch = next(iter(trainer.get_train_dataloader()))
    out = trainer.model(
        **{k: batch[k] for k in ("input_ids", "revealed_ids", "clean_ids", "segment_ids")}, teacher=True
    )
    sums = measure_head(
        out.last_hidden_state,
        out.revealed_hidden_states,
        out.revealed_hidden_states,
        trainer.model.lm_head.weight,
        batch["loss_weight"],
        batch["block_ids"],
        trainer.model.config.mask_token_id,
    )
    figures = sums.summary()
    assert len(figures.kl_before) == 2 and min(figures.kl_before) > 0
    assert figures.kl_removed == figures.same_token == figures.same_pick == [1, 1]
    assert figures.expected_tokens_per_forward == 3


def metrics(**values):
    """Sums over three depths; those that are not given are 1."""
    names = [field.name for field in dataclasses.fields(HeadMetrics)]
    return HeadMetrics(*(torch.tensor(values.get(name, [1, 1, 1])).double() for name in names))


def test_expected_tokens_multiply_the_agreement_of_the_depths():
    figures = metrics(blocks=[4, 4, 4], same_pick=[2, 3, 4]).summary()
    assert figures.expected_tokens_per_forward == 1 + 0.5 + 0.5 * 0.75 + 0.5 * 0.75 * 1


def test_figures_end_before_the_first_depth_without_rows_and_are_logged_by_depth():
    figures = metrics(rows=[8, 8, 0], kl_uncorrected=[2, 4, 0], kl_corrected=[1, 1, 0], same_token=[4, 2, 0]).summary()
    assert (figures.kl_before, figures.kl_after, figures.kl_removed) == ([2, 4], [1, 1], [0.5, 0.75])
    entries = figures.log_entries()
    assert entries["kl_before_2"] == 4 and entries["kl_removed_1"] == 0.5 and entries["same_token_2"] == 0.25
    assert by_depth(entries, "kl_before") == figures.kl_before
    assert len(entries) == 2 * 5 + 1
    nothing = metrics(rows=[0, 0, 0]).summary()
    assert nothing.kl_before == [] and nothing.log_entries() == {}


def test_head_that_is_saved_before_training_is_the_one_that_was_loaded(make_trainer, tmp_path):
    trainer = make_trainer()
    head = head_of(trainer.model)
    trainer.save_model(str(tmp_path / "head"))
    assert_same(load_file(tmp_path / "head" / "mrp_head.safetensors"), head)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_backbone_trains_a_float32_head(make_trainer, tiny_model, autocast):
    model = tiny_model().to(torch.bfloat16)
    trainer = make_trainer(model, max_steps=2, bf16=autocast)
    before = backbone_bytes(model)
    trainer.train()
    assert {p.dtype for p in model.mrp_head.parameters()} == {torch.float32}
    assert_same(backbone_bytes(model), before)
    assert {t.dtype for t in before.values()} == {torch.bfloat16}


def test_activation_checkpointing_recomputes_the_head_alone_and_changes_no_gradient(make_trainer, monkeypatch):
    gradients, recomputed = [], 0
    for checkpointing in (False, True):
        trainer = make_trainer(activation_checkpointing=checkpointing, max_steps=1, learning_rate=0.0)
        layer_calls = []
        for layer in (*trainer.model.model.layers, *trainer.model.mrp_head.layers):
            layer.mlp.register_forward_pre_hook(lambda module, *_, calls=layer_calls: calls.append(module))
        kept = {}

        def keep(self_, kept=kept, trainer=trainer):
            kept.update({n: p.grad.clone() for n, p in trainer.model.mrp_head.named_parameters()})

        monkeypatch.setattr(trainer, "_clip_grad_norm", keep)
        trainer.train()
        gradients.append(kept)
        head = {id(layer.mlp) for layer in trainer.model.mrp_head.layers}
        recomputed = sum(id(module) in head for module in layer_calls) / trainer.args.unroll_steps
        backbone_calls = sum(id(module) not in head for module in layer_calls)
        assert backbone_calls == 2 * len(trainer.model.model.layers)  # the clean stream, then all noisy ones
        assert recomputed == 1 + checkpointing
    assert_same(*gradients)


def test_model_without_a_head_is_refused(make_trainer, tiny_model):
    with pytest.raises(ValueError, match="no head to train"):
        make_trainer(tiny_model(num_mrp_layers=0))


def test_backbone_that_requires_gradients_is_refused(make_trainer, tiny_model):
    with pytest.raises(ValueError, match="freeze_backbone"):
        make_trainer(tiny_model().freeze_backbone(False))


@pytest.mark.parametrize("options", [{"divergence": "total_variation"}, {"choice_weight": 1.0}])
def test_training_on_other_objectives_lowers_their_loss(make_trainer, options):
    data = rows(16)
    trainer = make_trainer(train=data, evaluate=Dataset.from_list(data), max_steps=60, learning_rate=3e-3, **options)
    first = trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * first["eval_loss"]
