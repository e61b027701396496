"""Names on the command line: `--model tiny --data notes/ --scale hg+dp+or --probes copying`.

Each is the name of a file in conf/ of the working directory or of the package. They become
`--config FILE`, so that a run's config.yaml is the same as with files.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sv.corpus.config import LAYER
from lightning_sv.corpus.sources.files import source_files
from lightning_sv.errors import ConfigError, unknown
from lightning_sv.settings.paths import config_names, find_config
from lightning_sv.settings.sections import SECTIONS
from lightning_sv.settings.words import Option, options_of, values_of
from lightning_sv.settings.yaml_file import read_leaves

#: option -> its default in a run that names a model
DEFAULTS = {
    "optim": "adamw",
    "schedule": "cos",
    "trainer": "cpu",
    "data": "stdlib",
    "model": "",
    "probes": "",
}
#: layers in the order in which they are read: a model sets values that depend on its size, and a
#: text of your own the vocabulary of the model
_ORDER = ("base", "optim", "schedule", "trainer", "data", "model", "probes", "own data")
#: folder of the corpora that are prepared from your own text
CORPORA = Path("data")


@dataclass(frozen=True)
class NamedCorpus:
    """The corpus that `--data` names.

    Attributes:
        folder: folder of the corpus
        layer: words that select the prepared corpus
        prepare: words of `lightning-sv prepare`
        is_own: True for a text of your own, whose tokenizer sets the vocabulary of the model
    """

    folder: Path
    layer: tuple[str, ...]
    prepare: tuple[str, ...]
    is_own: bool

    @property
    def place(self) -> str:
        """Place of its layer among the others."""
        return "own data" if self.is_own else "data"

    @property
    def is_prepared(self) -> bool:
        """True if the corpus exists."""
        return (self.folder / LAYER).is_file()


@dataclass(frozen=True)
class Resolved:
    """A command line with files instead of names.

    Attributes:
        before: words before the first name
        layers: place in `_ORDER` -> words of a config file, for all names but that of the corpus
        after: other words after the first name
        corpus: the corpus that `--data` names, if any
    """

    before: list[str]
    layers: dict[str, Sequence[str]]
    after: list[str]
    corpus: NamedCorpus | None

    @property
    def words(self) -> list[str]:
        """Arguments of `fit`, once the corpus is prepared."""
        return self._with(self.corpus.layer if self.corpus else ())

    @property
    def to_prepare(self) -> list[str]:
        """The same with the text of the corpus, which need not be prepared."""
        return self._with(self.corpus.prepare if self.corpus else ())

    @property
    def parseable(self) -> list[str]:
        """The words that a parser accepts before the corpus is prepared."""
        is_prepared = self.corpus is None or self.corpus.is_prepared
        return self.words if is_prepared else self.to_prepare

    def _with(self, words_of_corpus: Sequence[str]) -> list[str]:
        """Return all words; a later layer may depend on earlier ones."""
        layers = dict(self.layers)
        if self.corpus is not None:
            layers[self.corpus.place] = words_of_corpus
        words = list(self.before)
        for place in _ORDER:
            words += layers.get(place, ())
        return words + self.after


def resolve_names(words: Sequence[str], *, trainer: str = DEFAULTS["trainer"]) -> Resolved:
    """Replace names by config files, at the place of the first name.

    With `--model NAME` they are a complete config: base, and one file per option or its default.
    Without it, each is one more file. `trainer` is the default of `--trainer`.

    Raises:
        ConfigError: an unknown name, two names for one key, or a text folder without text
    """
    names, before, after = _split(words)
    if "model" in names:
        names = DEFAULTS | {"trainer": trainer} | names
    corpus = find_corpus(names["data"]) if "data" in names else None
    return Resolved(before, _layers(names), after, corpus)


def _layers(names: Mapping[str, str]) -> dict[str, Sequence[str]]:
    layers: dict[str, Sequence[str]] = {}
    if "model" in names:
        layers["base"] = _layer(".", "base")
    for option in ("optim", "schedule", "trainer", "model", "probes"):
        name = names.get(option)
        if name:
            layers[option] = _layer(option, name)
    return layers


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the names, the words before the first of them, and those after it."""
    names: dict[str, str] = {}
    before: list[str] = []
    after: list[str] = []
    for option in options_of(words):
        if option.name == "scale":
            _add_name(names, option)
            after += ["--model.scale", names["scale"]]  # in its place, as any key
        elif _is_name(option):
            _check_before_files(option, after)
            _add_name(names, option)
        elif names:
            after += option.words
        else:
            before += option.words
    if "scale" in names and values_of(words, "model.scale"):
        expected = "one of --scale and --model.scale. Remove one."
        raise ConfigError(f"--scale is {names['scale']}; expected {expected}")
    return names, before, after


