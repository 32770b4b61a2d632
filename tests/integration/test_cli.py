"""The `hf-ext` command: what it prints, what it writes, its exit codes, and one readable line for every error."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
import typer
from accelerate.commands.launch import launch_command_parser
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.run import get_args_parser as torchrun_parser
from typer.testing import CliRunner

import hf_ext
from hf_ext.cli import generate as generate_command
from hf_ext.cli import models as models_command
from hf_ext.cli.app import app, describe

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A causal model whose words are w0, w1, ... and user, system, assistant."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", "<unk>", "user", "system", "assistant", *(f"w{i}" for i in range(92))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def t5(llama, tmp_path_factory) -> Path:
    """An encoder-decoder with the same words."""
    folder = tmp_path_factory.mktemp("t5")
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=2, initializer_factor=3.0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False))
    model.save_pretrained(folder)
    return folder


def run(*arguments: object, stdin: str | None = None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, env={"COLUMNS": "200"})


def greedy(folder: Path, prompt: str, new: int) -> str:
    """The stock model's own continuation, decoded."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def assert_readable(result, *parts: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert "Traceback" not in result.output
    for part in parts:
        assert part in lines[0], lines[0]


# ------------------------------------------------------------------------------------------------- help, models


def test_help_names_every_command():
    result = run("--help")
    assert result.exit_code == 0
    commands = ("quickstart", "finetune", "generate", "verify", "bench", "attention", "export", "push", "models")
    for command in commands:
        assert command in result.stdout
        assert run(command, "--help").exit_code == 0
    assert run().stdout.strip() == result.stdout.strip()


def test_version():
    assert run("--version").stdout == f"hf-ext {hf_ext.__version__}\n"


def test_models_lists_every_architecture_and_head():
    output = run("models").stdout
    for architecture in hf_ext.architectures().values():
        assert (architecture.official_model_type or "none") in output and architecture.model_type in output
    assert "ForMaskedLM" in output and "ForCausalLM" in output


def test_as_a_process(llama, tmp_path):
    """In a fresh interpreter, where nothing is imported yet: help comes at once, a check runs, an error is one line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hf_ext.cli.app"]

    def process(*arguments: str):
        return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path)

    loaded = "import sys, hf_ext.cli.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], env=environment, cwd=tmp_path).returncode == 0
    start = time.perf_counter()
    assert process("--help").returncode == 0
    assert time.perf_counter() - start < 5  # about half a second; the rest is for a busy machine
    verified = process("verify", str(llama))
    assert verified.returncode == 0, verified.stderr
    assert verified.stderr == ""
    missing = process("verify", "./nowhere")
    assert missing.returncode == 1
    assert missing.stderr == "error: there is no folder './nowhere'; check the path.\n"


# ------------------------------------------------------------------------------------------------- verify


def test_verify_agrees_and_writes_its_report(bert, tmp_path):
    result = run("verify", bert, "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and report["ours"] == "ExtBertForMaskedLM"
    assert f"All {len(report['rows'])} comparisons agree." in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]  # no temporary file stays


def test_verify_exits_with_1_on_a_mismatch(bert, tmp_path, monkeypatch):
    original = hf_ext.ExtBertForMaskedLM.from_pretrained.__func__

    def with_fault(cls, *args, **kwargs):
        result = original(cls, *args, **kwargs)
        with torch.no_grad():
            result[0].bert.embeddings.word_embeddings.weight += 0.01
        return result

    monkeypatch.setattr(hf_ext.ExtBertForMaskedLM, "from_pretrained", classmethod(with_fault))
    result = run("verify", bert, "--json", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout and "comparisons differ." in result.stdout
    assert not json.loads((tmp_path / "report.json").read_text())["ok"]


# ------------------------------------------------------------------------------------------------- export


def test_exported_model_gives_the_stock_class_equal_logits(llama, tmp_path):
    ours = tmp_path / "ours"
    model = hf_ext.ExtLlamaForCausalLM.from_pretrained(llama).eval()
    model.save_pretrained(ours)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(llama / name, ours)
    out = tmp_path / "official"
    result = run("export", ours, out)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    stock = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(stock) is transformers.LlamaForCausalLM
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(stock(ids).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert transformers.AutoTokenizer.from_pretrained(out)("w3")["input_ids"] == [10]
    assert (out / "chat_template.jinja").read_text() == TEMPLATE

    before = (out / "model.safetensors").read_bytes()
    assert_readable(run("export", ours, out), "not empty", "--overwrite")
    assert run("export", ours, out, "--overwrite").exit_code == 0
    assert (out / "model.safetensors").read_bytes() == before


def test_export_with_its_code(llama, tmp_path):
    """The tokenizer's files come along, and an adapter can be merged on the way."""
    result = run("export", llama, tmp_path / "out", "--self-contained")
    assert result.exit_code == 0, result.output
    assert "wrote ExtLlamaForCausalLM" in result.stdout and "tokenizer.json" in result.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_llama.ExtLlamaForCausalLM"
    assert (tmp_path / "out" / "modeling_llama.py").is_file()
    assert_readable(run("export", llama, tmp_path / "out", "--self-contained"), "not empty", "--overwrite")


