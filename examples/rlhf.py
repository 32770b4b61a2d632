"""Learn from feedback in three steps (Ouyang et al., 2022, https://arxiv.org/abs/2203.02155), on a toy preference.

    python examples/rlhf.py --output rlhf-model

1. Demonstrations: a small LLaMA learns to describe things, from sentences of a made-up grammar (trl's SFTTrainer).
2. Comparisons: a reward model learns from pairs that a description with a warm colour is better than one with a cold
   colour (RewardTrainer). It never sees the rule, only the pairs.
3. Policy: the model of step 1 is trained against the reward model, with a penalty on the divergence from step 1
   (RLOOTrainer; Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740; trl 1.16 carries PPO no more).

It prints the reward and the share of warm colours before and after, and how far the policy went from the model of
step 1. Measured: reward -0.40 before, +3.08 after; 42 % warm colours before, 97 % after; 0.12 nats per token from the
start. Needs `pip install "hf-ext[rlhf]"`; about three minutes on two cores.
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, set_seed
from trl import RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from hf_ext import ExtLlamaConfig, ExtLlamaForCausalLM, ExtLlamaForSequenceClassification

WARM, COLD = ("red", "orange", "yellow", "pink"), ("blue", "green", "grey", "violet")
THINGS = ("house", "boat", "coat", "flower", "train", "door", "lamp", "bird")
SIZES = ("small", "big", "old", "new")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word of the grammar."""
    special = {"pad_token": "[PAD]", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "[UNK]"}
    words = [*special.values(), "the", "is", "and", ".", *THINGS, *SIZES, *WARM, *COLD]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", model_input_names=inputs, **special)


def description(colours: tuple[str, ...]) -> str:
    """How a sentence goes on."""
    return f" {random.choice(SIZES)} and {random.choice(colours)} ."


@torch.no_grad()
def scores(reward: PreTrainedModel, tokenizer: object, texts: list[str]) -> torch.Tensor:
    """(texts,) what the reward model says of finished texts: it was trained with the end token, and reads there."""
    batch = tokenizer([f"{text} {tokenizer.eos_token}" for text in texts], return_tensors="pt", padding=True)
    return reward.eval()(**batch).logits[:, 0]


@torch.no_grad()
def judged(policy: PreTrainedModel, start: PreTrainedModel, reward: PreTrainedModel, tokenizer: object) -> dict:
    """Mean reward of sampled descriptions; the share with a warm colour, which the reward model was never told; the
    divergence from the start, in nats per token."""
    torch.manual_seed(1)
    prompts = tokenizer([f"the {thing} is" for thing in THINGS] * 16, return_tensors="pt")
    tokens = policy.eval().generate(**prompts, max_new_tokens=6, do_sample=True)
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    ours, theirs = (model.eval()(**batch).logits.log_softmax(-1) for model in (policy, start))
    divergence = (ours.exp() * (ours - theirs)).sum(-1)[batch["attention_mask"].bool()]
    return {
        "reward": scores(reward, tokenizer, texts).mean().item(),
        "warm": sum(any(colour in text for colour in WARM) for text in texts) / len(texts),
        "divergence": divergence.mean().item(),
        "sample": texts[0],
    }


def main(arguments: list[str] | None = None) -> dict:
    """Run the three steps; returns the figures before and after the third."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the trained policy; must not exist")
    parser.add_argument("--steps", type=int, default=120, help="updates in each of the three steps")
    parser.add_argument("--beta", type=float, default=0.05, help="weight of the penalty on the divergence")
    given = parser.parse_args(arguments)
    if given.output.exists():
        parser.error(f"--output: {given.output} exists; name a folder that does not")
    if given.steps < 1:
        parser.error(f"--steps: {given.steps} must be at least 1")
    set_seed(0)
    tokenizer = word_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ExtLlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **special)

    given.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.output.parent) as work:
        quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "bf16": False}
        shared = {"output_dir": work, "max_steps": given.steps, "per_device_train_batch_size": 32, **quiet}

        print("1. demonstrations")
        rows = [
            {"prompt": f"the {random.choice(THINGS)} is", "completion": description(WARM + COLD)} for _ in range(1000)
        ]
        sft = SFTConfig(learning_rate=3e-3, max_length=32, gradient_checkpointing=False, **shared)
        trainer = SFTTrainer(
            ExtLlamaForCausalLM(config), sft, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
        trainer.train()
        start = f"{work}/start"
        trainer.save_model(start)

        print("2. comparisons")
        pairs = [{"prompt": row["prompt"], "chosen": description(WARM), "rejected": description(COLD)} for row in rows]
        reward = ExtLlamaForSequenceClassification.from_pretrained(start, num_labels=1)
        comparison = RewardConfig(learning_rate=1e-3, max_length=32, gradient_checkpointing=False, **shared)
        RewardTrainer(reward, comparison, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer).train()

        def reward_of(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
            texts = [f"{prompt} {text}" for prompt, text in zip(prompts, completions, strict=True)]
            return scores(reward, tokenizer, texts).tolist()

        print("3. policy")
        policy, reference = (AutoModelForCausalLM.from_pretrained(start) for _ in range(2))
        before = judged(policy, reference, reward, tokenizer)
        sampling = {"num_generations": 4, "max_completion_length": 6, "beta": given.beta}
        RLOOTrainer(
            policy,
            reward_of,
            RLOOConfig(learning_rate=1e-3, gradient_checkpointing=False, **sampling, **shared),
            train_dataset=Dataset.from_list([{"prompt": f"the {thing} is"} for thing in THINGS * 16]),
            processing_class=tokenizer,
        ).train()
        after = judged(policy, reference, reward, tokenizer)
        for part in (policy, tokenizer):
            part.save_pretrained(f"{work}/done")
        Path(work, "done").rename(given.output)
    for name, found in (("before", before), ("after", after)):
        print(f"{name:7} reward {found['reward']:+.2f}, warm colours {found['warm']:.0%}, e.g. {found['sample']!r}")
    print(f"divergence from the start: {after['divergence']:.2f} nats per token; policy in {given.output}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
