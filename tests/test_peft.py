"""LoRA over the head, and backbones that are LoRA fine-tunes."""

import json

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel

from modeling_mrp import MRPForDiffusionLM
from mrp_trainer import MRPTrainer, MRPTrainingArguments
from mrp_trainer.checkpoints.head_files import load_head, save_head
from mrp_trainer.checkpoints.lora import apply_backbone_adapter, lora_head
from mrp_trainer.checkpoints.weight_files import backbone_hash
from mrp_trainer.train import main

LENGTH = 16
PROMPT = torch.tensor([[7, 9, 11, 13, 15, 20], [8, 30, 31, 32, 33, 34]])


@pytest.fixture
def base(tiny_model, tmp_path):
    """A folder with a backbone without a head."""
    tiny_model(num_mrp_layers=0).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def with_copies(base):
    """A function that loads the backbone with a head whose layers are copies of its last ones."""

    def load(source=base, layers=1, **options) -> MRPForDiffusionLM:
        return MRPForDiffusionLM.from_backbone(source, layers, head_init="backbone_layers", **options).eval()

    return load


@pytest.fixture
def make_trainer(tmp_path):
    def make(model, output="run", **options):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(5, 61, (8, LENGTH), generator=generator).tolist()
        rows = [
            {"input_ids": row, "answer_mask": [0] * 5 + [1] * (LENGTH - 5), "lengths": [LENGTH], "sample_ids": [i]}
            for i, row in enumerate(ids)
        ]
        defaults = {
            "output_dir": str(tmp_path / output),
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "unroll_steps": 2,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "disable_tqdm": True,
        }
        args = MRPTrainingArguments(**defaults | options)
        return MRPTrainer(model, args, train_dataset=Dataset.from_list(rows))

    return make


@pytest.fixture
def backbone_adapter(base, tmp_path):
    """Folder of a LoRA fine-tune that changes the backbone strongly, and the fine-tuned model as peft runs it."""
    torch.manual_seed(3)
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 2, "init_lora_weights": False}
    tuned = get_peft_model(MRPForDiffusionLM.from_backbone(base, 0), LoraConfig(**options))
    tuned.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", tuned.eval()


