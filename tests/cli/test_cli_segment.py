"""``tokenv segment``: any bytes are shown, and none of them acts."""

from pathlib import Path

import pytest

from tokenv.cli.main import run_command


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
    run_command("segment", ["with", f"run={trained}", "file=text.bin", "out=other.html", "threshold=True"])
    assert "\\xff" in Path("other.html").read_text()
    with pytest.raises(ValueError, match="the text is empty"):
        run_command("segment", ["with", f"run={trained}", "text="])
