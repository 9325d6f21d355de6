"""``tokenv check``: the checks of ``tokenv.testing`` on the command line."""

import sys
from pathlib import Path

import pytest
from fresh_process import command

from tokenv.cli.main import run_command
from tokenv.core.errors import RunFailedError, UserError

ROOT = Path(__file__).parents[2]
MINE = """
from tokenv import keys
from tokenv.estimators import Discount, EarlyExit, ScoreFunction, Stage, chain

class OwnMean(Stage):
    in_keys, out_keys, samples = [keys.ADVANTAGE], [keys.ADVANTAGE], 2
    def forward(self, td):
        credit = td[keys.ADVANTAGE]
        return td.set(keys.ADVANTAGE, credit - credit.mean(-3, keepdim=True))

def right(gamma: float = 0.99):
    return chain(EarlyExit(), Discount(gamma), ScoreFunction())

def wrong(gamma: float = 0.99):
    return chain(EarlyExit(), Discount(gamma), OwnMean(), ScoreFunction(), num_samples=2)

class Number(int):
    pass
nothing = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the current folder, which is not on the path."""
    (tmp_path / "mine_checked.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.delitem(sys.modules, "mine_checked", raising=False)
    return "mine_checked"


def test_an_estimator_of_the_current_folder(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("check", [f"{mine}:right", "gamma=1.0"])
    first, checked, unchecked = capsys.readouterr().out.splitlines()
    assert first == f"estimator {mine}:right: no mistake was found"
    assert "expected gradient" in checked
    assert unchecked == "not checked: nothing was left out"
    run_command("check", [f"{mine}:right", "kind=estimator"])
    assert "check it with gamma=1.0" in capsys.readouterr().out.splitlines()[-1]


def test_what_is_wrong_is_one_message_and_status_1(mine: str) -> None:
    with pytest.raises(
        RunFailedError, match="wrong: declares itself unbiased, but its expected gradient is off"
    ):
        run_command("check", [f"{mine}:wrong", "gamma=1.0"])
    done = command(["check", f"{mine}:wrong", "gamma=1.0"], Path.cwd(), [Path.cwd()])
    assert done.returncode == 1
    assert done.stderr.startswith(f"tokenv: estimator {mine}:wrong: declares itself unbiased")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("estimator", "early_exit"),
        ("rate_target", "binomial"),
        ("agent", "uniform"),
        ("codec", "bytes"),
    ],
)
def test_the_kind_of_a_registered_name_is_found(
    kind: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command("check", [name])
    assert capsys.readouterr().out.startswith(f"{kind} {name}: no mistake was found\nchecked: ")


def test_the_kind_of_a_class_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    run_command("check", ["tokenv.agents.heuristic:Whitespace"])
    assert capsys.readouterr().out.startswith(
        "agent tokenv.agents.heuristic:Whitespace: no mistake was found\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected one name, such as rloo"),
        (["rloo", "ppo"], "check rloo ppo: expected one name"),
        (["rlo"], "'rlo' is unknown: did you mean 'rloo'"),
        (["rloo", "kind=estimater"], "kind = 'estimater': did you mean 'estimator'"),
        (["rloo", "gama=1"], "estimator.gama is no option"),
        (
            ["nowhere_at_all:x"],
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        (["mine_checked:other"], "cannot be imported: AttributeError"),
        (["mine_checked:nothing"], "is 3: expected a class, or a function"),
        (
            ["mine_checked:Number"],
            "makes a Number: expected one of agent, estimator, rate_target, codec",
        ),
        (["mine_checked:right", "gama=1"], "gama is no option"),
    ],
)
def test_mistakes_are_named(mine: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_command("check", words)
