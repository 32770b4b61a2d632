"""Parallel text and summaries without a hub: the descriptions of Debian's packages.

Each package has a synopsis of one line and a body of paragraphs, in English and, for many, in other languages:
translators work on the very text, so both carry its md5 sum. `fetch_lists` gets the lists with `apt-get update` from
the sources that apt is configured with, into a folder of this package's own and without root; the others read them.

    lists = fetch_lists("en", "de")
    train, test = split_by_source(translations(lists, "en", "de"), held_out=1500)
"""

import os
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.constants import HF_HOME

# Plain files, whatever apt's own settings are, and none of the steps that they hang on an update.
_CONFIGURATION = """\
Dir::State::Lists "{folder}/lists";
Dir::Cache "{folder}/cache";
Acquire::Languages "{languages}";
Acquire::GzipIndexes "false";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""
_SENTENCE_END = re.compile(r'(?<=[.!?])\s+(?=[A-ZÄÖÜ0-9"„(])')


class Description(NamedTuple):
    """A package's description in one language. A paragraph is None where it is a list or a table."""

    package: str
    source: str
    synopsis: str
    paragraphs: tuple[str | None, ...]


class Pair(NamedTuple):
    """One example: a text, what is to be made of it, and the source package that it is from."""

    text: str
    target: str
    source: str


