"""Registration with the Auto classes, takeover and its script runner."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from cases import CASES
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizer,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_ext
import hf_ext.takeover
from hf_ext.auto import ARCHITECTURES, Architecture, architecture_of, stock_classes

TINY = {
    "bert": BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    ),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16),
    "llama": LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, max_position_embeddings=16,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Official checkpoints, written by the stock classes."""
    made = {}
    for name, stock in (("bert", BertModel), ("llama", LlamaForCausalLM)):
        made[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        stock(TINY[name]).save_pretrained(made[name])
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]
    (made["bert"] / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(str(made["bert"] / "vocab.txt")).save_pretrained(made["bert"])
    return made


@pytest.fixture(autouse=True)
def stock_types_afterwards():
    """No test may leave a takeover behind."""
    yield
    left = [a.official_model_type for a in ARCHITECTURES.values() if a.official_model_type]
    left = [name for name in left if name in CONFIG_MAPPING._extra_content]
    for name in left:
        CONFIG_MAPPING._extra_content.pop(name)
    assert not left, "a takeover was left behind"


def run(*arguments: str | Path, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """A fresh interpreter."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == code, done.stderr
    return done


# --- registration -------------------------------------------------------------------------------------------------


def test_stock_types_stay_stock(folders: dict[str, Path]) -> None:
    assert type(AutoConfig.for_model("bert")) is BertConfig
    assert type(AutoConfig.for_model("llama")) is LlamaConfig
    assert type(AutoConfig.from_pretrained(folders["bert"])) is BertConfig
    assert type(AutoModel.from_pretrained(folders["bert"])) is BertModel
    assert type(AutoModel.from_config(TINY["llama"])) is LlamaModel
    assert type(AutoModelForCausalLM.from_pretrained(folders["llama"])) is LlamaForCausalLM
    assert type(AutoTokenizer.from_pretrained(folders["bert"])).__name__.startswith("BertTokenizer")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_auto_class_resolves(model_type: str) -> None:
    architecture = ARCHITECTURES[model_type]
    config = AutoConfig.for_model(model_type)
    assert type(config) is architecture.config_class is getattr(hf_ext, architecture.config)
    assert config.model_type == model_type
    case = CASES[model_type]
    fields = next(iter(case.configs.values()))
    with torch.device("meta"):
        for auto_class, class_name in architecture.heads.items():
            tiny = architecture.config_class(**{**fields, **case.heads[class_name].overrides})
            model = getattr(modeling_auto, auto_class).from_config(tiny)
            assert type(model) is architecture.load(class_name) is getattr(hf_ext, class_name)
            assert type(model).config_class is architecture.config_class
    for class_name in architecture.class_names():
        assert class_name.startswith("Ext")


@pytest.mark.parametrize("model_type", [name for name, a in ARCHITECTURES.items() if a.official_model_type])
def test_heads_are_those_of_the_stock_type(model_type: str) -> None:
    """Wherever a stock Auto class knows the official type, ours is registered under the corresponding name."""
    architecture = ARCHITECTURES[model_type]
    stock_config = CONFIG_MAPPING[architecture.official_model_type]
    for auto_class, class_name in architecture.heads.items():
        mapping = getattr(modeling_auto, auto_class)._model_mapping
        if stock_config not in mapping:  # ours leads to more than the stock table does
            continue
        stock = mapping[stock_config]
        stock = stock[0] if isinstance(stock, tuple) else stock
        assert class_name == f"Ext{stock.__name__}"


def test_our_type_from_a_saved_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    model = hf_ext.ExtBertModel.from_pretrained(folders["bert"])
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folders["bert"]).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "ext_bert"
    assert type(AutoConfig.from_pretrained(tmp_path)) is hf_ext.ExtBertConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is hf_ext.ExtBertModel
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is type(AutoTokenizer.from_pretrained(folders["bert"]))
    assert tokenizer("hello world")["input_ids"] == [2, 5, 6, 3]


REPORT = """
import json
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
report = {}
for name in ("bert", "llama"):
    config = AutoConfig.for_model("ext_" + name)
    stock = AutoConfig.for_model(name)
    heads = AutoModelForSequenceClassification._model_mapping
    report[name] = [
        type(config).__name__, type(stock).__name__, heads[type(config)].__name__, heads[type(stock)].__name__,
        TOKENIZER_MAPPING.get(type(config), None) is TOKENIZER_MAPPING.get(type(stock), None),
    ]
import peft
from peft.utils import constants
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as lora
report["lora"] = [lora["ext_" + n] == lora[n] for n in ("bert", "llama")]
report["targets"] = sum("ext_llama" in t for k, t in vars(constants).items() if k.startswith("TRANSFORMERS_MODELS_TO"))
report["stock_targets"] = sum("llama" in t for k, t in vars(constants).items()
                              if k.startswith("TRANSFORMERS_MODELS_TO"))
print(json.dumps(report))
"""


@pytest.mark.parametrize(
    "first",
    [
        "import hf_ext",
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\nimport peft, hf_ext",
        "from transformers import AutoConfig\nimport hf_ext",
    ],
    ids=["before", "after", "between"],
)
def test_order_of_imports_does_not_matter(first: str) -> None:
    report = json.loads(run("-c", first + REPORT).stdout.splitlines()[-1])
    assert report["bert"] == [
        "ExtBertConfig", "BertConfig", "ExtBertForSequenceClassification", "BertForSequenceClassification", True,
    ]  # fmt: skip
    assert report["llama"] == [
        "ExtLlamaConfig", "LlamaConfig", "ExtLlamaForSequenceClassification", "LlamaForSequenceClassification", True,
    ]  # fmt: skip
    assert report["lora"] == [True, True]
    assert report["targets"] == report["stock_targets"] > 1


def test_adapter_targets_are_the_official_ones(folders: dict[str, Path]) -> None:
    from peft import LoraConfig, get_peft_model

    def targets(model: torch.nn.Module) -> set[str]:
        adapted = get_peft_model(model, LoraConfig(r=2))
        return {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}

    ours = targets(hf_ext.ExtLlamaForCausalLM.from_pretrained(folders["llama"]))
    assert ours == targets(LlamaForCausalLM.from_pretrained(folders["llama"]))
    assert len(ours) == 2


def test_registering_again_is_refused_loudly_or_changes_nothing() -> None:
    with pytest.raises(ValueError, match="already used by a Transformers config|ext_bert"):
        AutoConfig.register("ext_bert", BertConfig)


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "ext_bert"])
def test_architecture_of(name: str) -> None:
    assert architecture_of(name) is ARCHITECTURES["ext_bert"]
    assert hf_ext.architecture_of is architecture_of


@pytest.mark.parametrize("name", ["perceiver", "", "BERT", "ext_"])
def test_architecture_of_names_what_is_known(name: str) -> None:
    with pytest.raises(ValueError, match=rf"model type '{name}' is not one of .*: .*bert.*llama"):
        architecture_of(name)


def test_architectures_is_a_copy() -> None:
    table = hf_ext.architectures()
    table.clear()
    assert hf_ext.architectures()["ext_bert"].official_model_type == "bert"


def test_unknown_class_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="bert has no class 'ExtBertForSpeech'; it has .*ExtBertForMaskedLM"):
        ARCHITECTURES["ext_bert"].load("ExtBertForSpeech")


def test_architecture_names_classes_once() -> None:
    made = Architecture("a", "a", "ExtAConfig", {"AutoModel": "ExtAModel", "AutoModelForCausalLM": "ExtAModel"}, ("X",))
    assert made.class_names() == ["ExtAModel", "X"]
    assert made.model_type == "ext_a"


# --- takeover -----------------------------------------------------------------------------------------------------


def ours_now(folders: dict[str, Path]) -> bool:
    """Whether the Auto classes build our classes at this moment; config, model and a type by name must agree."""
    answers = {
        type(AutoConfig.from_pretrained(folders["bert"])) is hf_ext.ExtBertConfig,
        type(AutoModel.from_pretrained(folders["bert"])) is hf_ext.ExtBertModel,
        type(AutoConfig.for_model("llama")) is hf_ext.ExtLlamaConfig,
    }
    assert len(answers) == 1
    return answers.pop()


def test_takeover_as_context_manager(folders: dict[str, Path]) -> None:
    assert not ours_now(folders)
    with hf_ext.takeover():
        assert ours_now(folders)
        model = AutoModelForCausalLM.from_pretrained(folders["llama"])
        tokenizer = AutoTokenizer.from_pretrained(folders["bert"])
    assert not ours_now(folders)
    assert type(model) is hf_ext.ExtLlamaForCausalLM
    assert type(model.config) is hf_ext.ExtLlamaConfig
    assert model.config.model_type == "ext_llama"
    assert tokenizer("hello world")["input_ids"] == [2, 5, 6, 3]
    ids = torch.tensor([[1, 2, 3]])
    stock = AutoModelForCausalLM.from_pretrained(folders["llama"])
    assert type(stock) is LlamaForCausalLM
    torch.testing.assert_close(model.eval()(ids).logits, stock.eval()(ids).logits, atol=1e-6, rtol=1e-5)


def test_takeover_as_function(folders: dict[str, Path]) -> None:
    active = hf_ext.takeover()
    try:
        assert ours_now(folders)
    finally:
        active.restore()
    assert not ours_now(folders)
    active.restore()
    assert not ours_now(folders), "restoring twice does no harm"


def test_takeover_is_left_by_an_exception(folders: dict[str, Path]) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), hf_ext.takeover():
        raise RuntimeError("on purpose")
    assert not ours_now(folders)


def test_restore_inside_the_block(folders: dict[str, Path]) -> None:
    with hf_ext.takeover() as active:
        active.restore()
        assert not ours_now(folders)
    assert not ours_now(folders)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_nested_takeovers_end_with_the_last_one_left(folders: dict[str, Path], order: tuple[int, ...]) -> None:
    active = [hf_ext.takeover() for _ in range(3)]
    for i, which in enumerate(order):
        active[which].restore()
        assert ours_now(folders) == (i < 2), f"after {i + 1} of 3 were left"


def test_stock_classes_suspends_a_takeover(folders: dict[str, Path]) -> None:
    with stock_classes():
        assert not ours_now(folders)
    assert not ours_now(folders), "without a takeover it changes nothing"
    with hf_ext.takeover():
        with stock_classes():
            assert not ours_now(folders)
            with stock_classes():
                assert not ours_now(folders)
            assert not ours_now(folders)
        assert ours_now(folders)
        with pytest.raises(RuntimeError, match="on purpose"), stock_classes():
            raise RuntimeError("on purpose")
        assert ours_now(folders)
    assert not ours_now(folders)


def test_takeover_left_inside_stock_classes(folders: dict[str, Path]) -> None:
    active = hf_ext.takeover()
    with stock_classes():
        active.restore()
    assert not ours_now(folders)


def test_registration_first_needed_during_a_takeover() -> None:
    """The tokenizer's registry is filled when its module is first loaded, which may be in a takeover."""
    code = """
        import hf_ext
        with hf_ext.takeover():
            from transformers import AutoTokenizer
            from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
            assert hf_ext.ExtBertConfig in TOKENIZER_MAPPING
        from transformers import BertConfig
        assert TOKENIZER_MAPPING[BertConfig] is TOKENIZER_MAPPING[hf_ext.ExtBertConfig]
        from transformers import AutoConfig
        assert type(AutoConfig.for_model("bert")) is BertConfig
    """
    run("-c", textwrap.dedent(code))


# --- the script runner --------------------------------------------------------------------------------------------


def test_runner_module_stays_callable(folders: dict[str, Path]) -> None:
    """`import hf_ext.takeover` binds the module to the function's name."""
    with hf_ext.takeover():
        assert ours_now(folders)
    assert not ours_now(folders)
    assert callable(sys.modules["hf_ext.takeover"])
    code = """
        import hf_ext
        first = hf_ext.takeover()
        first.restore()
        import hf_ext.takeover
        hf_ext.takeover().restore()
        from hf_ext import takeover
        with takeover():
            pass
        from hf_ext.takeover import main
        import importlib
        importlib.import_module("hf_ext.takeover")().restore()
    """
    run("-c", textwrap.dedent(code))


def test_runner_runs_a_script(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 42\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import json, sys
            import beside
            from transformers import AutoModel
            if __name__ == "__main__":
                model = AutoModel.from_pretrained(sys.argv[1])
                print(json.dumps([type(model).__name__, sys.argv, __file__, beside.value]))
                sys.exit(7)
        """)
    )
    done = run("-m", "hf_ext.takeover", script, folders["bert"], "--flag", "b c", code=7, cwd=folders["bert"])
    name, argv, file, value = json.loads(done.stdout.splitlines()[-1])
    assert name == "ExtBertModel"
    assert argv == [str(script), str(folders["bert"]), "--flag", "b c"]
    assert file == str(script)
    assert value == 42
    assert "RuntimeWarning" not in done.stderr


def test_runner_runs_a_module(folders: dict[str, Path], tmp_path: Path) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, sys\nfrom transformers import AutoConfig\n"
        "print(json.dumps([__name__, type(AutoConfig.from_pretrained(sys.argv[1])).__name__, sys.argv]))\n"
    )
    done = run("-m", "hf_ext.takeover", "-m", "trainer", folders["bert"], "-m", "x", cwd=tmp_path)
    name, config, argv = json.loads(done.stdout.splitlines()[-1])
    assert name == "__main__"
    assert config == "ExtBertConfig"
    assert argv[1:] == [str(folders["bert"]), "-m", "x"]
    assert Path(argv[0]).name == "__main__.py"


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("-m",), 2), (("-h",), 0), (("--help",), 0)])
def test_runner_says_how_it_is_used(capsys: pytest.CaptureFixture, arguments: tuple[str, ...], code: int) -> None:
    with pytest.raises(SystemExit) as left:
        sys.modules["hf_ext.takeover"].main(list(arguments))
    assert left.value.code == code
    printed = capsys.readouterr()
    assert "usage: python -m hf_ext.takeover script.py" in printed.out + printed.err


def test_runner_without_arguments() -> None:
    done = run("-m", "hf_ext.takeover", code=2)
    assert "usage: python -m hf_ext.takeover script.py" in done.stdout + done.stderr


def test_runner_restores_and_lets_errors_through(folders: dict[str, Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "script.py"
    script.write_text("raise KeyError('on purpose')\n")
    with pytest.raises(KeyError, match="on purpose"):
        sys.modules["hf_ext.takeover"].main([str(script)])
    assert not ours_now(folders)


def test_a_takeover_may_be_entered_again() -> None:
    again = hf_ext.takeover()
    for _ in range(2):
        with again:
            assert type(AutoConfig.for_model("bert")) is hf_ext.ExtBertConfig
        assert type(AutoConfig.for_model("bert")) is BertConfig


def test_runner_without_the_script(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hf_ext.takeover", str(tmp_path / "no.py")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "there is no script" in run.stderr
    assert "Traceback" not in run.stderr


def test_auto_map_is_there_and_in_no_file(folders: dict[str, Path], tmp_path: Path) -> None:
    """trl reads it of any configuration that is not stock; the library writes into it when code goes along."""
    config = hf_ext.ExtBertConfig()
    assert (
        config.auto_map == {}
        and "auto_map" not in config.to_dict()
        and "auto_map" not in hf_ext.ExtBertConfig().to_dict()
    )
    config.auto_map["AutoModel"] = "modeling.Model"
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {"AutoModel": "modeling.Model"}
    assert hf_ext.ExtBertConfig().auto_map == {}
