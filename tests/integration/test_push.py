"""Pushing: against a Hub on the loopback, with connections that break."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from harness import no_warning
from hub_double import TOKEN, HubDouble
from huggingface_hub import ModelCard, constants
from tiny_bert import bert, saved_bert, tokenizer
from transformers import AutoModelForMaskedLM
from typer.testing import CliRunner

from hf_ext import ExtBertForMaskedLM, push_self_contained
from hf_ext.cli.app import app
from hf_ext.hub import upload

SUMMARY = {"settings": {"model": "me/base", "data": "me/data", "task": "masked-lm", "method": "full"},
           "metrics": {"perplexity": 8.5}}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The double in the place of the Hub, with a token that is stored as the user's."""
    with HubDouble() as double:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", double.endpoint)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", double.endpoint)
        resolve = double.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolve)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
        huggingface_hub.close_session()
        yield double
    huggingface_hub.close_session()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a fine-tuning run leaves, with things in it that are nobody's business."""
    path = saved_bert(tmp_path / "model")
    tokenizer().save_pretrained(path)
    (path / "finetune.json").write_text(json.dumps(SUMMARY))
    for name in ("checkpoints/checkpoint-1/optimizer.pt", "training_args.bin", ".cache/secret", "runs/events"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"private")
    return path


def run(*arguments: object, stdin: str | None = None):
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, env={"COLUMNS": "200"})
    assert TOKEN not in result.output + result.stderr
    return result


def assert_error(result, *parts: str) -> None:
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stderr.strip().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    for part in parts:
        assert part in lines[0], lines[0]


def whole(hub: HubDouble, name: str, folder: Path) -> None:
    """The repository holds exactly the model's files."""
    files = hub.repositories[name].files
    expected = {file: (folder / file).read_bytes() for file in (
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "finetune.json")}  # fmt: skip
    assert set(files) == {*expected, "README.md"}
    assert {file: files[file] for file in expected} == expected
    assert len(hub.repositories[name].commits) == 1


# --- hf-ext push --------------------------------------------------------------------------------------------------


def test_push_shows_and_asks(hub: HubDouble, folder: Path) -> None:
    refused = run("push", folder, "me/mine", stdin="n\n")
    assert refused.exit_code == 1 and "nothing was uploaded" in refused.stderr
    for shown in ("config.json", "model.safetensors", "README.md", "6 files", "me/mine (private)"):
        assert shown in refused.stdout
    for hidden in ("optimizer.pt", "training_args.bin", "secret", "events"):
        assert hidden not in refused.stdout
    assert not hub.requests, "nothing is sent before the answer"
    accepted = run("push", folder, "me/mine", stdin="y\n")
    assert accepted.exit_code == 0, accepted.output
    assert f"uploaded 6 files: {hub.endpoint}/me/mine/commit/" in accepted.stdout
    whole(hub, "me/mine", folder)
    assert hub.repositories["me/mine"].private
    card = ModelCard(hub.repositories["me/mine"].files["README.md"].decode())
    assert card.data.base_model == "me/base" and card.data.datasets == ["me/data"]
    assert not (folder / "README.md").exists(), "the user's folder stays as it is"


def test_push_publicly(hub: HubDouble, folder: Path) -> None:
    assert run("push", folder, "me/mine", "--yes", "--public").exit_code == 0
    assert not hub.repositories["me/mine"].private
    assert_error(run("push", folder, "me/mine", "--yes"), "me/mine is there already and public", "--public")
    assert len(hub.repositories["me/mine"].commits) == 1


