"""Train a small CLIP from scratch on emoji and their names, with the contrastive loss and `Trainer`.

    python examples/train_emoji_clip.py --output emoji-clip

Pictures and names are those of the npm package emoji-datasource-twitter (62 MB; Twemoji, CC-BY 4.0). A text is the name
and the group, "grinning face, face smiling". Retrieval is measured on emoji that were kept from training: of all their
pictures, which belongs to this text, and the other way round. Variants of an emoji stay on one side of the split:
those of skin tone, of gender (man, woman and person, boy and girl), and of direction ("facing right"), so that a test
picture has no near copy in training. The folder loads as an `ExtCLIPModel` with a processor; give it pictures on white.
"""

import argparse
import io
import json
import re
import tarfile
from collections import defaultdict
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from transformers import CLIPImageProcessor, CLIPProcessor, CLIPTokenizer, Trainer, TrainingArguments, set_seed

import hf_ext
from hf_ext.data.packages import fetch_package
from hf_ext.training import LogitScaleLimit

PACKAGE = ("emoji-datasource-twitter", "16.0.0", "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877")
SIDE, SHIFT, LONGEST, WORDS = 48, 3, 24, 1000  # pixels of an image and of its moves, tokens of a text and in all
TOWER = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
# Code points: skin tones, gender signs, arrows of direction, joiners; and people, who all count as one.
VARIANT = re.compile(r"1F3F[B-F]|2640|2642|27A1|200D|FE0F")
PEOPLE = {"1F468": "adult", "1F469": "adult", "1F9D1": "adult", "1F466": "child", "1F467": "child", "1F9D2": "child"}


def concept(unified: str) -> str:
    """What is left of an emoji's code points without what makes a variant of it."""
    return "-".join(PEOPLE.get(p, p) for p in unified.split("-") if not VARIANT.fullmatch(p)) or unified


def read_emoji(package: Path) -> list[dict]:
    """Every emoji with a picture: `text`, `concept`, and `images` (n, 3, 48, 48) from -1 to 1, of all skin tones, the
    one without first."""
    place = "package/img/twitter/64/"
    with tarfile.open(package) as archive:
        files = {m.name.removeprefix(place): m for m in archive if m.name.startswith((place, "package/emoji.json"))}
        found = []
        for entry in json.load(archive.extractfile(files["package/emoji.json"])):
            names = [one["image"] for one in (entry, *entry.get("skin_variations", {}).values())]
            images = [as_pixels(archive.extractfile(files[name]).read()) for name in names if name in files]
            text = f"{entry['name']}, {entry['subcategory'].replace('-', ' ')}".lower()
            if images:
                found.append({"text": text, "concept": concept(entry["unified"]), "images": torch.stack(images)})
    return found


def as_pixels(png: bytes) -> Tensor:  # (3, 48, 48), white where nothing is
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    pixels = numpy.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=numpy.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1


def split(emoji: list[dict]) -> tuple[list[dict], list[dict]]:
    """To train on, and to test on: 15 percent of the concepts, the same in every run, with one emoji of each."""
    concepts = defaultdict(list)
    for one in emoji:
        concepts[one["concept"]].append(one)
    groups = list(concepts.values())
    groups = [groups[i] for i in torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]
    test, train = groups[: len(groups) * 3 // 20], groups[len(groups) * 3 // 20 :]
    return [one for group in train for one in group], [group[0] for group in test]


class Pairs(Dataset):
    """For training: a picture at random among an emoji's skin tones, moved by some pixels, and its text."""

    def __init__(self, emoji: list[dict], texts: dict[str, Tensor]) -> None:
        self.emoji, self.texts = emoji, texts

    def __len__(self) -> int:
        return len(self.emoji)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        image = self.emoji[i]["images"]
        image = torch.nn.functional.pad(image[torch.randint(len(image), ())], (SHIFT,) * 4, value=1.0)
        down, right = torch.randint(2 * SHIFT + 1, (2,)).tolist()
        row = {name: value[i] for name, value in self.texts.items()}
        return {"pixel_values": image[:, down : down + SIDE, right : right + SIDE], **row}


@torch.no_grad()
def recall(model: hf_ext.ExtCLIPModel, images: Tensor, texts: dict[str, Tensor]) -> dict[str, float]:
    """How often the right one is the nearest, or among the five nearest, of all: `text to image @1` and so on."""
    scores, found = model.eval()(pixel_values=images, **texts).logits_per_text, {}
    for name, table in (("text to image", scores), ("image to text", scores.T)):
        better = (table > table.diagonal()[:, None]).sum(-1)
        found |= {f"{name} @{k}": float((better < k).float().mean()) for k in (1, 5)}
    return found


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--package", type=Path, default=None, help="the package's .tgz file; downloaded if not given")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        parser.error(f"{options.output} is not empty; give another folder")
    set_seed(0)
    train, test = split(read_emoji(options.package or fetch_package(*PACKAGE, kind="npm")))
    empty = CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1}, merges=[], model_max_length=LONGEST)
    tokenizer = empty.train_new_from_iterator([one["text"] for one in train], WORDS, show_progress=False)

    def tokens(emoji: list[dict]) -> dict[str, Tensor]:
        return dict(tokenizer([e["text"] for e in emoji], padding=True, truncation=True, return_tensors="pt"))

    text = {**TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": LONGEST}
    text |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    vision = {**TOWER, "image_size": SIDE, "patch_size": SIDE // 4}
    model = hf_ext.ExtCLIPModel(hf_ext.ExtCLIPConfig(text_config=text, vision_config=vision, projection_dim=128))
    settings = TrainingArguments(
        "unused", num_train_epochs=options.epochs, per_device_train_batch_size=options.batch_size, learning_rate=1e-3,
        lr_scheduler_type="cosine", warmup_steps=0.1, weight_decay=0.1, save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip

    with_loss = {"data_collator": lambda rows: {**default_collate(rows), "return_loss": True}}
    trainer = Trainer(model, settings, train_dataset=Pairs(train, tokens(train)), **with_loss)
    trainer.add_callback(LogitScaleLimit())
    seconds = trainer.train().metrics["train_runtime"]
    images = torch.stack([one["images"][0] for one in test]).to(model.device)
    found = recall(model, images, {name: value.to(model.device) for name, value in tokens(test).items()})
    print(f"{model.num_parameters():,} parameters, {len(train)} emoji to train on, {seconds:.0f} s")
    print(f"recall among {len(test)} held-out pairs, by chance {1 / len(test):.1%} @1 and {5 / len(test):.1%} @5:")
    print(*(f"  {name}: {value:.1%}" for name, value in found.items()), sep="\n")
    model.save_pretrained(options.output)
    pictures = CLIPImageProcessor(size=(SIDE, SIDE), do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    CLIPProcessor(pictures, tokenizer).save_pretrained(options.output)
    return {"recall": found, "chance": 1 / len(test), "train": train, "test": test}


if __name__ == "__main__":
    main()
