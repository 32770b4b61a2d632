"""Folders onto the Hub."""

import os

from huggingface_hub import CommitInfo, HfApi


def upload_folder(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    commit_message: str = "Upload model",
) -> CommitInfo:
    """Upload a folder as one commit into a model repository, which is made if there is none.

    Args:
        folder: what to upload, without hidden files.
        repo_id: "owner/name".
        private: whether a repository that is made now is private; one that exists stays as it is.
        token: of the Hub; the stored one by default.
        commit_message: of the commit.

    Raises:
        ValueError: an impossible repository name.
        OSError: the Hub cannot be reached or refuses.
    """
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message, ignore_patterns=".*")
