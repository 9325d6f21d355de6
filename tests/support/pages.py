"""Parser of web pages."""

from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "source", "input"}


class Page(HTMLParser):
    """Collect the visible contents of a page, and check that tags close in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict]] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.spans: list[dict] = []
        self.cells: list[str] = []
        self.headings: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def inside_text(self) -> bool:
        return any(attrs.get("class") == "text" for _, attrs in self.open)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.add(tag)
        if self.inside_text():
            assert tag in {"span", "i"}
            self.spans += [attrs] * (tag == "span")
        if tag not in VOID:
            self.open.append((tag, attrs))
        if attrs.get("class") == "text":
            self.texts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.inside_text():
            self.texts[-1] += data
        elif self.open and self.open[-1][0] in {"th", "td"}:
            self.cells.append(data)
        elif self.open and self.open[-1][0] in {"title", "h1", "h2"}:
            self.headings.append(data)
