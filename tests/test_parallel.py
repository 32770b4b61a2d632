"""Multi-device plans: names that exist, stages by the plan, and two processes on the CPU (`parallel.py`)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import deepspeed_run
import parallel
import pytest
import torch
from filelock import FileLock
from harness import BASES, Subject, assert_close, build, subjects
from parallel import is_extra, jobs, language_models
from torch import nn
from transformers import PreTrainedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

import hf_ext

WITH_STAGES = [s for s in language_models() if s.our_config.base_model_pp_plan]


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> Callable[[bool], dict[str, str]]:
    """Starts the two processes, which run once for all workers of a test run; what failed in them."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def found(extra: bool) -> dict[str, str]:
        kept = shared / f"two_processes{extra:d}.json"
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                kept.write_text(json.dumps(parallel.run(tmp_path_factory.mktemp("processes"), extra)))
        return json.loads(kept.read_text())

    return found


COLUMNS = {
    "tensor": "tensor parallel",
    "pipeline": "pipeline parallel",
    "sharded_data": "FSDP2",
    "sharded_files": "FSDP2",
    "data_parallel": "DDP",
}


def marked(name: str, subject: Subject) -> object:
    """A job as a parameter, with its column of the README's table."""
    slow = [pytest.mark.slow] if is_extra(name, subject) else []
    return pytest.param(name, subject, marks=[pytest.mark.matrix(COLUMNS[name]), *slow])


@pytest.mark.parametrize(("name", "subject"), [marked(*job) for job in jobs() + jobs(extra=True)], ids=str)
def test_in_two_processes(name, subject, failures):
    found = failures(is_extra(name, subject))
    assert f"{name}-{subject}" not in found, found[f"{name}-{subject}"]
    assert "processes" not in found, found["processes"]


@pytest.mark.parametrize("model_type", hf_ext.architectures())
def test_plans_of_configurations_name_what_is_there(model_type):
    """A model drops the rules that match nothing in it, since its parts are given them all; so each must match in the
    whole, in one of the configurations, be it one of the architecture that the plan is inherited from."""
    own = hf_ext.architectures()[model_type].config_class
    plans = {"tp": own.base_model_tp_plan or {}, "fsdp": own.base_model_fsdp_plan or {}}
    names = set()
    for subject in subjects(*BASES, where=lambda s: issubclass(own, s.our_config)):
        config = subject.our_config(**subject.fields)
        with torch.device("meta"):
            names |= {replace_layer_number_by_wildcard(name) for name, _ in subject.ours(config).named_modules()}
    assert plans["fsdp"], "nothing is sharded"
    for kind, plan in plans.items():
        assert set(plan) <= names, f"{kind}: {sorted(set(plan) - names)} match nothing"


@pytest.mark.parametrize("subject", language_models(), ids=str)
def test_plans_name_what_is_there(subject):
    """A rule that matches nothing leaves a layer whole on every process; the library only warns."""
    stock, ours = (
        cls(config(**subject.fields))
        for cls, config in ((subject.stock, subject.stock_config), (subject.ours, subject.our_config))
    )
    names = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name, _ in ours.named_modules()}
    for kind in ("tp_plan", "pp_plan", "fsdp_plan"):
        plan, reference = getattr(ours, kind), getattr(stock, kind)
        if kind == "fsdp_plan":  # the library's default names LLaMA's modules in all models
            default = {f"{ours.base_model_prefix}.{name}" for name in PreTrainedConfig.base_model_fsdp_plan}
            plan, reference = ({k: v for k, v in x.items() if k not in default} for x in (plan, reference))
        assert set(plan) <= names, f"{kind} of {subject.class_name}"
        rename = subject.case.stock_name
        official = {rename(f"{name}.").removesuffix("."): rule for name, rule in reference.items()}
        assert {name: plan.get(name) for name in official} == official, kind
    assert {type(module).__name__ for module in ours.base_model.blocks()} <= set(ours._no_split_modules)


@pytest.mark.parametrize("subject", WITH_STAGES, ids=str)
def test_stages_by_the_plan(subject):
    """Each stage takes and gives what the plan says, and the modules named are the whole model."""
    model = build(subject.ours, subject)
    inputs = subject.inputs(model.config)
    expected = model(**inputs).logits
    plan = {**model.config.base_model_pp_plan, **type(model)._pp_plan}
    owners = [model.base_model] * len(model.config.base_model_pp_plan) + [model] * len(type(model)._pp_plan)
    values = {"input_ids": inputs["input_ids"], "attention_mask": None}
    positions = torch.arange(inputs["input_ids"].shape[1])[None]
    for owner, (name, (takes, gives)) in zip(owners, plan.items(), strict=True):
        module = getattr(owner, name)
        if isinstance(module, nn.ModuleList):
            hidden = values["hidden_states"]
            given = {"attention_mask": None, "past_key_values": None, "rows": None, "packing": None}
            shared = owner.masks(hidden, position_ids=None, **given)
            shared |= {"rotation": owner.rotation(hidden, positions), "position_ids": positions}
            for stage in (list(module)[:1], list(module)[1:]):
                hidden = hidden.detach().clone()  # what would be sent to another device
                for block in stage:
                    hidden = block(hidden, **shared)
            values["hidden_states"] = hidden
        else:
            (out,) = gives
            values[out] = module(*(values[given] for given in takes))
            values.setdefault("hidden_states", values[out])
    assert_close(values["logits"], expected, "logits of the stages")
    used = [getattr(owner, name) for owner, name in zip(owners, plan, strict=True)]
    planned = {id(p) for module in used for p in module.parameters()}
    assert all(id(p) in planned for p in model.parameters()), "parameters that belong to no stage"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(stage, tmp_path):
    """Its first run compiles an operator, which takes minutes."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not among the requirements")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    environment = {**parallel.environment(), **place, "MASTER_PORT": str(parallel.free_port()), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, deepspeed_run.__file__, str(stage), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"trained at stage {stage}") == len(deepspeed_run.CLASSES)


@pytest.mark.slow
def test_trainer_in_two_processes(tmp_path):
    """A `Trainer` run of two processes with half of the rows each is the run of one."""
    alone, together = parallel.launch(tmp_path)
    assert set(alone) == set(together)
    for name, expected in alone.items():
        assert len(expected["losses"]) == 3
        assert together[name]["losses"] == pytest.approx(expected["losses"], rel=1e-4), name
        for parameter, value in expected["weights"].items():
            assert_close(together[name]["weights"][parameter], value, f"{name}, {parameter}")
