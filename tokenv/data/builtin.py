"""Built-in data which needs no file: the interpreter's sources and documentation, and synthetic text."""

import ast
import importlib
import sysconfig
import warnings
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from tokenv.data.chunks import Document

Array = np.ndarray[Any, Any]
FOREIGN_FOLDERS = {"site-packages", "dist-packages"}
TEST_FOLDERS = {"test", "tests", "idle_test"}

# The synthetic language.
STEM_LENGTHS = (2, 6)
STEM_LETTERS = b"abcdef"
ENDINGS = b"ghijklmnopqrstuvwxyz"
DOCUMENT_WORDS = (400, 1000)
NEIGHBOURS = 10  # words that succeed one another in a circle
FOLLOWS = 0.9


def python_documents() -> list[Document]:
    """Read every .py file of the running interpreter's standard library, sorted by its path in the library."""
    return [Document(name, path.read_bytes()) for name, path in _library_files().items()]


def prose_documents() -> list[Document]:
    """Read the running interpreter's own documentation.

    Returns:
        The language reference by topic as `help()` shows it, then one document per module of the standard library
        (without its tests) which joins the docstrings of the module and of its classes and functions.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    texts = {f"topic {name}": text for name, text in sorted(topics.items())}
    for name, path in _library_files().items():
        if not TEST_FOLDERS.intersection(Path(name).parts):
            texts[f"docstrings of {name}"] = _docstrings(path)
    return [Document(name, text.encode(errors="replace")) for name, text in texts.items() if text]


def _library_files() -> dict[str, Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # Foreign packages are skipped while walking: they may hold many times the files of the library.
    tops = [path for path in root.iterdir() if path.name not in FOREIGN_FOLDERS]
    files = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*.py"))]
    names = {path.relative_to(root).as_posix(): path for path in files if path.suffix == ".py"}
    return {
        name: path
        for name, path in sorted(names.items())
        if path.is_file() and not FOREIGN_FOLDERS.intersection(Path(name).parts)
    }


def _docstrings(path: Path) -> str:
    with warnings.catch_warnings(action="ignore"):  # of the library's own sources
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # the library holds some broken files on purpose
            return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)
    ]
    return "\n\n".join(text for text in docstrings if text)


def make_lexicon(size: int, seed: int) -> list[bytes]:
    """Generate distinct words of 3 to 7 letters, the most frequent first.

    A word is a stem of the letters a to f and an ending, one of the other letters. Its last two letters distinguish it
    from the 119 words before and after it in the lexicon; many words share their earlier letters.

    Args:
        size: number of words.
        seed: seed of the language.

    Returns:
        `size` words over a to z.
    """
    generator = np.random.default_rng([seed, 0])
    pairs = list(map(bytes, product(STEM_LETTERS, ENDINGS)))
    generator.shuffle(pairs)
    lexicon: dict[bytes, None] = {}
    while len(lexicon) < size:
        length = generator.integers(STEM_LENGTHS[0], STEM_LENGTHS[1], endpoint=True)
        start = bytes(generator.choice(list(STEM_LETTERS), size=length - 1).tolist())
        lexicon[start + pairs[len(lexicon) % len(pairs)]] = None
    return list(lexicon)


def synthetic_documents(lexicon_size: int, documents: int, seed: int) -> list[Document]:
    """Generate documents of a few thousand bytes in the synthetic language, without spaces.

    A word is followed by its successor with probability 0.9, else by any word, the k-th of the lexicon with
    probability proportional to 1/k (Zipf). Ten words of similar frequency succeed one another in a circle. So the
    next word becomes predictable at the end of a word, and remains so until the next end.

    Args:
        lexicon_size: number of distinct words of the language.
        documents: number of documents.
        seed: seed of the language and of the documents.

    Returns:
        The documents, whose true tokens are the words.
    """
    lexicon = make_lexicon(lexicon_size, seed)
    generator = np.random.default_rng([seed, 1])
    words_D = generator.integers(*DOCUMENT_WORDS, size=documents, endpoint=True)
    word_K = _draw_words(lexicon_size, words_D, generator)

    length_W = np.array([len(word) for word in lexicon])
    end_K = np.cumsum(length_W[word_K])
    content = _spell(lexicon, length_W, word_K)
    gold = np.zeros(len(content), dtype=np.uint8)
    gold[end_K - 1] = 1

    end_D = end_K[np.cumsum(words_D) - 1].tolist()
    return [
        Document(f"words document {d}", content[begin:end].tobytes(), gold[begin:end].tobytes())
        for d, (begin, end) in enumerate(pairwise([0, *end_D]))
    ]


def _draw_words(lexicon_size: int, words_D: Array, generator: np.random.Generator) -> Array:
    """Draw the indices of all words of all documents, one document after the other."""
    successor_W = np.empty(lexicon_size, dtype=np.int64)
    for first in range(0, lexicon_size, NEIGHBOURS):
        circle = generator.permutation(np.arange(first, min(first + NEIGHBOURS, lexicon_size)))
        successor_W[circle] = np.roll(circle, -1)
    weight_W = 1 / np.arange(1, lexicon_size + 1)
    shape = (len(words_D), words_D.max())
    word_DK = generator.choice(lexicon_size, size=shape, p=weight_W / weight_W.sum())
    follows_DK = generator.random(shape) < FOLLOWS
    for k in range(1, shape[1]):
        word_DK[:, k] = np.where(follows_DK[:, k], successor_W[word_DK[:, k - 1]], word_DK[:, k])
    return word_DK[np.arange(shape[1]) < words_D[:, None]]


def _spell(lexicon: list[bytes], length_W: Array, word_K: Array) -> Array:
    longest = length_W.max()
    letter_WL = np.frombuffer(b"".join(word.ljust(longest) for word in lexicon), dtype=np.uint8)
    letter_WL = letter_WL.reshape(len(lexicon), longest)
    used_WL = np.arange(longest) < length_W[:, None]
    return letter_WL[word_K][used_WL[word_K]]
