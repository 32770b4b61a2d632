"""Train a small ViT or Swin from scratch on the handwritten digits of scikit-learn, with `Trainer`.

    python examples/train_digits.py --architecture vit --output digits-vit
    python examples/train_digits.py --architecture swin --output digits-swin

1,797 grey images of 8 x 8 pixels, of which every fifth of each digit is kept for the test. No download. With an output
folder, `pipeline("image-classification", folder)` recognises digits in it once `hf_ext` is imported.
"""

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainingArguments, ViTImageProcessor, set_seed
from transformers.utils import logging

import hf_ext

SIDE, DARKEST = 8, 16  # pixels of an image, and the largest value of one
# Weights of such narrow models have to start larger than those of the large ones that the defaults are for.
COMMON = {"image_size": SIDE, "num_labels": 10, "initializer_range": 0.1}
CONFIGS = {
    "vit": hf_ext.ExtViTConfig(
        **COMMON, patch_size=4, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
    ),
    "swin": hf_ext.ExtSwinConfig(
        **COMMON,
        patch_size=2,
        embed_dim=48,
        depths=(2, 2),
        num_heads=(3, 6),
        window_size=2,
        mlp_ratio=2.0,
        drop_path_rate=0.0,
        use_absolute_embeddings=True,  # windows tell places apart by a bias only, which has to be learned first
    ),
}
CLASSES = {"vit": hf_ext.ExtViTForImageClassification, "swin": hf_ext.ExtSwinForImageClassification}


class Digits(Dataset):
    """Images (3, 8, 8) from -1 to 1, in grey, and their digits.

    Args:
        images: (n, 64), 0 to 16.
        shifted: whether to move each image by up to a pixel, another way each time.
    """

    def __init__(self, images: Tensor, labels: Tensor, shifted: bool) -> None:
        images = images.view(-1, 1, SIDE, SIDE).expand(-1, 3, -1, -1)  # three colours, as a pipeline gives them
        self.images, self.labels, self.shifted = images / (DARKEST / 2) - 1, labels, shifted

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        image = self.images[i]
        if self.shifted:
            down, right = torch.randint(3, (2,)).tolist()
            image = torch.nn.functional.pad(image, (1, 1, 1, 1), value=-1.0)
            image = image[:, down : down + SIDE, right : right + SIDE]
        return {"pixel_values": image, "labels": self.labels[i]}


def splits() -> tuple[Digits, Digits]:
    """To train on and to test on, the same in every run, with the same share of each digit."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return tuple(Digits(images[part].float(), labels[part], part is train) for part in (train, test))


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--architecture", choices=CONFIGS, default="vit")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its highest")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order; the split is fixed")
    parser.add_argument("--output", type=Path, default=None, help="folder to write; nothing is written without one")
    options = parser.parse_args(arguments)
    if options.output is not None and options.output.exists() and any(options.output.iterdir()):
        parser.error(f"{options.output} is not empty; give another folder")
    logging.disable_progress_bar()
    set_seed(options.seed)
    train, test = splits()
    model = CLASSES[options.architecture](CONFIGS[options.architecture])
    trainer = Trainer(
        model,
        TrainingArguments(
            "unused",  # nothing is saved on the way
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch_size,
            per_device_eval_batch_size=256,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            weight_decay=0.05,
            seed=options.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
    )
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    result = trainer.evaluate()
    print(
        f"{type(model).__name__}, {model.num_parameters():,} parameters, {options.epochs} epochs in {seconds:.0f} s: "
        f"{result['eval_accuracy']:.1%} of {len(test)} test images right"
    )
    if options.output is not None:
        model.save_pretrained(options.output)
        ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(options.output)
        print(f"saved to {options.output}")
    return {
        "model": model,
        "accuracy": result["eval_accuracy"],
        "seconds": seconds,
        "parameters": model.num_parameters(),
    }


if __name__ == "__main__":
    main()