def _check_before_files(option: Option, after: Sequence[str]) -> None:
    """Refuse a name after a file, which would override it: names stand at the first one's place."""
    if any(other.name == "config" for other in options_of(after)):
        expected = "a place before --config, whose values override those of names"
        raise ConfigError(f"--{option.name} {option.value} follows a file; expected {expected}.")


def _is_name(option: Option) -> bool:
    """Return True for a name, not for a section such as `--model {...}` or `--data FILE.yaml`."""
    if option.name not in (*DEFAULTS, "scale"):
        return False
    if option.name not in SECTIONS:
        return True
    is_section = option.text.startswith("{")
    is_file = option.text.endswith((".yaml", ".yml"))
    return not is_section and not is_file


def _add_name(names: dict[str, str], option: Option) -> None:
    key = option.name
    if not option.value:
        raise ConfigError(
            f"--{key} has no value; expected a name. `lightning-sv presets` lists them."
        )
    if key in names:
        given = f"{names[key]} and {option.value}"
        raise ConfigError(f"--{key} is {given}; expected one name. Remove one.")
    names[key] = option.value


def _layer(option: str, name: str) -> list[str]:
    return ["--config", str(find_config(option, name))]


def find_corpus(name: str) -> NamedCorpus:
    """Return the corpus of a name in conf/data, or of one in data/, or of a path.

    A path is the folder of a prepared corpus, or a file or folder of text.

    Raises:
        ConfigError: there is none, or it has no text
    """
    known = config_names("data")
    plain = name.removeprefix("./").rstrip("/")
    if name in known:
        return _known_corpus(name)
    _check_name(plain, name)

    folders = [CORPORA / plain.removeprefix(f"{CORPORA}/"), Path(plain)]
    is_path_of_text = name != plain and Path(plain).exists()
    if is_path_of_text:  # such as letters/, of which data/letters need not be prepared
        folders = [Path(plain)]
    for prepared in folders:
        if (prepared / LAYER).is_file():
            words = _own_layer(prepared)
            return NamedCorpus(prepared, words, words, is_own=True)
    if not Path(plain).exists():
        corpora = [path.parent.name for path in CORPORA.glob(f"*/{LAYER}")]
        problem = unknown("--data", name, sorted({*known, *corpora}))
        raise ConfigError(f"{problem} Or name a file or folder of text.")
    return _own_text(Path(plain))


def _check_name(name: str, text: str) -> None:
    """Refuse a text whose corpus would have the name of one in conf/data."""
    if name in config_names("data"):
        expected = f"{name} for conf/data/{name}.yaml, or a text of a different name"
        raise ConfigError(f"--data is {text}; expected {expected}.")


def _known_corpus(name: str) -> NamedCorpus:
    """Return the corpus of conf/data/NAME.yaml."""
    layer = find_config("data", name)
    folder = str(read_leaves(layer).get("data.corpus.dir", CORPORA / name))
    words = ("--config", str(layer))
    return NamedCorpus(Path(folder).expanduser(), words, words, is_own=False)


def _own_text(path: Path) -> NamedCorpus:
    """Return the corpus of a file or folder of text."""
    name = os.path.abspath(path)  # noqa: PTH100 - `.` and `..` have no name, and links keep theirs
    stem = path.stem if path.is_file() else Path(name).name
    folder = CORPORA / re.sub(r"\s", "_", stem)
    _check_name(folder.name, str(path))
    if folder == path:
        expected = "a text outside of data/ or deeper in it"
        raise ConfigError(f"--data is {path}, its own corpus; expected {expected}.")
    source = f"files:{path}"
    words: tuple[str, ...] = ("--data.corpus.source", source, "--data.corpus.dir", str(folder))
    if (folder / LAYER).is_file():
        words = (*_own_layer(folder), *words)
    else:
        source_files(str(path))  # raises if there is no text
    return NamedCorpus(folder, _own_layer(folder), words, is_own=True)


def _own_layer(folder: Path) -> tuple[str, ...]:
    """Return the words of a corpus's layer, and its folder; corpus.yaml has its first name."""
    return "--config", str(folder / LAYER), "--data.corpus.dir", str(folder)
