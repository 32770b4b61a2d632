"""Run by `test_self_contained.py` in an interpreter of its own, where `hf_ext` cannot be imported: loads what it is
told to by the library's Auto classes and compares with what the original gave. Prints a line of JSON for each job.

    python clean_machine.py jobs.json
"""

import json
import logging
import shutil
import sys
import time
import traceback
from pathlib import Path


class NoHfExt:
    """Stands before the finders of installed packages."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "hf_ext":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoHfExt())

import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)
warned: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warned.append(record.getMessage())


transformers.utils.logging.get_logger("transformers").addHandler(Listener(logging.WARNING))
transformers.utils.logging.disable_progress_bar()


def load(job: dict, folder: Path) -> transformers.PreTrainedModel:
    auto_class = getattr(transformers, job["auto_class"])
    model = auto_class.from_pretrained(str(folder), trust_remote_code=True).eval()
    assert type(model).__name__ == job["class_name"], type(model)
    assert type(model).__module__.startswith("transformers_modules.")
    assert not hasattr(model.config, "official_model_type") or model.config.model_type == job["model_type"]
    return model


def compare(model: transformers.PreTrainedModel, job: dict) -> float:
    """Largest difference of any output tensor from the original's."""
    torch.manual_seed(0)
    outputs = model(**torch.load(job["inputs"]))
    expected = torch.load(job["outputs"])
    found = {name: value for name, value in outputs.items() if torch.is_tensor(value)}
    assert set(found) == set(expected), (set(found), set(expected))
    return max((found[name] - expected[name]).abs().nan_to_num(0).max().item() for name in expected)


def fine_tune(model: transformers.PreTrainedModel, job: dict, folder: Path) -> dict:
    """One step, save, forget the original, load what was saved; everything of it must have come along."""
    model.train()
    model(**torch.load(job["inputs"]), **torch.load(job["labels"])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    saved = folder.with_name(f"{folder.name}-tuned")
    model.eval().save_pretrained(saved)
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    code = sorted(file.name for file in folder.glob("*.py"))
    maps = [json.loads((f / "config.json").read_text())["auto_map"] for f in (folder, saved)]
    shutil.rmtree(folder)
    again = load(job, saved)
    return {
        "same_code": code == sorted(file.name for file in saved.glob("*.py")),
        "same_map": maps[0] == maps[1],
        "same_weights": all(torch.equal(before[name], value) for name, value in again.state_dict().items()),
    }


def run(job: dict) -> dict:
    folder, start = Path(job["folder"]), time.perf_counter()
    if "pipeline" in job:
        pipeline = transformers.pipeline(job["pipeline"], str(folder), trust_remote_code=True)
        return {"result": job["input"] and pipeline(job["input"]), "kind": getattr(pipeline, "type", None)}
    model = load(job, folder)
    result = {"difference": compare(model, job)}
    if job.get("labels"):
        result |= fine_tune(model, job, folder)
    return {**result, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        warned.clear()
        try:
            result = run(job)
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps({"name": job["name"], "warned": list(warned), **result}), flush=True)
    assert "hf_ext" not in sys.modules