def fetch_lists(*languages: str) -> Path:
    """Folder of apt's lists with the descriptions in these languages ("en", "de"), fetched once into the cache
    (`HF_HOME/hf_ext/debian`).

    Raises:
        RuntimeError: apt is missing, or its sources gave no descriptions in one of the languages; apt's last words are
            in the message.
    """
    name = "-".join(sorted(languages))
    place = Path(HF_HOME) / "hf_ext" / "debian" / name
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        lists = Path(folder, "lists")
        for part in (lists / "partial", Path(folder, "cache")):
            part.mkdir(parents=True)
        settings = Path(folder, "apt.conf")
        settings.write_text(_CONFIGURATION.format(folder=folder, languages=",".join(languages)))
        try:
            done = subprocess.run(["apt-get", "update", "-c", settings], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise RuntimeError(
                "apt-get is not installed; the descriptions of Debian's packages come with it."
            ) from None
        missing = [language for language in languages if not list(lists.glob(f"*Translation-{language}"))]
        if done.returncode != 0 or missing:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            what = f"gave no descriptions in {', '.join(missing)}" if missing else "failed"
            raise RuntimeError(f"`apt-get update` with apt's own sources {what}: {last}")
        try:
            os.rename(lists, place)
        except OSError:  # another process was faster
            if not place.is_dir():
                raise
    return place


def stanzas(file: Path) -> Iterator[dict[str, list[str]]]:
    """The entries of a Debian control file: field -> its lines, the leading blank of further lines kept."""
    entry: dict[str, list[str]] = {}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            line = line.rstrip("\n")
            if not line:
                if entry:
                    yield entry
                entry = {}
            elif line.startswith(" "):
                next(reversed(entry.values())).append(line)
            else:
                name, _, value = line.partition(":")
                entry[name] = [value.strip()]
    if entry:
        yield entry


def read_descriptions(lists: Path, language: str) -> dict[str, Description]:
    """md5 sum of the English text -> its description in `language`.

    Raises:
        ValueError: the folder has no descriptions in that language.
    """
    files = sorted(lists.glob(f"*Translation-{language}"))
    if not files:
        raise ValueError(f"{lists} holds no descriptions in {language!r} (a file *Translation-{language}).")
    sources = {}
    for file in sorted(lists.glob("*_Packages")):
        for entry in stanzas(file):
            if "Source" in entry:  # "name" or "name (version)"; without it the source has the package's name
                sources[entry["Package"][0]] = entry["Source"][0].split()[0]
    found = {}
    for file in files:
        for entry in stanzas(file):
            package = entry["Package"][0]
            synopsis, *body = entry[f"Description-{language}"]
            source = sources.get(package, package)
            found[entry["Description-md5"][0]] = Description(package, source, synopsis, paragraphs(body))
    return found


def paragraphs(lines: list[str]) -> tuple[str | None, ...]:
    """The paragraphs of a body, each as one line; None for those with lines that must not be joined."""
    groups: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == ".":
            groups.append([])
        else:
            groups[-1].append(line)
    return tuple(
        None if any(line.startswith("  ") for line in group) else " ".join(" ".join(group).split())
        for group in groups
        if group
    )


def translations(lists: Path, language: str, other: str, *, longest: int = 25) -> list[Pair]:
    """Texts in one language with their translation into another: synopses, and the sentences of paragraphs.

    Paragraphs are paired where both descriptions have as many of them, and cut into sentences where both have as many
    of those. Texts that were left untranslated, and those with a number of words over `longest`, are left out; of equal
    texts (case, digits and punctuation aside) the first is kept.

    Raises:
        ValueError: the folder has no descriptions in one of the languages.
    """
    texts, targets = read_descriptions(lists, language), read_descriptions(lists, other)
    rows = []
    for key in sorted(texts.keys() & targets.keys()):
        (package, source, synopsis, body), target = texts[key], targets[key]
        rows.append((package, Pair(synopsis, target.synopsis, source)))
        if len(body) != len(target.paragraphs):
            continue
        for one, two in zip(body, target.paragraphs):
            if one and two:
                parts = _SENTENCE_END.split(one), _SENTENCE_END.split(two)
                cut = zip(*parts) if len(parts[0]) == len(parts[1]) else [(one, two)]
                rows += [(package, Pair(a, b, source)) for a, b in cut]
    pairs = [pair for _, pair in sorted(rows)]  # whatever order the mirror has
    return distinct([p for p in pairs if p.text != p.target and max(map(words, p[:2])) <= longest])


def summaries(lists: Path, language: str = "en", *, shortest: int = 20, longest: int = 200) -> list[Pair]:
    """Bodies of descriptions with their synopses; `shortest` and `longest` bound a body's number of words.

    Raises:
        ValueError: the folder has no descriptions in that language.
    """
    found = sorted(read_descriptions(lists, language).values(), key=lambda row: (row.source, row.package))
    pairs = [Pair(" ".join(filter(None, row.paragraphs)), row.synopsis, row.source) for row in found]
    return distinct([pair for pair in pairs if shortest <= words(pair.text) <= longest])


def words(text: str) -> int:
    """How many words a text has."""
    return len(text.split())


def normalised(text: str) -> str:
    """A text without case, digits and punctuation."""
    return " ".join(re.findall(r"[^\W\d_]+", text.casefold()))


def distinct(pairs: list[Pair]) -> list[Pair]:
    """The first of all pairs whose texts are equal but for case, digits and punctuation."""
    first: dict[str, Pair] = {}
    for pair in pairs:
        first.setdefault(normalised(pair.text), pair)
    first.pop("", None)
    return list(first.values())


def split_by_source(
    pairs: list[Pair], *, held_out: int, seed: int = 0, alike: float = 0.6
) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and pairs to test with that the training has not seen in any form.

    Whole source packages are drawn until they have `held_out` pairs. Descriptions of different sources resemble each
    other too: of the rest, every pair is dropped whose text or target shares `alike` or more of its words with one that
    is held out (words of both over words of either, without case, digits and punctuation).

    Raises:
        ValueError: the pairs are not more than `held_out`.
    """
    if not 0 < held_out < len(pairs):
        raise ValueError(f"held_out must be between 1 and {len(pairs) - 1}, one less than there are pairs: {held_out}.")
    rng = random.Random(seed)
    sources = sorted({pair.source for pair in pairs})
    rng.shuffle(sources)
    of_source: dict[str, list[Pair]] = {}
    for pair in pairs:
        of_source.setdefault(pair.source, []).append(pair)
    test: list[Pair] = []
    while len(test) < held_out:
        test += of_source.pop(sources.pop())
    rest = [pair for source in sources for pair in of_source[source]]
    seen = [overlaps([p[side] for p in rest], [p[side] for p in test], alike) for side in (0, 1)]
    train = [pair for pair, *found in zip(rest, *seen) if not any(found)]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def overlaps(texts: list[str], others: list[str], alike: float) -> list[bool]:
    """Whether each text shares `alike` or more of its words with one of the others."""
    import numpy as np
    from sklearn.feature_extraction.text import CountVectorizer

    count = CountVectorizer(binary=True, preprocessor=normalised, token_pattern=r"\w+", dtype="int32")
    both = count.fit_transform([*texts, *others])
    rows, columns = both[: len(texts)], both[len(texts) :].T
    sizes, other_sizes = np.asarray(rows.sum(1)), np.asarray(columns.sum(0))
    found = []
    for start in range(0, len(texts), 1024):  # the table of all with all would take gigabytes
        part = slice(start, start + 1024)
        shared = (rows[part] @ columns).toarray()
        either = sizes[part] + other_sizes - shared
        found += (shared >= alike * either).any(1).tolist()
    return found
