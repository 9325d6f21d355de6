"""The rooms know each other only where they should."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("tokenv", "agents", "estimators")
MODULES = sorted(path for room in OURS for path in (ROOT / room).rglob("*.py"))

# What a module (the longest of these that fits its name) may import of ours; a module outside may import anything.
ALLOWED = {
    "tokenv.keys": (),
    "agents": ("agents", "tokenv.keys"),
    "estimators": ("estimators", "tokenv.keys"),
    "tokenv.lm": ("tokenv.lm", "tokenv.keys"),
    "tokenv.data": ("tokenv.data",),
    "tokenv.report": ("tokenv.report",),
    "tokenv.rollout": ("tokenv.keys", "tokenv.lm"),
    "tokenv.env": ("tokenv.keys", "tokenv.lm", "tokenv.data", "tokenv.rollout"),
    "tokenv.gym": ("tokenv.env", "tokenv.lm", "tokenv.data", "tokenv.keys"),
}


def within(name, room):
    return name == room or name.startswith(room + ".")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source, name, is_package=False):
    """Names of all modules that source text imports, anywhere in it, relative ones resolved."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*package, *([node.module] if node.module else [])])
            # "from tokenv import keys" imports tokenv.keys, "from tokenv.env import X" only tokenv.env.
            found += [f"{base}.{alias.name}" for alias in node.names] if base in OURS else [base]
    return found


def forbidden(source, name, is_package=False):
    rooms = [room for room in ALLOWED if within(name, room)]
    if not rooms:
        return []
    allowed = ALLOWED[max(rooms, key=len)]
    ours = [found for found in imports(source, name, is_package) if any(within(found, room) for room in OURS)]
    return [found for found in ours if not any(within(found, room) for room in allowed)]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_imports_only_what_its_room_may(path):
    assert forbidden(path.read_text(), module_name(path), path.name == "__init__.py") == []


def test_every_room_is_there():
    names = [module_name(path) for path in MODULES]
    missing = [room for room in ALLOWED if not any(within(name, room) for name in names)]
    assert not missing


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("tokenv.keys", "import tokenv.env"),
        ("agents.learned", "from tokenv.lm.unet import UNet"),
        ("agents.learned", "from tokenv import rollout"),
        ("estimators.base", "def f():\n    from agents import base"),
        ("tokenv.lm.unet", "from ..env import TokenizationEnv"),
        ("tokenv.lm.unet", "from .. import env"),
        ("tokenv.data.hub", "import tokenv.keys"),
        ("tokenv.rollout", "import agents"),
    ],
)
def test_forbidden_imports_are_found(name, source):
    assert forbidden(source, name)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("agents.learned", "from tokenv import keys\nfrom agents.base import Agent\nimport torch"),
        ("tokenv.lm.unet", "from .layers import Linear\nfrom . import codec"),
        ("tokenv.train", "from agents.learned import Learned"),
    ],
)
def test_allowed_imports_pass(name, source):
    assert forbidden(source, name) == []


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, tokenv; print([m for m in ('torch', 'torchrl', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