def test_push_with_code_and_load_it_from_there(hub: HubDouble, folder: Path, tmp_path: Path) -> None:
    """A machine without the package downloads the code and the model."""
    result = run("push", folder, "me/mine", "--yes", "--self-contained")
    assert result.exit_code == 0, result.output
    files = hub.repositories["me/mine"].files
    assert {"modeling_bert.py", "tokenizer.json", "finetune.json", "README.md"} <= set(files)
    assert "trust_remote_code=True" in files["README.md"].decode()
    assert ModelCard(files["README.md"].decode()).data.base_model == "me/base"
    original = ExtBertForMaskedLM.from_pretrained(folder).eval()
    inputs = {"input_ids": torch.tensor([[1, 5, 9, 2]])}
    torch.save(inputs, tmp_path / "inputs.pt")
    torch.save({"logits": original(**inputs).logits.detach()}, tmp_path / "outputs.pt")
    job = {
        "name": "loaded", "folder": "me/mine", "auto_class": "AutoModelForMaskedLM", "model_type": "ext_bert",
        "class_name": "ExtBertForMaskedLM", "inputs": str(tmp_path / "inputs.pt"),
        "outputs": str(tmp_path / "outputs.pt"),
    }  # fmt: skip
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    script = Path(__file__).with_name("clean_machine.py")
    done = subprocess.run(
        [sys.executable, "-I", script, tmp_path / "jobs.json"],
        capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.get("difference") == 0, found


def test_what_can_be_wrong(hub: HubDouble, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_error(run("push", tmp_path / "none", "me/mine", "--yes"), "there is no folder")
    assert_error(run("push", tmp_path, "me/mine", "--yes"), "no config.json")
    assert_error(run("push", folder, "../mine", "--yes"), "'../mine'")
    assert_error(run("push", folder, "others/mine", "--yes"), "refuses others/mine (HTTP 403", "rights")
    monkeypatch.setenv("HF_TOKEN", "hf_anotherTOKEN")
    assert_error(run("push", folder, "me/mine", "--yes"), "HTTP 401", "hf auth whoami")
    monkeypatch.setattr(upload, "get_token", lambda: None)
    assert_error(run("push", folder, "me/mine", "--yes"), "no token", "hf auth login")
    monkeypatch.undo()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert_error(run("push", folder, "me/mine", "--yes"), "HF_HUB_OFFLINE is set")


# --- connections that break ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "when"),
    [
        ("POST /api/repos/create", "after"),
        ("POST .*/preupload/", "before"),
        ("PUT /lfs/", "before"),
        ("PUT /lfs/", "after"),
        ("POST .*/commit/", "before"),
    ],
)
def test_broken_connection_is_tried_again(request_: str, when: str, hub: HubDouble, folder: Path) -> None:
    """One drop, in the middle of a request or after it: the same command leaves a complete repository."""
    hub.break_times(request_, 1, when)
    assert run("push", folder, "me/mine", "--yes").exit_code == 0
    whole(hub, "me/mine", folder)


def test_server_without_xet(hub: HubDouble, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client speaks Xet wherever it can; a server that cannot gets the files over plain HTTP."""
    pytest.importorskip("hf_xet", reason="without it nothing is tried")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with no_warning(("Xet",)) as alarm:
        assert run("push", folder, "me/mine", "--yes").exit_code == 0
    assert any("(Xet) fails" in message and "404" in message for message in alarm.messages)
    assert any("xet-write-token" in request for request in hub.requests)
    whole(hub, "me/mine", folder)
    assert constants.HF_HUB_DISABLE_XET is False


def test_answer_of_the_commit_is_lost(hub: HubDouble, folder: Path) -> None:
    """The commit is made twice, with the same files."""
    hub.break_times("POST .*/commit/", 1, "after")
    assert run("push", folder, "me/mine", "--yes").exit_code == 0
    hub.repositories["me/mine"].commits.pop()
    whole(hub, "me/mine", folder)


@pytest.mark.parametrize("request_", ["PUT /lfs/", "POST .*/commit/"])
def test_hub_that_is_gone_for_longer(request_: str, hub: HubDouble, folder: Path) -> None:
    """A readable error and an untouched repository; the second run completes it and sends nothing twice."""
    hub.break_times(request_, 10**6)
    assert_error(run("push", folder, "me/mine", "--yes"), "connection", "broke", "run it again")
    assert not hub.repositories["me/mine"].files
    hub.break_times(request_, 0)
    stored = bool(hub.stored)
    hub.requests.clear()
    assert run("push", folder, "me/mine", "--yes").exit_code == 0
    whole(hub, "me/mine", folder)
    assert stored is not any(request.startswith("PUT /lfs/") for request in hub.requests)


# --- the library's own ways ---------------------------------------------------------------------------------------


def test_push_to_hub_of_the_library(hub: HubDouble, tmp_path: Path) -> None:
    model = bert()
    model.push_to_hub("me/pushed", private=True)
    assert {"config.json", "model.safetensors"} <= set(hub.repositories["me/pushed"].files)
    assert hub.repositories["me/pushed"].private
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/saved")
    assert {"config.json", "model.safetensors"} <= set(hub.repositories["me/saved"].files)
    loaded = AutoModelForMaskedLM.from_pretrained("me/saved", cache_dir=tmp_path / "cache")
    assert type(loaded) is ExtBertForMaskedLM


def test_push_self_contained(hub: HubDouble) -> None:
    done = push_self_contained(bert(), "me/own")
    assert done.commit_url.startswith(f"{hub.endpoint}/me/own/commit/")
    files = hub.repositories["me/own"].files
    assert {"modeling_bert.py", "config.json", "model.safetensors", "README.md"} <= set(files)
    assert 'from_pretrained("me/own", trust_remote_code=True)' in files["README.md"].decode()
    with pytest.raises(ValueError, match="takes a model of this package"):
        push_self_contained(torch.nn.Linear(2, 2), "me/other")
    assert "me/other" not in hub.repositories
