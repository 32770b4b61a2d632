"""Files onto the Hub: what of a folder goes there, and one commit that is made whole or not at all."""

import contextlib
import fnmatch
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2  # what huggingface_hub itself speaks by; its errors are not wrapped
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

logger = logging.get_logger(__name__)

# What lies beside a model and belongs to the run that made it, not to the model. Pickles run code where they are read.
LEFT_HERE = ("checkpoints/*", "checkpoint-*/*", "runs/*", "training_args.bin", "optimizer.pt", "scheduler.pt")
LEFT_HERE += ("rng_state*.pth", "trainer_state.json", "*__pycache__/*")
TRIES = 3
WAIT = 2.0  # seconds before the second try; doubled before the third


def files_to_push(folder: str | os.PathLike) -> dict[str, Path]:
    """The files of a folder that are uploaded: path in the repository -> file. No hidden files, no training state.

    Raises:
        ValueError: there are none.
    """
    folder = Path(folder)
    found = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    files = {
        name: file
        for name, file in found.items()
        if not any(part.startswith(".") for part in name.split("/"))
        and not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_HERE)
    }
    if not files:
        raise ValueError(f"{folder} holds no file to upload.")
    return files


def upload_files(
    files: Mapping[str, Path | bytes],
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    commit_message: str = "Upload model",
) -> CommitInfo:
    """Upload files as one commit into a model repository, which is made if there is none.

    Large files go through Xet where `hf_xet` is installed; where that fails, as with a server that has none, over plain
    HTTP. A connection that breaks is tried again. What has been uploaded before it broke is not sent a second time, and
    no reader ever sees a part of the files.

    Args:
        files: path in the repository -> file, or its content.
        repo_id: "owner/name", or "name" for one of the token's owner.
        private: whether the repository is private. One that exists and is public is then refused.
        token: of the Hub; the stored one by default.
        commit_message: of the commit.

    Raises:
        ValueError: an impossible repository name, no token, or a public repository where a private one is wanted.
        OSError: the Hub cannot be reached or refuses.
    """
    validate_repo_id(repo_id)
    if not (token or get_token()):
        raise ValueError("there is no token for the Hub; run `hf auth login`, or set HF_TOKEN.")
    api = HfApi(endpoint=constants.ENDPOINT, token=token)
    for attempt in range(1, TRIES + 1):
        try:
            return commit(api, files, repo_id, private=private, commit_message=commit_message)
        except OfflineModeIsEnabled as error:
            raise OSError("HF_HUB_OFFLINE is set, so the Hub is not asked; unset it to upload.") from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            raise OSError(
                f"the Hub refuses {repo_id} (HTTP {status}: {error.server_message or 'no reason given'}). Check the "
                "name, and that your token may write there: hf auth whoami."
            ) from error
        except (httpx2.TransportError, RuntimeError, ConnectionError, TimeoutError) as error:
            # The client wraps what breaks an upload of a large file. What comes without that is from Xet, which the
            # client takes to be there, whatever the server.
            if not isinstance(error, httpx2.TransportError) and not isinstance(error.__cause__, httpx2.TransportError):
                if constants.HF_HUB_DISABLE_XET:
                    raise
                logger.warning(f"the Hub's storage for large files (Xet) fails ({error}); they go over plain HTTP.")
                with without_xet():
                    return upload_files(files, repo_id, private=private, token=token, commit_message=commit_message)
            if attempt == TRIES:
                raise OSError(
                    f"the connection to {api.endpoint} broke ({error.__cause__ or error}). The repository is as it "
                    "was; run it again, and what was uploaded is not sent twice."
                ) from error
            time.sleep(WAIT * attempt)
    raise AssertionError("the last try returns or raises")


@contextlib.contextmanager
def without_xet() -> Iterator[None]:
    """Large files go over plain HTTP."""
    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


def commit(
    api: HfApi, files: Mapping[str, Path | bytes], repo_id: str, *, private: bool, commit_message: str
) -> CommitInfo:
    """Make the repository where there is none, and the commit."""
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and api.repo_info(repo_id).private is False:
        raise ValueError(f"{repo_id} is there already and public; say so (--public, private=False) to upload there.")
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()]
    return api.create_commit(repo_id, operations, commit_message=commit_message)
