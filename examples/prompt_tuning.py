"""Prompt tuning (Lester et al., 2021, https://arxiv.org/abs/2104.08691) with PEFT: a frozen decoder learns a task from
a few vectors before the text, the only ones that are trained.

    python examples/convert_smollm2_gguf.py --output smollm2
    python examples/prompt_tuning.py --model smollm2 --steps 60 --output tuned-prompt

The task is that of few_shot_prompting.py: which part of Python's standard library is a docstring from? The vectors
start as those of an instruction in words. `Trainer` minimises the loss of the topic's words after the text, and a text
gets the topic whose words are likeliest. What is saved is the prompt alone; it is loaded again into a fresh model.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import torch
from peft import PeftModel, PromptTuningConfig, PromptTuningInit, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hf_ext
from hf_ext.data.docstrings import TOPICS, load_docstrings


def example(tokenizer: PreTrainedTokenizerBase, text: str, topic: str, words: int) -> dict[str, list[int]]:
    """One row; only the words of the topic count in the loss."""
    prompt = tokenizer(f"Docstring: {' '.join(text.split()[:words])}\nTopic:").input_ids
    answer = tokenizer(f" {topic}", add_special_tokens=False).input_ids
    ids = prompt + answer
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * len(prompt) + answer}


@torch.no_grad()
def likelihoods(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Log likelihood of the words that count, row by row. (B,)

    B rows, T tokens, P virtual tokens in front, V vocabulary.
    """
    batch = {name: value.to(model.device) for name, value in batch.items()}
    labels = batch.pop("labels")[:, 1:]  # (B, T - 1)
    logits = model.eval()(**batch).logits  # (B, P + T, V)
    logits = logits[:, -labels.shape[1] - 1 : -1].float()  # (B, T - 1, V)
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]  # (B, T - 1)
    return chosen.masked_fill(labels < 0, 0).sum(-1)


def train(model: nn.Module, rows: list[dict], collator: DataCollatorForSeq2Seq, args: argparse.Namespace) -> None:
    """A plain Trainer; the learning rate is high, as few vectors have to do it all."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            scratch, max_steps=args.steps, per_device_train_batch_size=args.batch_size, warmup_steps=0.1,
            learning_rate=args.learning_rate, weight_decay=0.0, seed=args.seed, save_strategy="no",
            logging_steps=max(1, args.steps // 6), disable_tqdm=True, report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=rows, data_collator=collator)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    for entry in trainer.state.log_history[:-1]:
        print(f"step {entry['step']}: loss {entry['loss']:.3f}")


def main(argv: list[str] | None = None) -> dict:
    """Tune, measure, save, reload; print and return what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="folder or Hub id of a causal decoder")
    parser.add_argument("--output", default="tuned-prompt", help="folder for the prompt")
    parser.add_argument("--topics", nargs="+", default=["datetime", "email", "unittest", "xml"], choices=sorted(TOPICS))
    parser.add_argument("--virtual-tokens", type=int, default=20, help="vectors to train")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--texts", type=int, default=50, help="texts to test on")
    parser.add_argument("--words", type=int, default=24, help="words that are kept of a text")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    def load() -> PreTrainedModel:
        with hf_ext.takeover():
            return AutoModelForCausalLM.from_pretrained(args.model)

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="right")
    data = load_docstrings(args.seed, topics={name: TOPICS[name] for name in args.topics})
    topics = data["test"].features["label"].names
    rows = [example(tokenizer, row["text"], topics[row["label"]], args.words) for row in data["train"]]
    test = data["test"].select(range(min(args.texts, len(data["test"]))))
    collator = DataCollatorForSeq2Seq(tokenizer)

    def scores(model: nn.Module) -> Tensor:  # (texts, topics)
        batches = (collator([example(tokenizer, text, t, args.words) for t in topics]) for text in test["text"])
        return torch.stack([likelihoods(model, batch) for batch in batches])

    def accuracy(scores: Tensor) -> float:
        return (scores.argmax(-1).cpu() == torch.tensor(test["label"])).float().mean().item()

    set_seed(args.seed)
    config = PromptTuningConfig(
        task_type=TaskType.CAUSAL_LM,
        num_virtual_tokens=args.virtual_tokens,
        prompt_tuning_init=PromptTuningInit.TEXT,
        prompt_tuning_init_text=f"The topic of each docstring is one of: {', '.join(topics)}.\n\n",
        tokenizer_name_or_path=args.model,
    )
    model = get_peft_model(load(), config)
    trainable, total = model.get_nb_trainable_parameters()
    result = {"majority": max(Counter(test["label"]).values()) / len(test), "share": trainable / total}
    print(
        f"{type(model.base_model).__name__}, {trainable:,} of {total:,} parameters are trained ({result['share']:.4%})"
    )
    result["before"] = accuracy(scores(model))
    train(model, rows, collator, args)
    after = scores(model)
    result["after"] = accuracy(after)
    model.save_pretrained(args.output)
    result["bytes"] = (Path(args.output) / "adapter_model.safetensors").stat().st_size
    again = scores(PeftModel.from_pretrained(load(), args.output))
    result["difference"] = (again - after).abs().max().item()
    print(
        f"{len(test)} docstrings of {', '.join(topics)}; always the most frequent topic: {result['majority']:.1%}\n"
        f"with the instruction as prompt: {result['before']:.1%} right; tuned: {result['after']:.1%}\n"
        f"{args.output}: {result['bytes'] / 1024:.0f} KiB; reloaded, log likelihoods within {result['difference']:.0e}"
    )
    return result


if __name__ == "__main__":
    main()
