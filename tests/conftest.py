"""Settings for all tests: offline, one thread, the same random numbers in every run."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.pop("TRANSFORMERS_VERBOSITY", None)  # some tests wait for warnings of the library

import gc
import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # harness and cases, from any folder below

from matrix import Matrix  # noqa: E402

MATRIX = pytest.StashKey[Matrix]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", metavar="README", help="write the table of what was tried with what into this file")


def pytest_configure(config: pytest.Config) -> None:
    import datasets
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401
    from transformers.utils import logging

    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    config.pluginmanager.register(matrix := Matrix(), "matrix")
    config.stash[MATRIX] = matrix
    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: garbage collection need not go through it a thousand times."""
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """All checks of a class go to one worker, which keeps its models; of other files, all tests of a file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByClass(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            checked = re.search(r"test_contract\.py::\w+\[(Ext\w+)-", nodeid)
            return checked[1] if checked else nodeid.partition("::")[0]

    return ByClass(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    readme = session.config.getoption("--matrix")
    if readme and not hasattr(session.config, "workerinput"):
        from cases import CASES

        whose = {name.removeprefix("ext_"): case.blocks_of for name, case in CASES.items()}
        session.config.stash[MATRIX].write(Path(readme), whose)


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test starts from the same state and leaves torch's global switches as they were."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)  # of the CPU; manual_seed keeps a stack trace for the GPU
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is deterministic mode's own check; the tests that need it do it themselves.
    torch.utils.deterministic.fill_uninitialized_memory = False
    dtype = torch.get_default_dtype()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session", autouse=True)
def one_kernel_of_four_bits():
    """On processors with AVX512-BF16 bitsandbytes has a second one, in bf16, which refuses small layers and passes no
    gradients: what is compared to fp32's precision does without it on every machine. `layers/test_quantized.py` is
    about it."""
    if importlib.util.find_spec("bitsandbytes") is None:
        yield
        return
    import bitsandbytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def stock_folders(tmp_path_factory):
    """Where the harness keeps the tiny stock checkpoints, built once for all tests of a run."""
    import harness

    harness.set_folder(tmp_path_factory.mktemp("stock"))