def tensors(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def corrected(model):
    """Return the corrected hidden states of one fixed step, [1, 1, 8, H]."""
    ids = torch.tensor([[5, 6, 7, 8, 3, 3, 3, 3]])
    revealed = torch.tensor([[[5, 6, 7, 8, 3, 40, 3, 3]]])
    with torch.no_grad():
        return model(ids, revealed_ids=revealed).corrected_hidden_states


def assert_lossless(model):
    options = {"max_new_tokens": 12, "do_sample": False, "denoising_steps": 4}
    alone = model.generate(PROMPT, mrp_mode=None, **options)
    assert torch.equal(model.generate(PROMPT, mrp_mode="spec", mrp_steps=3, **options), alone)
    return alone


def test_adapter_trains_saves_loads_merges_and_decodes(with_copies, make_trainer, tmp_path):
    model = with_copies()
    before = tensors(model)
    trained = lora_head(model, 2, dropout=0.1)
    make_trainer(trained, save_strategy="steps", save_steps=4).train()
    trained.eval()
    folder = tmp_path / "run" / "checkpoint-4"

    loaded = PeftModel.from_pretrained(with_copies(), folder).eval()
    assert torch.equal(corrected(loaded), corrected(trained))
    merged = PeftModel.from_pretrained(with_copies(), folder).merge_and_unload().eval()
    assert type(merged) is MRPForDiffusionLM
    torch.testing.assert_close(corrected(merged), corrected(trained), rtol=1e-4, atol=1e-5)
    after = tensors(merged)
    assert_same(*({n: t for n, t in state.items() if not n.startswith("mrp_head.")} for state in (before, after)))
    assert {n for n in before if n.startswith("mrp_head.")} == {
        n for n in before if not torch.equal(before[n], after[n])
    }

    continued = [assert_lossless(kind) for kind in (trained, loaded, merged)]
    assert torch.equal(continued[0], continued[1]) and torch.equal(continued[0], continued[2])
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModel.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(corrected(again), corrected(merged))


def test_lora_is_trained_over_the_layers_and_the_rest_of_the_head_in_full(with_copies, make_trainer, tmp_path):
    layer = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}
    low_rank = {f"layers.{i}.{part}.{name}" for i in (0, 1) for part, names in layer.items() for name in names}
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    in_full = {"enorm", "hnorm", "eh_proj", "norm", *(f"layers.{i}.{name}" for i in (0, 1) for name in norms)}
    model = lora_head(with_copies(layers=2), 2)
    trainer = make_trainer(model, save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    saved = load_file(tmp_path / "run" / "checkpoint-1" / "adapter_model.safetensors")
    expected = {f"{name}.lora_{half}.weight" for name in low_rank for half in "AB"} | {f"{n}.weight" for n in in_full}
    assert {name.removeprefix("base_model.model.mrp_head.") for name in saved} == expected
    optimized = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
    assert optimized == sum(tensor.numel() for tensor in saved.values())
    assert not list((tmp_path / "run" / "checkpoint-1").glob("m*.safetensors"))


def test_new_adapter_changes_nothing(with_copies):
    plain = with_copies()
    torch.nn.init.ones_(plain.mrp_head.norm.weight)  # otherwise the head's output is zero
    expected = corrected(plain)
    assert torch.equal(corrected(lora_head(plain, 3).eval()), expected)


def test_resumed_adapter_is_bit_exact(with_copies, make_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    runs = []
    for output, start in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-2"))):
        torch.manual_seed(0)
        model = lora_head(with_copies(), 2, dropout=0.1)
        make_trainer(model, output, **options).train(resume_from_checkpoint=start)
        runs.append(tensors(model))
    assert_same(*runs)


def test_load_head_merges_an_adapter_onto_a_new_head(base, with_copies, make_trainer, tmp_path):
    trained = lora_head(with_copies(), 2)
    make_trainer(trained).train()
    save_head(trained, tmp_path / "head")
    fresh = MRPForDiffusionLM.from_backbone(base, 1)
    load_head(fresh, tmp_path / "head")
    assert_same(tensors(fresh), tensors(trained.merge_and_unload()))
    assert {n for n, p in fresh.named_parameters() if p.requires_grad} == {
        n for n, _ in fresh.named_parameters() if n.startswith("mrp_head.")
    }


def test_adapter_on_another_backbone_or_other_layers_is_refused(with_copies, tiny_model, tmp_path):
    save_head(lora_head(with_copies(), 2), tmp_path / "head")
    other = MRPForDiffusionLM.from_backbone(_saved(tiny_model(seed=9, num_mrp_layers=0), tmp_path / "other"), 1)
    with pytest.raises(ValueError, match="belongs to"):
        load_head(other, tmp_path / "head")
    moved = with_copies()
    torch.nn.init.ones_(moved.mrp_head.norm.weight)
    torch.nn.init.normal_(moved.mrp_head.layers[0].mlp.up_proj.weight)
    with pytest.raises(ValueError, match="over other layers"):
        load_head(moved, tmp_path / "head")
    save_head(with_copies(), tmp_path / "full")
    with pytest.raises(ValueError, match="is not a LoRA adapter"):
        load_head(lora_head(with_copies(), 2), tmp_path / "full")


@pytest.mark.parametrize(("rank", "alpha", "option"), [(3, 4.0, "lora_rank"), (2, 8.0, "lora_alpha")])
def test_resuming_an_adapter_with_another_rank_or_scale_is_refused(with_copies, tmp_path, rank, alpha, option):
    save_head(lora_head(with_copies(), 2, alpha=4.0), tmp_path / "head")
    with pytest.raises(ValueError, match=f"was trained with {option}=.*set {option} to"):
        load_head(lora_head(with_copies(), rank, alpha=alpha), tmp_path / "head")


def _saved(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 33}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": 2, "alpha": 0}, "alpha"),
        ({"rank": 2, "dropout": 1.0}, "dropout"),
    ],
)
def test_option_out_of_range_is_named(with_copies, options, named):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        lora_head(with_copies(), **options)


def test_head_that_could_not_be_rebuilt_under_its_adapter_is_refused(base, tiny_model):
    with pytest.raises(ValueError, match="LoRA requires head_init='backbone_layers'"):
        lora_head(MRPForDiffusionLM.from_backbone(base, 1), 2)
    with pytest.raises(ValueError, match="no head to adapt"):
        lora_head(MRPForDiffusionLM.from_backbone(base, 0), 2)
    assert isinstance(lora_head(tiny_model(), 2), PeftModel)  # a trained head is accepted


