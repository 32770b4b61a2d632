"""Train or fine-tune an encoder-decoder to say in one line what a text is about.

    python examples/finetune_summarisation.py --output summariser
    python examples/finetune_summarisation.py --model path/to/t5-small --prefix "summarize: " --output summariser

The texts are the descriptions of Debian's packages, the summaries their synopses: about 36,000 pairs, fetched once with
apt from the sources it is configured with (`hf_ext.data.debian`; Debian or a derivative is needed, root is not). Whole
source packages are held out, and what resembles their texts is not trained on.

`--model` is any official checkpoint of T5, mT5, BART or mBART; without it a small random T5 with a vocabulary of its
own is trained. ROUGE (F-measures, in per cent) of what beam search makes of the held-out texts is printed next to that
of their first words. Needs `pip install "hf-ext[metrics]"`; `--resume` goes on with a run that was broken off.
"""

import argparse
import json
import time
from pathlib import Path

from datasets import Dataset
from rouge_score.rouge_scorer import RougeScorer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

import hf_ext
from hf_ext.data.debian import Pair, fetch_lists, split_by_source, summaries
from hf_ext.data.vocabulary import train_bpe
from hf_ext.training import TimeLimit

LEAD, LONGEST = 8, 32  # words of the text that do best as a summary, and tokens of a summary


def rouge(made: list[str], targets: list[str]) -> dict[str, float]:
    """Means of the F-measures, in per cent."""
    scorer = RougeScorer(kinds := ("rouge1", "rouge2", "rougeL"), use_stemmer=True)
    scores = [scorer.score(target, text) for text, target in zip(made, targets)]
    return {kind: round(100 * sum(score[kind].fmeasure for score in scores) / len(scores), 1) for kind in kinds}


def small_t5(train: list[Pair], args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A random T5, and a vocabulary trained on the texts."""
    tokenizer = train_bpe((x for pair in train for x in pair[:2]), vocab_size=4000, longest=args.length)
    config = hf_ext.ExtT5Config(
        vocab_size=len(tokenizer),
        d_model=args.width,
        d_kv=args.width // 4,
        d_ff=4 * args.width,
        num_layers=args.layers,
        num_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return hf_ext.ExtT5ForConditionalGeneration(config), tokenizer


def encode(pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> Dataset:
    """Rows of `input_ids`, `attention_mask` and `labels`."""
    rows = tokenizer([args.prefix + p.text for p in pairs], truncation=True, max_length=args.length)
    labels = tokenizer(text_target=[p.target for p in pairs], truncation=True, max_length=LONGEST).input_ids
    return Dataset.from_dict({"input_ids": rows.input_ids, "attention_mask": rows.attention_mask, "labels": labels})


def main(argv: list[str] | None = None) -> dict:
    """Train, print, and return `rouge` and `lead` (the first words' ROUGE) and the numbers of pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", default="summariser", help="folder for checkpoints, model and result")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in that folder")
    parser.add_argument("--model", help="official checkpoint to fine-tune; a small random T5 if not given")
    parser.add_argument("--prefix", default="", help="put before each text, as the checkpoint was trained with")
    parser.add_argument("--lists", type=Path, help="folder of apt's lists, if they are already there")
    parser.add_argument("--epochs", type=float, default=10, help="passes over the training pairs")
    parser.add_argument("--minutes", type=float, default=30, help="train no longer than that")
    parser.add_argument("--held-out", type=int, default=500, help="pairs to test with")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="highest; 1e-4 or so for a checkpoint")
    parser.add_argument("--width", type=int, default=128, help="model width, without --model")
    parser.add_argument("--layers", type=int, default=3, help="of either half, without --model")
    parser.add_argument("--length", type=int, default=64, help="most tokens of a text; longer ones are cut")
    args = parser.parse_args(argv)
    output = Path(args.output)
    if output.exists() and any(output.iterdir()) and not args.resume:
        parser.error(f"{output} is not empty; give another --output, or --resume to go on with the training there")
    if args.resume and not any(output.glob("checkpoint-*")):
        parser.error(f"{output} has no checkpoint to go on from; leave out --resume")

    set_seed(0)
    pairs = summaries(args.lists or fetch_lists("en", "de"), shortest=15, longest=60)
    train, test = split_by_source(pairs, held_out=args.held_out)
    if args.model:
        with hf_ext.takeover():
            model, tokenizer = (x.from_pretrained(args.model) for x in (AutoModelForSeq2SeqLM, AutoTokenizer))
    else:
        model, tokenizer = small_t5(train, args)
    print(f"{type(model).__name__}; {len(train):,} pairs to train on, {len(test):,} to test with")

    settings = Seq2SeqTrainingArguments(
        output_dir=str(output),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=400,
        train_sampling_strategy="group_by_length",
        save_steps=300,
        save_total_limit=1,
        predict_with_generate=True,
        generation_num_beams=4,
        generation_max_length=LONGEST,
        report_to="none",
    )
    trainer = Seq2SeqTrainer(
        model,
        settings,
        train_dataset=encode(train, tokenizer, args),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        processing_class=tokenizer,
        callbacks=[TimeLimit(args.minutes)],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model(str(output))

    settings.train_sampling_strategy = "random"  # by length, predictions would come in another order than the texts
    ids = trainer.predict(encode(test, tokenizer, args)).predictions
    ids[ids < 0] = tokenizer.pad_token_id
    made, targets = tokenizer.batch_decode(ids, skip_special_tokens=True), [pair.target for pair in test]
    leads = [" ".join(pair.text.split()[:LEAD]) for pair in test]
    result = {"rouge": rouge(made, targets), "lead": rouge(leads, targets), "train": len(train), "test": len(test)}
    result |= {"steps": trainer.state.global_step, "cpu_minutes": round(time.process_time() / 60, 1)}
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    rows = [{"text": pair.text, "target": pair.target, "made": text.strip()} for pair, text in zip(test, made)]
    (output / "summaries.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print(f"ROUGE after {result['steps']} steps: {result['rouge']}; of the first {LEAD} words: {result['lead']}")
    return result


if __name__ == "__main__":
    main()
