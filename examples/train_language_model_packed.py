"""Train a language model from scratch on rows that hold several texts each, so that nothing is spent on padding.

    python examples/train_language_model_packed.py --architecture gpt_neox --steps 300

The text is CPython's own reference (`pydoc_data.topics`, half a megabyte that every installation holds). Its paragraphs
have very unequal lengths: `DataCollatorWithFlattening` puts a whole batch of them end to end in one row and numbers the
positions from zero in each, and that is all a decoder of this package needs to keep them apart.

Any causal decoder of `hf-ext models` can be named. The loss on held-out paragraphs is printed before and after, and the
model writes a few words. `--output` keeps the model and its tokenizer for `hf-ext generate`.
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hf_ext
from hf_ext.modeling import DecoderModel

END = "<|endoftext|>"


def paragraphs() -> list[str]:
    """The reference's paragraphs, in a fixed order; headings and other short lines are left out."""
    return [p.strip() for name in sorted(topics) for p in topics[name].split("\n\n") if len(p) > 60]


def train_tokenizer(texts: list[str], vocab_size: int, longest: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2 has it: any text can be spelled, so no unknown token is needed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, model_max_length=longest)


def build(architecture: str, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> PreTrainedModel:
    """A small random model. The general names of the sizes work for all: GPT-2 reads `hidden_size` as its `n_embd`."""
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": args.width,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.heads,
        "intermediate_size": 4 * args.width,
        "max_position_embeddings": args.length,
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model_type = hf_ext.architecture_of(architecture).model_type
    default = AutoConfig.for_model(model_type)
    config = AutoConfig.for_model(model_type, **{name: v for name, v in sizes.items() if hasattr(default, name)})
    model = AutoModelForCausalLM.from_config(config)
    if not isinstance(model.base_model, DecoderModel):
        raise ValueError(f"{architecture} is not a causal decoder; `hf-ext models` lists them all.")
    return model


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, new_tokens: int) -> str:
    """The prompt and what the model makes of it."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    ids = model.eval().generate(**inputs, max_new_tokens=new_tokens, do_sample=True, temperature=0.8, top_k=40)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def main(argv: list[str] | None = None) -> dict:
    """Train, print, and return `before`, `after` (losses in nats per token) and `sample`."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--architecture", default="llama", help="a causal decoder, as `hf-ext models` names it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="paragraphs in one packed row")
    parser.add_argument("--length", type=int, default=128, help="most tokens of a paragraph; longer ones are cut")
    parser.add_argument("--width", type=int, default=128, help="model width")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--prompt", default="The following ")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--output", help="folder to save the model in")
    args = parser.parse_args(argv)

    set_seed(0)
    texts = paragraphs()
    tokenizer = train_tokenizer(texts, args.vocab_size, args.length)
    rows = [{"input_ids": tokenizer(text + END, truncation=True).input_ids} for text in texts]
    held_out, train = rows[::10], [row for i, row in enumerate(rows) if i % 10]
    try:
        model = build(args.architecture, tokenizer, args)
    except ValueError as error:  # an unknown name, or sizes that do not fit together
        parser.error(str(error))
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters, {len(train)} paragraphs to train on")

    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            output_dir=scratch,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, args.steps // 20),
            prediction_loss_only=True,  # the logits of packed rows of unequal lengths have no common shape
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        collator = DataCollatorWithFlattening()
        trainer = Trainer(model, settings, train_dataset=train, eval_dataset=held_out, data_collator=collator)
        trainer.remove_callback(PrinterCallback)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    sample = write(model, tokenizer, args.prompt, args.new_tokens)
    print(f"loss on held-out text: {before:.3f} before, {after:.3f} after {args.steps} steps\n---\n{sample}")
    if args.output:
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    return {"before": before, "after": after, "sample": sample, "model": type(model).__name__}


if __name__ == "__main__":
    torch.set_num_threads(min(4, torch.get_num_threads()))
    main()
