"""The walls of the house stand: who imports whom, sizes, the environment, a light import."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit import house

ROOT = Path(__file__).parents[2]
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "hpctrain").rglob("*.py"))}
EVERYTHING = SOURCES | {str(path.relative_to(ROOT)): path.read_text() for folder in ("tests", "bench", "scripts")
                        for path in sorted((ROOT / folder).rglob("*.py"))}

# Each rule, what it is asked of, and the smallest source that breaks it.
RULES = [
    (house.cycles, SOURCES, {"hpctrain/a.py": "import hpctrain.b", "hpctrain/b.py": "def f():\n import hpctrain.a"}),
    (house.impure, SOURCES, {"hpctrain/plan/a.py": "def f():\n    import numpy\n"}),
    (house.impure, SOURCES, {"hpctrain/plan/a.py": "from hpctrain.arrays import arrays_of\n"}),
    (house.environment_reads, SOURCES, {"hpctrain/a.py": "import os\nos.environ['A']\n"}),
    (house.environment_reads, SOURCES, {"hpctrain/a.py": "from os import getenv\n"}),
    (house.too_large, SOURCES, {"hpctrain/a.py": "x = 1\n" * 401}),
    (house.too_large, SOURCES, {"hpctrain/a.py": "def f():\n" + " x = 1\n" * 60}),
    (house.too_large, SOURCES, {"hpctrain/a.py": "def f(a, b, c, d, e, *, f, g, h, i): 0\n"}),
    (house.global_statements, EVERYTHING, {"hpctrain/a.py": "def f():\n global x\n x = 1\n"}),
    (house.vague_names, EVERYTHING, {"hpctrain/io_utils.py": ""}),
    (house.undocumented_modules, SOURCES, {"hpctrain/a.py": "x = 1\n"}),
    (house.machine_paths, SOURCES, {"hpctrain/a.py": "x = '/home" + "/me/data'\n"}),
]


@pytest.mark.parametrize("rule, sources, bad", RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_rule(rule, sources, bad):
    assert rule(sources) == []
    assert len(rule(bad)) == 1, "the rule must complain about its bad example"


def test_the_checkers_read_something():
    assert len(SOURCES) > 20
    assert any(name == "mpi4py.MPI" for name, _ in house.imports(SOURCES["hpctrain/transport/mpi.py"]))


# Contract of setup.cfg -> (file of a copy of the package, import) that breaks it.
NO_JOB = "Floors 1 and 2 know nothing of the job: no environment, no log, no runtime"
BROKEN = {
    "Who may import whom (docs/architecture.md)": ("plan/split.py", "from hpctrain import collectives"),
    "A backend knows no engine, collectives included": ("arrays/numpy.py", "import hpctrain.collectives"),
    NO_JOB: ("optim/clip.py", "import hpctrain.log"),
    "Only the runtime joins engines and backends": ("env.py", "import hpctrain.arrays"),
    "Plans and the rest of floor 1 need no library": ("plan/mesh.py", "import numpy"),
    "Engines have never heard of torch, CuPy or MPI": ("zero/__init__.py", "import torch"),
}


def lint_imports(folder: Path) -> str:
    program = ("import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; "
               "c(['--config', 'setup.cfg', '--no-cache'])")
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True,
                          timeout=60, check=False).stdout


def test_layers_hold():
    output = lint_imports(ROOT)
    assert f"{len(BROKEN)} kept, 0 broken" in output, output


def test_layers_can_fail(tmp_path):
    shutil.copytree(ROOT / "hpctrain", tmp_path / "hpctrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    for file, line in BROKEN.values():
        path = tmp_path / "hpctrain" / file
        path.write_text(path.read_text() + f"\n\ndef lazily():\n    {line}\n")
    output = lint_imports(tmp_path)
    for name in BROKEN:
        assert f"{name} BROKEN" in output, output


HEAVY = ("torch", "cupy", "mpi4py", "h5py", "numpy", "matplotlib", "rich", "typer")


def test_import_is_light():
    program = f"import hpctrain, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_import_is_fast():
    def seconds(program: str) -> float:
        """Of the processor, since others may be at work on it."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds("pass"), seconds("import hpctrain")) for _ in range(6)]
    assert min(b for _, b in pairs) - min(a for a, _ in pairs) < 0.15


def test_every_setting_of_the_linters_has_a_reason():
    inside, bare = False, []
    for line in (ROOT / "ruff.toml").read_text().splitlines():
        inside = line.startswith(("ignore = [", "[lint.per-file-ignores]")) or (inside and line != "]")
        if inside and line.strip().startswith('"') and not line.endswith("[") and "#" not in line:
            bare.append(line)
    assert bare == []
