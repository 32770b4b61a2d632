"""The trainers of trl on the decoders: the same curve as with the stock class, from the same file and seed."""

import pytest
import torch
import transformers
from datasets import Dataset
from harness import Subject, build, no_dropout, of_architectures, scratch, slow_unless, subjects, tiny_tokenizer

trl = pytest.importorskip("trl", reason="preference training needs trl")

TEXTS = [
    "the cat sat on the mat . and then it ran",
    "a dog ran under the tree .",
    "two very small cat and one big dog",
    "it was blue . then it was red . and very big",
]
PAIRS = [
    {"prompt": "the cat", "chosen": " sat on the mat .", "rejected": " was blue"},
    {"prompt": "a very big dog", "chosen": " ran .", "rejected": " sat on a small red tree ."},
    {"prompt": "it", "chosen": " was two", "rejected": " was one and three"},
    {"prompt": "then the tree", "chosen": " was very big .", "rejected": " sat ."},
]


def decoders(kind: str) -> list:
    """The pure decoders; trl's own work is the same for each, so in every run one is enough for most trainers."""
    found = subjects(kind, configs="one", where=lambda s: s.case.is_decoder and s.architecture.official_model_type)
    return slow_unless(of_architectures("llama"), found)


def loaded(subject: Subject, cls: type):
    """A model without dropout whose special tokens are the tokenizer's; ours from a folder of ours, from which trl
    loads the reference model."""
    tokenizer = tiny_tokenizer()
    model = build(cls, subject, **no_dropout(subject))
    if cls is subject.ours:
        folder = scratch()
        model.save_pretrained(folder)
        model = (
            transformers.AutoModelForCausalLM.from_pretrained(folder)
            if subject.generates
            else cls.from_pretrained(folder)
        )
        assert type(model) is cls
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
        if getattr(model, "generation_config", None) is not None:
            setattr(model.generation_config, name, getattr(tokenizer, name))
    return model, tokenizer


def options(**more: object) -> dict:
    """Two or more steps on the CPU, each logged."""
    given = {
        "output_dir": str(scratch()),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "seed": 0,
    }
    return {**given, **more}


def curve(trainer: transformers.Trainer, subject: Subject, *names: str) -> list[tuple[float, ...]]:
    """What was logged at each step."""
    if isinstance(trainer, trl.SFTTrainer):  # Trainer takes GPT-2's loss for one that does not shift the labels
        trainer._loss_shifts_labels = True
    trainer.remove_callback(transformers.PrinterCallback)
    torch.manual_seed(0)
    trainer.train()
    return [tuple(entry[n] for n in names) for entry in trainer.state.log_history if names[0] in entry]


def same_curve(subject: Subject, make, *names: str) -> None:
    """`make` builds a trainer around a model; ours and the stock class's are compared."""
    reference, found = (curve(make(*loaded(subject, cls)), subject, *names) for cls in (subject.stock, subject.ours))
    assert len(found) == len(reference) == 3
    for expected, values in zip(reference, found, strict=True):
        assert values == pytest.approx(expected, rel=2e-3, abs=1e-4)
    assert found[0] != found[-1]


def fine_tuning(packing: bool, **more: object):
    def make(model, tokenizer):
        arguments = options(packing=packing, max_length=64 if packing else 24, eos_token="</s>", **more)
        return trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(**arguments),
            train_dataset=Dataset.from_dict({"text": TEXTS}),
            processing_class=tokenizer,
        )

    return make


@pytest.mark.matrix("SFT, DPO, GRPO")
@pytest.mark.parametrize("subject", decoders("causal"), ids=str)
def test_sft(subject):
    same_curve(subject, fine_tuning(packing=False), "loss")


@pytest.mark.matrix("SFT, DPO, GRPO")
@pytest.mark.parametrize("subject", decoders("causal"), ids=str)
def test_sft_packed(subject):
    """All texts in one row, with positions that restart: the curve of the texts in rows of their own. The stock class
    would let them see each other without flash attention."""
    separate, packed = (
        curve(fine_tuning(packing, per_device_train_batch_size=4)(*loaded(subject, subject.ours)), subject, "loss")
        for packing in (False, True)
    )
    assert len(packed) == 3 and packed[0] > packed[-1]
    assert [x for (x,) in packed] == pytest.approx([x for (x,) in separate], rel=1e-3)


@pytest.mark.matrix("SFT, DPO, GRPO")
@pytest.mark.parametrize("subject", decoders("causal"), ids=str)
def test_dpo(subject):
    def make(model, tokenizer):
        return trl.DPOTrainer(
            model=model,
            args=trl.DPOConfig(**options(max_length=24)),
            train_dataset=Dataset.from_list(PAIRS),
            processing_class=tokenizer,
        )

    same_curve(subject, make, "loss", "rewards/margins")


@pytest.mark.matrix("SFT, DPO, GRPO")
@pytest.mark.parametrize("subject", decoders("row"), ids=str)
def test_reward(subject):
    def make(model, tokenizer):
        model.config.num_labels = 1
        model.score = torch.nn.Linear(model.score.in_features, 1, bias=False)
        torch.nn.init.constant_(model.score.weight, 0.1)
        return trl.RewardTrainer(
            model=model,
            args=trl.RewardConfig(**options(max_length=24)),
            train_dataset=Dataset.from_list(PAIRS),
            processing_class=tokenizer,
        )

    same_curve(subject, make, "loss", "margin")


@pytest.mark.matrix("SFT, DPO, GRPO")
@pytest.mark.parametrize("trainer", ["GRPO", "RLOO"])
@pytest.mark.parametrize("subject", decoders("causal"), ids=str)
def test_policy(subject, trainer):
    """The policy samples: with one seed the same tokens come from both classes, and so the same rewards."""

    def make(model, tokenizer):
        def count(completions, **kwargs):
            return [float(len(set(text.split()))) for text in completions]

        arguments = {
            "num_generations": 2,
            "max_completion_length": 6,
            "beta": 0.05,
            "shuffle_dataset": False,
            **options(learning_rate=1e-3),
        }
        return getattr(trl, f"{trainer}Trainer")(
            model=model,
            reward_funcs=count,
            args=getattr(trl, f"{trainer}Config")(**arguments),
            train_dataset=Dataset.from_list([{"prompt": pair["prompt"]} for pair in PAIRS]),
            processing_class=tokenizer,
        )

    same_curve(subject, make, "loss", "reward")
