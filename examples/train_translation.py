"""Train the Transformer of 2017 from scratch to translate English into German, as in the paper but small.

    python examples/train_translation.py --output translator

The text is that of Debian's package descriptions, which translators keep in German too: about 33,000 synopses and
sentences, fetched once with apt from the sources it is configured with (`hf_ext.data.debian`; Debian or a derivative
is needed, root is not). Whole source packages are held out, and what resembles their texts is not trained on.

One BPE vocabulary for both languages is trained on the training pairs, then an `ext_transformer` with `Seq2SeqTrainer`:
Noam's learning rate, label smoothing and teacher forcing as in the paper; its average of the last checkpoints is
`--average 5`. BLEU (sacreBLEU, of what beam search makes of the held-out texts) is
printed next to that of the English text as it is.
Needs `pip install "hf-ext[metrics]"`. A run that was broken off goes on with `--resume`.
"""

import argparse
import json
import time
from pathlib import Path

from datasets import Dataset
from sacrebleu import corpus_bleu
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from hf_ext import ExtTransformerConfig, ExtTransformerForConditionalGeneration
from hf_ext.data.debian import Pair, fetch_lists, split_by_source, translations
from hf_ext.data.vocabulary import train_bpe
from hf_ext.training import TimeLimit, average_checkpoints, noam


def encode(pairs: list[Pair], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Rows of `input_ids` and `labels`."""
    options = {"truncation": True, "return_token_type_ids": False, "return_attention_mask": False}
    texts, targets = [pair.text for pair in pairs], [pair.target for pair in pairs]
    return Dataset.from_dict(dict(tokenizer(texts, text_target=targets, **options)))


def main(argv: list[str] | None = None) -> dict:
    """Train, print, and return `bleu`, `copying` (the BLEU of the English text) and the numbers of pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", default="translator", help="folder for checkpoints, model and result")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in that folder")
    parser.add_argument("--lists", type=Path, help="folder of apt's lists, if they are already there")
    parser.add_argument("--epochs", type=float, default=12, help="passes over the training pairs")
    parser.add_argument("--minutes", type=float, default=30, help="train no longer than that")
    parser.add_argument("--held-out", type=int, default=1500, help="pairs to test with")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=128, help="model width")
    parser.add_argument("--layers", type=int, default=3, help="of either half")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=4000)
    parser.add_argument("--length", type=int, default=80, help="most tokens of a text; longer ones are cut")
    parser.add_argument("--warmup-steps", type=int, default=800)
    parser.add_argument("--save-steps", type=int, default=300)
    parser.add_argument("--average", type=int, default=1, help="last checkpoints to average")
    args = parser.parse_args(argv)
    output = Path(args.output)
    if output.exists() and any(output.iterdir()) and not args.resume:
        parser.error(f"{output} is not empty; give another --output, or --resume to go on with the training there")
    if args.resume and not any(output.glob("checkpoint-*")):
        parser.error(f"{output} has no checkpoint to go on from; leave out --resume")

    set_seed(0)
    pairs = translations(args.lists or fetch_lists("en", "de"), "en", "de")
    train, test = split_by_source(pairs, held_out=args.held_out)
    both = [text for pair in train for text in (pair.text, pair.target)]
    tokenizer = train_bpe(both, vocab_size=args.vocab_size, longest=args.length)
    config = ExtTransformerConfig.preset(
        "transformer-base",
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.length + 1,
        norm_placement="pre",  # learns from the first steps on; the paper's needs a long warm-up
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = ExtTransformerForConditionalGeneration(config)
    print(f"{len(train):,} pairs to train on, {len(test):,} to test with, {model.num_parameters():,} parameters")

    settings = Seq2SeqTrainingArguments(
        output_dir=str(output),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        train_sampling_strategy="group_by_length",
        save_steps=args.save_steps,
        save_total_limit=args.average,
        logging_steps=50,
        predict_with_generate=True,
        generation_num_beams=4,
        generation_max_length=args.length,
        report_to="none",
    )
    trainer = Seq2SeqTrainer(
        model,
        settings,
        train_dataset=encode(train, tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        processing_class=tokenizer,
        optimizers=noam(model, warmup_steps=args.warmup_steps),
        callbacks=[TimeLimit(args.minutes)],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    averaged = average_checkpoints(model, output, args.average)
    trainer.save_model(str(output))

    settings.train_sampling_strategy = "random"  # by length, predictions would come in another order than the texts
    ids = trainer.predict(encode(test, tokenizer)).predictions
    ids[ids < 0] = tokenizer.pad_token_id
    made = [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    texts, targets = [pair.text for pair in test], [[pair.target for pair in test]]
    result = {"bleu": corpus_bleu(made, targets).score, "copying": corpus_bleu(texts, targets).score}
    result |= {"train": len(train), "test": len(test), "steps": trainer.state.global_step, "averaged": averaged}
    result["cpu_minutes"] = round(time.process_time() / 60, 1)
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    rows = [{"text": text, "target": target, "made": own} for text, target, own in zip(texts, targets[0], made)]
    (output / "translations.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print(f"BLEU {result['bleu']:.1f} after {result['steps']} steps; copying the English text: {result['copying']:.1f}")
    return result


if __name__ == "__main__":
    main()
