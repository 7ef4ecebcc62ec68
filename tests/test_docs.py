"""What the documents and examples show is true: their Python code runs, on the software device."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rstream as rs

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
    """Each block, with empty lines in front so that a traceback shows the document's line numbers."""
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_documents_code_runs_from_top_to_bottom(document, monkeypatch):
    monkeypatch.setenv("RSTREAM_DEVICE", "soft")
    names = {"__name__": "__main__"}
    for block in blocks(document.read_text(encoding="utf-8")):
        exec(compile(block, document, "exec"), names)


def test_the_documents_have_code():
    assert sum(len(blocks(document.read_text(encoding="utf-8"))) for document in DOCUMENTS) > 8


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name
)
def test_relative_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example):
    done = subprocess.run(
        [sys.executable, "-W", "error", example],
        env=os.environ | {"RSTREAM_DEVICE": "soft"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_comparison_runs(tmp_path):
    tables = tmp_path / "tables.md"
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "benches" / "compare.py",
            "--device=soft",
            "--quick",
            "--only=T8,T9",
            "--markdown",
            tables,
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "| T9 | delay by a slow callback, ms |" in tables.read_text(encoding="utf-8")


def documented(body, owner):
    """Each object of a stub with the docstring that it has there."""
    for item in body:
        if isinstance(item, ast.ClassDef):
            runtime = getattr(owner, item.name, None)
            if runtime is not None:
                yield item.name, ast.get_docstring(item), runtime
                yield from ((f"{item.name}.{name}", doc, found) for name, doc, found in documented(item.body, runtime))
        elif isinstance(item, ast.FunctionDef) and hasattr(owner, item.name):
            decorators = {ast.unparse(decorator) for decorator in item.decorator_list}
            if not any(decorator.endswith(".setter") for decorator in decorators):
                yield item.name, ast.get_docstring(item), getattr(owner, item.name)


def test_help_says_what_the_stubs_say():
    stubs = Path(rs._core.__file__).with_name("_core.pyi").read_text(encoding="utf-8")
    checked = 0
    for name, doc, found in documented(ast.parse(stubs).body, rs._core):
        if doc:
            checked += 1
            assert inspect.getdoc(found) == doc, name
    assert checked > 120
