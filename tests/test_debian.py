"""Descriptions of packages as data: what is read from apt's lists, paired, and kept from the training."""

import os
import re
from pathlib import Path

import pytest

from hf_ext.data import debian
from hf_ext.data.debian import Pair

PACKAGES = """\
Package: cat
Version: 1
Depends: libcat,
 dog

Package: libcat-dev
Source: cat (1.0)
Version: 1

Package: dog
Version: 2

Package: mouse
Version: 2
"""
ENGLISH = """\
Package: cat
Description-md5: 01
Description-en: animal that sits on mats
 The cat sits on
 the mat. It purrs, e.g. at night! Then it sleeps.
 .
 Food:
  * fish
  * mice
 .
 It has 9 lives.

Package: libcat-dev
Description-md5: 02
Description-en: Animal that sits on mats (2)
 Headers for cats. They are short.

Package: dog
Description-md5: 03
Description-en: Doggerel
 A dog barks.
 .
 It bites.

Package: mouse
Description-md5: 04
Description-en: not translated
"""
GERMAN = """\
Package: cat
Description-md5: 01
Description-de: Tier, das auf Matten sitzt
 Die Katze sitzt auf der Matte. Sie schnurrt, z.B. nachts! Dann schläft
 sie.
 .
 Futter:
  * Fisch
 .
 Sie hat 9 Leben.

Package: libcat-dev
Description-md5: 02
Description-de: Tier, das auf Matten sitzt (2)
 Kopfdateien für Katzen, und zwar kurze.

Package: dog
Description-md5: 03
Description-de: Doggerel
 Ein Hund bellt und beißt.

Package: gone
Description-md5: 99
Description-de: nur auf Deutsch
"""


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    place = "mirror_debian_dists_stable_main"
    (tmp_path / f"{place}_binary-amd64_Packages").write_text(PACKAGES)
    for language, text in (("en", ENGLISH), ("de", GERMAN)):
        (tmp_path / f"{place}_i18n_Translation-{language}").write_text(text, encoding="utf-8")
    return tmp_path


def test_pairs(lists):
    assert debian.translations(lists, "en", "de") == [
        Pair("It has 9 lives.", "Sie hat 9 Leben.", "cat"),
        Pair("It purrs, e.g. at night!", "Sie schnurrt, z.B. nachts!", "cat"),
        Pair("The cat sits on the mat.", "Die Katze sitzt auf der Matte.", "cat"),
        Pair("Then it sleeps.", "Dann schläft sie.", "cat"),
        Pair("animal that sits on mats", "Tier, das auf Matten sitzt", "cat"),  # (2) is the same text
        # as many paragraphs but not as many sentences; the dog's has neither, and an untranslated synopsis
        Pair("Headers for cats. They are short.", "Kopfdateien für Katzen, und zwar kurze.", "cat"),
    ]
    assert [p.text for p in debian.translations(lists, "en", "de", longest=4)] == ["It has 9 lives.", "Then it sleeps."]


def test_summaries(lists):
    found = debian.summaries(lists, shortest=4)
    whole = "The cat sits on the mat. It purrs, e.g. at night! Then it sleeps. It has 9 lives."
    assert found[:1] == [Pair(whole, "animal that sits on mats", "cat")], "lists are left out"
    assert found[1:] == [
        Pair("Headers for cats. They are short.", "Animal that sits on mats (2)", "cat"),
        Pair("A dog barks. It bites.", "Doggerel", "dog"),
    ]
    assert debian.summaries(lists, shortest=4, longest=5) == found[2:]
    with pytest.raises(ValueError, match=r"no descriptions in 'fr' \(a file \*Translation-fr\)"):
        debian.summaries(lists, "fr")


def test_nothing_like_a_test_pair_is_trained_on():
    """Whatever the draw: no source on both sides, and no text or target with most words in common."""
    names = ["ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "willow"]
    pairs = [Pair(f"wood of the {name} tree {i}", f"Holz {name} {i}", f"s{i // 3}") for i, name in enumerate(names * 3)]
    pairs += [Pair(f"{a} {b}", f"{b}{a}", f"{a}") for a in names for b in names if a < b]
    for seed in range(5):
        train, test = debian.split_by_source(pairs, held_out=12, seed=seed, alike=0.6)
        assert 12 <= len(test) < 12 + len(names) and len(train) > 10
        assert not {p.source for p in train} & {p.source for p in test}
        for side in (0, 1):
            words = [[set(re.findall("[a-z]+", pair[side].lower())) for pair in part] for part in (train, test)]
            assert max(len(a & b) / len(a | b) for a in words[0] for b in words[1]) < 0.6
    assert debian.split_by_source(pairs, held_out=12, seed=4) == (train, test), "the draw depends on the seed only"
    strict, _ = debian.split_by_source(pairs, held_out=12, seed=4, alike=0.3)
    assert set(strict) < set(train)
    for wrong in (0, len(pairs)):
        with pytest.raises(ValueError, match=f"held_out must be between 1 and {len(pairs) - 1}"):
            debian.split_by_source(pairs, held_out=wrong)


def test_apt_fills_a_folder_of_its_own(tmp_path, monkeypatch, lists):
    """A stand-in for apt-get copies the lists to where its settings say; the real one works the same way."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / "apt-get"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n[ "$1 $2" = "update -c" ] || exit 3\n'
        'folder=$(sed -n \'s/^Dir::State::Lists "\\(.*\\)";$/\\1/p\' "$3")\n'
        'grep -q \'^Acquire::Languages "en,\' "$3" && test -d "$folder/partial" || exit 4\n'
        f'cp {lists}/mirror* "$folder"\necho "W: a mirror is old" >&2\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(debian, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    folder = debian.fetch_lists("en", "de")
    assert len(debian.translations(folder, "en", "de")) == 6
    assert debian.fetch_lists("en", "de") == folder and len(calls.read_text().splitlines()) == 1, "fetched twice"
    assert [place.name for place in folder.parent.iterdir()] == [folder.name], "something was left behind"
    with pytest.raises(RuntimeError, match="own sources gave no descriptions in fr: W: a mirror is old"):
        debian.fetch_lists("en", "fr")
    program.write_text("#!/bin/sh\necho 'E: no network' >&2\nexit 100\n")
    with pytest.raises(RuntimeError, match="own sources gave no descriptions in en, it: E: no network"):
        debian.fetch_lists("en", "it")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="apt-get is not installed"):
        debian.fetch_lists("en", "it")
    assert [place.name for place in folder.parent.iterdir()] == [folder.name]
