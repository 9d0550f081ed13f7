"""Nothing that is read can run code: no pickle, nor anything built on it, in the whole package."""

import ast
from pathlib import Path

import pytest

import billfish

SOURCES = sorted(Path(billfish.__file__).parent.rglob("*.py"))

MODULES = {
    "pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "jsonpickle", "joblib",
    "shelve", "marshal", "copyreg", "multiprocessing", "concurrent.futures.process", "xmlrpc",
    "torch.multiprocessing", "torch.package", "yaml",
}  # fmt: skip
"""Modules that are pickle, or send objects through it."""

CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.save", "numpy.load", "np.load",
    "os.fork", "os.forkpty", "ProcessPoolExecutor",
}  # fmt: skip
METHODS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip

IN_BENCH = {"multiprocessing", "multiprocessing.connection.Connection", "ProcessPoolExecutor"}
"""Tools run by hand compile and measure in processes of their own."""

IN_FORKS = {"multiprocessing", "multiprocessing.connection.wait"}
"""Children that are forks inherit their work, and nothing but their end is waited for."""


def found(source: str) -> list[str]:
    """What a source uses of these, by name."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if _is_one_of(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name for name in full if _is_one_of(name)]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or called.rpartition(".")[2] in METHODS | {"ProcessPoolExecutor"}:
                names.append(called)
    return names


def _is_one_of(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in MODULES)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import pickle as p", "from pickle import loads",
        "def f():\n    from torch import multiprocessing", "import torch.multiprocessing as mp",
        "torch.load('x')", "x = eval(y)", "dist.broadcast_object_list([1])",
        "from concurrent.futures import process", "import multiprocessing.connection",
    ],
)  # fmt: skip
def test_each_way_would_be_found(source: str) -> None:
    assert found(source)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.name))
def test_no_pickle_anywhere(path: Path) -> None:
    name = path.relative_to(Path(billfish.__file__).parent).as_posix()
    allowed = {"worker/compilation.py": IN_FORKS}.get(name, set())
    if name.startswith("bench/"):
        allowed = IN_BENCH
    assert set(found(path.read_text())) <= allowed