@pytest.mark.parametrize("merge", [True, False])
def test_fine_tuned_backbone_is_the_frozen_base(base, with_copies, backbone_adapter, make_trainer, tmp_path, merge):
    adapter, tuned = backbone_adapter
    model = apply_backbone_adapter(with_copies(), adapter, merge=merge)
    assert type(model) is MRPForDiffusionLM
    assert not any("lora_" in name for name, _ in model.mrp_head.named_parameters())
    ids = torch.randint(5, 61, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, tuned(ids).logits, rtol=1e-4, atol=1e-4)
        assert (model(ids).logits - with_copies()(ids).logits).abs().max() > 0.1

    before, head = tensors(model.model), tensors(model.mrp_head)
    make_trainer(model).train()
    assert_same(tensors(model.model), before)
    assert [n for n, t in tensors(model.mrp_head).items() if torch.equal(t, head[n])] == []
    assert_lossless(model.eval())

    save_head(model, tmp_path / "head")
    for other in (True, False):  # the head belongs to the fine-tune, whether it is merged or live
        again = load_head(apply_backbone_adapter(with_copies(), adapter, merge=other), tmp_path / "head")
        torch.testing.assert_close(corrected(again), corrected(model), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="belongs to"):
        load_head(with_copies(), tmp_path / "head")


def test_merged_fine_tune_takes_lora_over_copies_of_its_own_layers(with_copies, backbone_adapter, make_trainer):
    model = apply_backbone_adapter(with_copies(), backbone_adapter[0])
    with pytest.raises(
        ValueError, match="backbone_layers"
    ):  # the copies are those of the backbone before the fine-tune
        lora_head(model, 2)
    model.copy_backbone_layers_to_head()
    trained = lora_head(model, 2)
    make_trainer(trained).train()
    assert_lossless(trained.eval())


def test_hash_of_a_live_adapter_is_that_of_the_merged_backbone(with_copies, backbone_adapter):
    live = apply_backbone_adapter(with_copies(), backbone_adapter[0], merge=False)
    merged = apply_backbone_adapter(with_copies(), backbone_adapter[0], merge=True)
    assert backbone_hash(live) == backbone_hash(merged) != backbone_hash(with_copies())


def test_adapter_that_does_not_fit_is_refused(with_copies, backbone_adapter, base, tmp_path):
    with pytest.raises(ValueError, match="already has a live adapter"):
        lora_head(apply_backbone_adapter(with_copies(), backbone_adapter[0], merge=False), 2)
    for name, options in {"lm_head": {"target_modules": ["lm_head"]}, "norm": {"modules_to_save": ["norm"]}}.items():
        config = LoraConfig(**{"target_modules": ["q_proj"]} | options)
        get_peft_model(MRPForDiffusionLM.from_backbone(base, 0), config).save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match="merge=True"):
            apply_backbone_adapter(with_copies(), tmp_path / name, merge=False)
        merged = apply_backbone_adapter(with_copies(), tmp_path / name)
        assert not any("lora_" in parameter for parameter, _ in merged.named_parameters())
    path = backbone_adapter[0] / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": ["q_proj", "o_proj"]}))
    with pytest.raises(ValueError, match="does not fit this backbone"):
        apply_backbone_adapter(with_copies(), backbone_adapter[0])


def test_training_an_adapter_that_was_loaded_for_inference_is_refused(with_copies, make_trainer, tmp_path):
    save_head(lora_head(with_copies(), 2), tmp_path / "head")
    loaded = PeftModel.from_pretrained(with_copies(), tmp_path / "head")
    with pytest.raises(ValueError, match="is_trainable=True"):
        make_trainer(loaded)
    trainer = make_trainer(PeftModel.from_pretrained(with_copies(), tmp_path / "head", is_trainable=True))
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained and all("mrp_head." in name for name in trained)


def test_config_trains_lora_on_a_fine_tuned_backbone(with_copies, base, backbone_adapter, word_tokenizer, tmp_path):
    word_tokenizer.save_pretrained(base)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "what is one", "completion": "one plus two"}) + "\n")
    values = {
        "base_model": str(base),
        "base_adapter": str(backbone_adapter[0]),
        "num_mrp_layers": 1,
        "head_init": "backbone_layers",
        "lora_rank": 2,
        "lora_alpha": 3.0,
        "lora_dropout": 0.1,
        "train_data": str(tmp_path / "data.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "sequence_length": 16,
        "max_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert main([str(tmp_path / "run.yaml")]) == 0
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 3.0, 0.1)
    model = apply_backbone_adapter(MRPForDiffusionLM.from_backbone(base, 1), backbone_adapter[0])
    assert_lossless(load_head(model, tmp_path / "run").eval())
    with pytest.raises(ValueError, match="lora_rank cannot be combined with head"):
        main([str(tmp_path / "run.yaml"), "--head", str(tmp_path / "run")])
