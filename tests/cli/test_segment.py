"""``tokenv segment`` prints any bytes, escaped."""

import json
import shutil
from pathlib import Path

import pytest

from tokenv.cli.main import run_command
from tokenv.core.errors import UserError
from tokenv.evaluation import text_report


def test_segment_writes_a_page(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "<b>für</b> \x1b[31m& Ende" * 3
    result = run_command("segment", ["with", f"run={trained}", f"text={text}", "seed=3"])
    shown = capsys.readouterr().out
    page = Path("segments.html").read_text()
    assert "\x1b[31m&" not in shown
    assert "<b>für" not in page
    assert 1 <= result["boundaries"] <= len(text)
    assert result["characters"] == len(text)
    Path("text.bin").write_bytes(b"\xff\xfe plain")
    run_command(
        "segment", ["with", f"run={trained}", "file=text.bin", "out=other.html", "threshold=True"]
    )
    assert "\\xff" in Path("other.html").read_text()
    with pytest.raises(ValueError, match="the text is empty"):
        run_command("segment", ["with", f"run={trained}", "text="])


def test_json_output_and_several_runs_side_by_side(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = trained.with_name("other")
    shutil.copytree(trained, other)
    words = [
        f"run={trained}",
        f"other_runs=['{other}']",
        "text=für alle",
        "json=cut.json",
        "threshold=True",
    ]
    run_command("segment", ["with", *words])
    stored = json.loads(Path("cut.json").read_text())
    assert list(stored) == [str(trained), str(other)]
    one = stored[str(trained)]
    assert one == stored[str(other)]
    assert "".join(token["text"] for token in one["tokens"]).encode() == "für alle".encode()
    assert [token["start"] for token in one["tokens"][1:]] == [
        token["end"] for token in one["tokens"][:-1]
    ]
    assert one["bytes"] == len(one["probability"]) == len(one["boundary"]) == len(one["bits"]) == 9
    page = Path("segments.html").read_text()
    assert page.count("<h2>") == 2
    assert str(other) in page
    assert f"{other}:" in capsys.readouterr().out.replace("\n", "")
    with pytest.raises(UserError, match="expected other runs than"):
        run_command("segment", ["with", f"run={trained}", f"other_runs=['{trained}']", "text=a"])


def test_a_long_text_is_cut_in_pages_and_short_in_the_terminal(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_report, "PAGE_CHARACTERS", 40)
    text = "0123456789" * 10
    run_command(
        "segment", ["with", f"run={trained}", f"text={text}", "max_chars=30", "out=long.html"]
    )
    shown = capsys.readouterr().out
    assert "... and 70 characters more" in shown
    assert "page: long.html to long-3.html" in shown
    first, second, third = (
        Path(name).read_text() for name in ("long.html", "long-2.html", "long-3.html")
    )
    assert "long-2.html" in first
    assert "previous page" not in first
    assert "long.html" in second
    assert "long-3.html" in second
    assert "next page" not in third
    assert "81 to 100 of 100" in third