def test_export_merges_an_adapter(llama, adapter, tmp_path):
    assert_readable(run("export", adapter, tmp_path / "merged"), "adapter", "--merge")
    result = run("export", adapter, tmp_path / "merged", "--merge")
    assert result.exit_code == 0, result.output
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    from peft import PeftModel

    separate = PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(llama), adapter).eval()
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, separate(ids).logits, rtol=1e-5, atol=1e-5)
        base = transformers.LlamaForCausalLM.from_pretrained(llama)(ids).logits
        assert (merged(ids).logits - base).abs().max() > 1e-2
    assert (tmp_path / "merged" / "tokenizer.json").exists()


# ------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("streaming", ["--stream", "--no-stream"])
def test_generate_is_greedy_without_options(llama, streaming):
    result = run("generate", llama, "--prompt", "w1 w2 w3", "--max-new-tokens", 12, streaming)
    assert result.exit_code == 0, result.output
    expected = greedy(llama, "w1 w2 w3", 12)
    assert len(set(expected.split())) > 2  # no degenerate repetition that anything would match
    assert result.stdout.split() == expected.split()


@pytest.mark.parametrize("options", [(), ("--no-stream",), ("--num-beams", "3")], ids=" ".join)
def test_generate_transforms_with_an_encoder_decoder(t5, options):
    model = transformers.T5ForConditionalGeneration.from_pretrained(t5).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(t5)
    inputs = tokenizer("w5 w6 w7", return_tensors="pt", return_token_type_ids=False)
    expected = model.generate(**inputs, max_new_tokens=7, do_sample=False, num_beams=3 if "3" in options else 1)
    text = tokenizer.decode(expected[0], skip_special_tokens=True)
    result = run("generate", t5, "--prompt", "w5 w6 w7", "--max-new-tokens", 7, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == text != ""


def test_generate_says_what_an_encoder_decoder_cannot(t5, tmp_path):
    assert_readable(run("generate", t5, "--prompt", "w5", "--chat"), "is an encoder-decoder", "without --chat")
    sizes = {"vocab_size": 99, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    bart = transformers.BartConfig(**sizes, max_position_embeddings=8)
    transformers.BartForConditionalGeneration(bart).save_pretrained(tmp_path / "bart")
    transformers.AutoTokenizer.from_pretrained(t5).save_pretrained(tmp_path / "bart")
    prompt = " ".join(["w5"] * 9)
    assert_readable(run("generate", tmp_path / "bart", "--prompt", prompt), "9 tokens exceeds the 8 positions")
    within = run("generate", tmp_path / "bart", "--prompt", "w5 w6", "--no-stream")  # stops at the last position
    assert within.exit_code == 0, within.output
    whisper = transformers.WhisperConfig(
        **sizes, num_mel_bins=4, pad_token_id=1, bos_token_id=1, eos_token_id=1, decoder_start_token_id=2
    )
    transformers.WhisperForConditionalGeneration(whisper).save_pretrained(tmp_path / "whisper")
    assert_readable(run("generate", tmp_path / "whisper", "--prompt", "w5"), "transcribes sound", "speech-recognition")


def test_generate_reads_standard_input_and_ignores_zero_temperature(llama):
    result = run("generate", llama, "--max-new-tokens", 6, "--temperature", 0, stdin="w7 w8\n")
    assert result.stdout.split() == greedy(llama, "w7 w8", 6).split()


def test_generate_applies_the_chat_template(llama):
    result = run("generate", llama, "-p", "w4", "--chat", "--system", "w9", "--max-new-tokens", 6)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == greedy(llama, "system w9 user w4", 6).split()


def test_generate_samples_by_seed(llama):
    def sampled(seed: int) -> str:
        options = ("--temperature", 1.5, "--top-k", 50, "--seed", seed, "--max-new-tokens", 12)
        return run("generate", llama, "-p", "w1", *options).stdout

    assert sampled(1) == sampled(1) != sampled(2)


def test_generate_with_beams_and_penalty(llama):
    result = run("generate", llama, "-p", "w1", "--num-beams", 3, "--repetition-penalty", 1.3, "--max-new-tokens", 8)
    model = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    ids = torch.tensor([[8]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=3, repetition_penalty=1.3, max_new_tokens=8, do_sample=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    assert result.stdout.split() == tokenizer.decode(out[0, 1:], skip_special_tokens=True).split()


def test_generate_with_an_adapter(llama, adapter):
    base = run("generate", llama, "-p", "w1 w2", "--max-new-tokens", 8).stdout
    named = run("generate", llama, "-p", "w1 w2", "--max-new-tokens", 8, "--adapter", adapter).stdout
    alone = run("generate", adapter, "-p", "w1 w2", "--max-new-tokens", 8)
    assert alone.exit_code == 0, alone.output
    assert alone.stdout == named != base


def test_a_conversation_remembers_what_was_said(llama, monkeypatch):
    seen = []
    session = generate_command._Session(str(llama), None, "auto")
    original = session.with_template
    monkeypatch.setattr(session, "with_template", lambda messages: seen.append(list(messages)) or original(messages))
    said = iter(["w1", "w2", "/new", "w3", ""])
    monkeypatch.setattr("rich.console.Console.input", lambda self, *a, **k: next(said))
    generate_command._converse(session, "w5", {"max_new_tokens": 3, "do_sample": False}, stream=False)
    roles = [[message["role"] for message in messages] for messages in seen[1:]]  # the first is the check
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert seen[3][-1]["content"] == "w3"


# ------------------------------------------------------------------------------------------------- bench


def test_bench_prints_and_writes_rows(tmp_path):
    settings = [part for key, value in SIZES.items() for part in ("--set", f"{key}={value}")]
    options = ("--batch-size", 4, "--length", 16, "--repeats", 1, "--threads", 1, "--no-memory")
    file = tmp_path / "rows.json"
    result = run("bench", "bert", *settings, *options, "--scenario", "inference", "--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [row["scenario"] for row in rows] == ["inference-ragged", "inference-full"]
    assert rows[1]["tokens"] == 64
    assert "inference-ragged" in result.stdout and "x" in result.stdout


# ------------------------------------------------------------------------------------------------- errors


def broken(folder: Path, source: Path, name: str, content: bytes) -> Path:
    copy = folder / "broken"
    shutil.copytree(source, copy)
    (copy / name).write_bytes(content)
    return copy


@pytest.mark.parametrize("command", ["verify", "bench", "generate", "export"])
def test_models_that_are_not_there(command, tmp_path):
    rest = {"export": [tmp_path / "out"], "generate": ["-p", "w1"]}.get(command, [])
    assert_readable(run(command, tmp_path / "missing", *rest), "there is no folder", "missing")
    assert_readable(run(command, "no-such-model", *rest), "neither a folder nor a reachable Hub id", "HF_HUB_OFFLINE")
    (tmp_path / "empty").mkdir()
    assert_readable(run(command, tmp_path / "empty", *rest), "no config.json", "save_pretrained")
    (tmp_path / "file.safetensors").touch()
    assert_readable(run(command, tmp_path / "file.safetensors", *rest), "is a file")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["verify", "bench", "generate", "export"])
def test_models_that_are_damaged(command, llama, tmp_path):
    rest = {"export": [tmp_path / "out"], "generate": ["-p", "w1"]}.get(command, [])
    whole = (llama / "model.safetensors").read_bytes()
    for number, (name, content, part) in enumerate(
        [
            ("model.safetensors", whole[: len(whole) // 2], "weights file cannot be read"),
            ("model.safetensors", b"", "weights file cannot be read"),
            ("config.json", b"{", "not valid JSON"),
            ("config.json", b"[]", "JSON object"),
            ("config.json", b"{}", "no model_type"),
            ("config.json", b'{"model_type": "xlnet"}', "xlnet"),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        assert_readable(run(command, broken(tmp_path / str(number), llama, name, content), *rest), part)
    folder = broken(tmp_path, llama, "unrelated", b"")
    (folder / "model.safetensors").unlink()
    assert_readable(run(command, folder, *rest), "no weights")
    assert not (tmp_path / "out").exists()


def test_weights_that_do_not_fit_the_config(llama, tmp_path):
    config = json.loads((llama / "config.json").read_text()) | {"intermediate_size": 64}
    folder = broken(tmp_path, llama, "config.json", json.dumps(config).encode())
    assert_readable(run("verify", folder), "do not fit config.json")


def test_contradictory_and_wrong_options(llama, bert, adapter, tmp_path):
    for arguments, part in [
        (("generate", llama, "-p", "w1", "--temperature", 0, "--top-p", 0.5), "contradicts --top-p"),
        (("generate", llama, "-p", "w1", "--system", "w2"), "--chat"),
        (("generate", llama, "-p", "w1", "--dtype", "int7"), "bfloat16"),
        (("generate", llama, "-p", "w1", "--top-p", 2), "--top-p"),
        (("generate", adapter, "-p", "w1", "--adapter", adapter), "itself an adapter"),
        (("export", llama, tmp_path / "out", "--merge"), "no PEFT adapter"),
        (("export", llama, llama), "own folder"),
        (("export", llama, llama.parent, "--overwrite"), "own folder"),
        (("verify", llama, "--json", tmp_path / "no" / "file.json"), "does not exist"),
        (("verify", llama, "--dtype", "auto"), "float32"),
        (("verify",), "Missing argument"),
        (("verfy", llama), "Did you mean 'verify'?"),
        (("verify", llama, "--frobnicate"), "--frobnicate"),
    ]:
        assert_readable(run(*arguments), part, "--help", code=2)


def test_requests_that_cannot_be_met(llama, bert, adapter, tmp_path):
    (tmp_path / "file").touch()
    for arguments, part in [
        (("generate", bert, "-p", "w1"), "BertForMaskedLM"),
        (("generate", llama, "-p", ""), "prompt is empty"),
        (("generate", llama, "-p", "w1", "--adapter", bert), "no PEFT adapter"),
        (("generate", llama, "-p", " ".join(["w1"] * 60)), "48 positions"),
        (("verify", adapter), "--merge"),
        (("verify", bert, "--head", "speech"), "ExtBertForMaskedLM"),
        (("bench", "bert", "--set", "hidden_siz=8"), "did you mean 'hidden_size'"),
        (("bench", "bert", "--set", "hidden_size"), "key=value"),
        (("bench", bert, "--scenario", "fast"), "training-ragged"),
        (("bench", bert, "--length", 49, "--scenario", "inference"), "48 positions"),
        (("export", llama, tmp_path / "file"), "is a file"),
        (("export", llama, tmp_path, "--overwrite"), "other than a model"),
    ]:
        assert_readable(run(*arguments), part)


def test_no_tokenizer_and_no_template(bert, llama, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(llama, bare)
    (bare / "chat_template.jinja").unlink()
    assert_readable(run("generate", bare, "-p", "w1", "--chat"), "no chat template")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert_readable(run("generate", bare, "-p", "w1"), "tokenizer")


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path):
    for arguments in (("--debug", "verify", tmp_path), ("verify", tmp_path, "--debug")):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "Traceback" in result.stderr
        assert result.stderr.strip().splitlines()[-1].startswith("error: ")


def test_interruption_is_no_error(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(hf_ext, "architectures", interrupt)
    result = run("models")
    assert result.exit_code == 130
    assert result.stderr.strip() == "interrupted"


def test_errors_are_put_into_words():
    assert "unexpected KeyError" in describe(KeyError("x")) and "--debug" in describe(KeyError("x"))
    assert describe(ValueError("two\n  lines")) == "two lines"
    assert "pip install soundfile" in describe(ModuleNotFoundError("No module named 'soundfile'", name="soundfile"))
    assert "smaller batch" in describe(torch.OutOfMemoryError("CUDA out of memory"))
    assert "gone.csv" in describe(FileNotFoundError(2, "No such file", "gone.csv"))


def test_quiet_leaves_the_logging_as_it_was():
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with models_command.quiet():
        assert logging.get_verbosity() == logging.ERROR
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_launch_commands_of_the_readme():
    """Every flag is one of the installed launchers, and what is launched is a command of ours."""
    found = re.findall(r"<!-- launch -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(found) == 4
    for command in found:
        words = [word for word in shlex.split(command.replace("\\\n", "")) if "ACCELERATE_USE_CPU" not in word]
        is_torchrun = words[0] == "torchrun"
        parser = torchrun_parser() if is_torchrun else launch_command_parser()
        options = parser.parse_args(words[1 if is_torchrun else 2 :])
        assert options.no_python and options.training_script == "hf-ext"
        name, *arguments = options.training_script_args
        with typer.main.get_command(app).commands[name].make_context(name, arguments) as context:
            assert str(context.params["output"]) == "out"
    assert options.nproc_per_node == "2"
