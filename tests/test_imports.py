"""Rooms import only the rooms which are listed here, and there is no circle."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the ground up: a room may import itself and what is listed, and every room listed stands above its own.
ALLOWED = {
    "core": (),
    "plotting": ("core",),
    "data": ("core",),
    "agents": ("core",),
    "estimators": ("core",),
    "lm": ("core",),
    "env": ("core", "data", "lm"),
    "config": ("core", "data", "agents", "estimators", "lm"),
    "testing": ("core", "agents", "lm", "env", "config"),
    "evaluation": ("core", "plotting", "lm", "env", "config"),
    "training": ("core", "data", "lm", "env", "config", "evaluation"),
    "lab": (
        "core",
        "plotting",
        "data",
        "estimators",
        "lm",
        "env",
        "config",
        "evaluation",
        "training",
    ),
    "library": ("core", "plotting", "data", "env", "config", "evaluation"),
    "compare": ("core", "plotting", "data", "config", "evaluation"),
    "series": (
        "core",
        "plotting",
        "data",
        "lm",
        "env",
        "config",
        "evaluation",
        "library",
        "compare",
    ),
    "cli": (
        "core",
        "plotting",
        "data",
        "config",
        "evaluation",
        "training",
        "lab",
        "compare",
        "library",
        "testing",
    ),
}


def module_name(path):
    """``tokenv.agents.base`` for agents/base.py: the folders beside tokenv are installed inside it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "tokenv" else ("tokenv", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = [
    path
    for room in ("tokenv", "agents", "estimators")
    for path in sorted((ROOT / room).rglob("*.py"))
]
MODULES = {module_name(path): path for path in PATHS}


def room_of(module):
    return [*module.split("."), ""][1]


def imports(source, name, is_package=False):
    """Our modules that source text imports, anywhere in it (for type checking, too), relative ones resolved.

    A string which names a module of a room, such as "tokenv.env.gym:BytesEnv", is an import, too. The program itself,
    "tokenv.__main__:main", which a process of its own runs, is none; the package root names gymnasium's environments.
    """
    imported = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[
                    : None if is_package and node.level == 1 else -node.level + is_package
                ]
                base = ".".join([*package, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            imported += [each if each in MODULES or base == "tokenv" else base for each in names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and name != "tokenv":
            imported += [
                each
                for each in re.findall(r"^(tokenv[.]\w+[.][\w.]+)(?::\w+)?$", node.value)
                if each in MODULES
            ]
    return {each for each in imported if each == "tokenv" or each.startswith("tokenv.")}


def forbidden(source, name, is_package=False):
    allowed = (room_of(name), *ALLOWED.get(room_of(name), ()))
    if name in ("tokenv.env", "tokenv.cli.main", "tokenv.library.hf_tokenizer"):
        # the package root, which composes the rooms, has the version and loads models
        allowed += ("",)
    return [
        module for module in imports(source, name, is_package) if room_of(module) not in allowed
    ]


GRAPH = {
    name: imports(path.read_text(), name, path.name == "__init__.py") - {name}
    for name, path in MODULES.items()
}


@pytest.mark.parametrize("name", [name for name in MODULES if room_of(name) in ALLOWED])
def test_a_module_imports_only_what_its_wing_may(name):
    path = MODULES[name]
    assert forbidden(path.read_text(), name, path.name == "__init__.py") == []


def test_every_wing_is_listed_and_every_edge_is_used():
    roots = {"tokenv", "tokenv.__main__"}
    assert {room_of(name) for name in MODULES if name not in roots} == set(ALLOWED)
    edges = {
        (room_of(name), room_of(target)) for name, targets in GRAPH.items() for target in targets
    }
    assert [
        (one, other) for one in ALLOWED for other in ALLOWED[one] if (one, other) not in edges
    ] == []


def test_no_arrow_goes_up():
    order = list(ALLOWED)
    up = [
        (one, other)
        for one in ALLOWED
        for other in ALLOWED[one]
        if order.index(other) > order.index(one)
    ]
    assert up == []


def test_sacred_is_met_in_one_file():
    importers = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            importers += [name for each in names if each.partition(".")[0] in ("sacred", "docopt")]
    assert set(importers) == {"tokenv.cli.sacred", "tokenv.cli.observers"}


def test_no_circles():
    graphlib.TopologicalSorter(GRAPH).prepare()  # raises CycleError, which names the modules


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("tokenv.core.keys", "import tokenv.env.stepping"),
        ("tokenv.agents.learned", "from tokenv.lm.unet import UNet"),
        ("tokenv.agents.learned", "from tokenv import env"),
        ("tokenv.estimators.base", "def f():\n    from tokenv.agents import base"),
        ("tokenv.lm.unet", "from ..env.stepping import TokenizationEnv"),
        ("tokenv.lm.unet", "from .. import env"),
        ("tokenv.lm.chunking", "from ..env import stepping"),
        ("tokenv.data.hub", "import tokenv.lm.config"),
        ("tokenv.env.rollout", "import tokenv.agents"),
        ("tokenv.compare.job", "import_module('tokenv.training.trainer')"),
        ("tokenv.compare.job", "call = 'tokenv.cli.main:main'"),
        ("tokenv.compare.comparison", "report = 'tokenv.series.comparison_report:SeriesReport'"),
        (
            "tokenv.plotting.html",
            "if TYPE_CHECKING:\n    from tokenv.compare.comparison import Comparison",
        ),
    ],
)
def test_forbidden_imports_are_found(name, source):
    assert forbidden(source, name)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "tokenv.agents.learned",
            "from tokenv.core import keys\nfrom tokenv.agents.base import Agent\nimport torch",
        ),
        ("tokenv.lm.unet", "from .layers import Linear\nfrom . import config"),
        ("tokenv.config.build", "from tokenv.agents.learned import Learned"),
    ],
)
def test_allowed_imports_pass(name, source):
    assert forbidden(source, name) == []


def test_computing_loads_no_drawing():
    """By the import statements of modules; test_removal looks at a process which computes."""
    waiting = [
        "tokenv.compare.command",
        "tokenv.compare.comparison",
        "tokenv.series.scores",
        "tokenv.evaluation.loaded_run",
        "tokenv.training.trainer",
        "tokenv.lab.variance_study",
    ]
    reached = set()
    while waiting:
        name = waiting.pop()
        reached.add(name)
        path = MODULES[name]
        nodes = ast.parse(path.read_text()).body
        statements = [each for each in nodes if isinstance(each, ast.Import | ast.ImportFrom)]
        source = "\n".join(map(ast.unparse, statements))
        assert not re.search(r"^(import|from) (matplotlib|jinja2)\b", source, re.MULTILINE), name
        imported = imports(source, name, path.name == "__init__.py")
        waiting += (imported & MODULES.keys()) - reached
    assert len(reached) > 50


@pytest.mark.parametrize("program", ["import tokenv", "import tokenv.agents, tokenv.estimators"])
def test_importing_the_package_loads_nothing_heavy(program):
    program += (
        "; import sys; print([m for m in ('torch', 'torchrl', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
