"""Reports: self-contained, safe to open, with the numbers of the event files."""

import re
from collections import Counter
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.image import imread

from lightning_sv.__main__ import main
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.report.content import Section
from lightning_sv.experiments.report.markdown import markdown_report
from lightning_sv.experiments.report.page import html_page
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Verdict
from lightning_sv.experiments.sources.from_runs import own_figure
from lightning_sv.runs.events import read_run
from tests.conftest import Refused, Told, edit_json
from tests.experiments.fake_results import figure, rows, write_run


class Page(HTMLParser):
    """Tags, attributes that load something, and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attrs: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    @property
    def loads(self) -> list[str]:
        names = ("src", "href", "srcset", "data")
        return [value or "" for name, value in self.attrs if name in names]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attrs += attrs
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_report([figure()], out, "laptop")
    return out


def test_html_page_is_self_contained(report: Path) -> None:
    text = (report / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.tags and page.open == []
    assert not [name for name, _ in page.attrs if name.startswith("on")]
    without_pictures = re.sub(r"base64,[\w+/=]+", "", text)
    assert not re.search(r"url\(|@import|https?://", without_pictures)

    pictures = [source.partition(",")[0] for source in page.loads]
    assert pictures == ["data:image/svg+xml;base64"] * 15
    assert page.tags.count("img") == 15


VISIBLE = st.text(min_size=1).filter(lambda text: text.split() and "\0" not in text)
MARKUP = ("`", "```", "~~~", "|", "\\", "<b>", "&lt;", "![x](y)", "1. ", "- ", "# ", "***", "__")
NASTY = st.lists(st.sampled_from([*MARKUP, "a", "\n"])).map("".join)


@given(words=VISIBLE | NASTY.filter(str.strip), command=NASTY)
@example(words="\\| <script>alert(1)</script>", command="a\n```\n<script>")
@example(words="1. a", command="")
@settings(max_examples=40, deadline=None)
def test_both_pages_have_any_text_escaped(words: str, command: str) -> None:
    """In headings, paragraphs, warnings, cells and commands."""
    verdict = Verdict(words, "holds", words, paper=words)
    made = figure()
    spec = replace(made.spec, title=words)
    made = replace(made, spec=spec, verdicts=(verdict,), warnings=(words,), panels=())
    section = Section(words, table=pd.DataFrame({words: [words]}), notes=[words])
    markdown = markdown_report([replace(made, command=command)], [[section]], {words: words})
    html = html_page(words, markdown, Path("nowhere"))
    assert Page(html).open == []

    # title, 2 facts, 4 of all claims, heading, 3 of its claims, panel, column, cell, note
    assert texts(html)[" ".join(words.split())] >= 13
    (code,) = re.findall(r"<pre><code.*?>(.*)</code></pre>", html, re.DOTALL)
    assert unescape(code).rstrip("\n") == command.rstrip("\n")
    alone = MarkdownIt("commonmark").enable("table").render(markdown)
    assert texts(alone) == texts(html)  # also where tags in Markdown are tags


def texts(html: str) -> Counter[str]:
    """Return the texts of the headings, cells and paragraphs of a page."""
    found = re.findall(r"<(h[123]|td|th|p)\b[^>]*>(.*?)</\1>", html, re.DOTALL)
    plain = [unescape(re.sub("</?strong>", "", text)) for _, text in found]
    return Counter(" ".join(text.split()) for text in plain)


def test_markdown_report_links_existing_pictures(report: Path) -> None:
    text = (report / "report.md").read_text()
    links = re.findall(r"!\[.*\]\((.*?)\)", text)
    assert len(links) == 15 and "<script" not in text
    for link in links:
        assert imread(report / link).shape[1] == 750
        assert (report / link).with_suffix(".svg").is_file()


def test_differences_csv_has_the_lines_of_both_arms_over_all_sizes(report: Path) -> None:
    table = pd.read_csv(report / "differences.csv")
    slopes = table[table.quantity == "slope per e-fold of size"]
    assert slopes[["baseline", "n"]].to_numpy().tolist() == [["llama", 12]] * 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own")
    for scale in ("unified", "llama"):
        for seed in range(3):
            write_run(root / f"{scale}{seed}", scale, seed)
    return root


def test_report_command_names_runs_that_are_left_out(tmp_path: Path, told: Told) -> None:
    write_run(tmp_path / "llama0", "llama", 0)
    for name in ("begun", "exploded"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "exploded/nonfinite.jsonl").touch()
    printed = told("report", str(tmp_path), "--out", str(tmp_path / "out"))
    unwrapped = printed.replace("\n", "")  # long paths are cut at any letter
    assert "begun" in unwrapped and "exploded" in unwrapped


def test_report_command_numbers_are_those_of_the_event_files(
    runs: Path, tmp_path: Path, told: Told
) -> None:
    words = ["report", str(runs), "--baseline", "llama", "--out", str(tmp_path)]
    assert "unified is lower than llama by 0.030 nats" in told(*words)
    table = rows(tmp_path / "results.csv")
    assert [row["arm"] for row in table] == ["llama"] * 3 + ["unified"] * 3
    for row in table:
        run = read_run(tmp_path / row["run"])
        assert float(row["val_loss"]) == run.curve("val/loss").values[-1]
        assert (row["tokens"], row["epochs"]) == ("10000", "2.5")
        assert (row["baseline"] == "True") == (row["arm"] == "llama")
        assert float(row["train_loss_last_tenth"]) == pytest.approx(run.val_loss)

    (pair,) = own_figure([runs], baseline="llama").panels[0].pairs
    difference, factor = rows(tmp_path / "differences.csv")
    assert pair.difference.mean == float(difference["estimate"])
    assert pair.efficiency.factor == float(factor["estimate"])
    text = Page((tmp_path / "report.html").read_text()).text
    assert " ".join(["lightning-sv", *words]) in text
    assert len(list((tmp_path / "figures").glob("*.svg"))) == 2


def test_report_command_report_of_other_runs_not_replaced(
    runs: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder given by --out is overwritten only if its report has some of these runs."""
    monkeypatch.chdir(tmp_path)
    one = f"{runs}/llama0"
    other = f"{runs}/unified0"
    assert main(["report", one, "--out", "mine"]) == 0
    before = Path("mine/report.html").read_bytes()
    assert one in refused("report", other, "--out", "mine")
    assert Path("mine/report.html").read_bytes() == before
    assert main(["report", one, other, "--out", "mine"]) == 0  # more runs of the same report
    for run in (one, other):
        assert main(["report", run]) == 0  # the default folder is overwritten
    for name in ("results.csv", "report.md", "report.html"):
        Path(name).write_text("mine,too\n1,2\n")
        assert name in refused("report", one, "--out", ".")
        Path(name).unlink()


def test_own_figure_arm_of_one_seed_keeps_other_pairs(runs: Path, tmp_path: Path) -> None:
    whole = own_figure([runs], baseline="llama")
    few = write_run(tmp_path / "hg", "hg", 1)
    figure = own_figure([runs, few], baseline="llama")
    of_three, of_one = figure.panels[0].pairs
    assert of_three.verdict_sentence == whole.panels[0].pairs[0].verdict_sentence
    assert (of_three.difference.n, of_one.difference.n) == (3, 1)
    (warning,) = figure.warnings
    assert "hg and llama" in warning and warning.endswith("0, 2.")
    write_report([figure], tmp_path / "out", "")
    text = (tmp_path / "out/report.md").read_text()
    assert "; 3 pairs |" in text and "| no interval; 1 pair |" in text


def test_write_report_parameters_of_strategies_give_no_range(tmp_path: Path) -> None:
    for scale, parameters in [("llama", 1_000), ("hg", 1_010)]:
        written = write_run(tmp_path / scale, scale, 0)
        edit_json(written / "summary.json", parameters=parameters)
    write_report([own_figure([tmp_path])], tmp_path / "report", "")
    text = (tmp_path / "report/report.md").read_text()
    assert re.findall(r"okens per parameter\W+([\d.]+)(?: \(|;)", text) == ["9.9", "9.9"]


def test_own_figure_runs_of_one_strategy_and_seed_have_directories_or_labels_as_names(
    runs: Path, tmp_path: Path
) -> None:
    paths = [runs / "llama0", write_run(tmp_path / "faster", "llama", 0, lr=0.5)]
    found = own_figure([*paths, paths[0]])  # given twice, it is one run
    assert [arm.label for arm in found.panels[0].arms] == ["llama0", "faster"]
    named = own_figure(paths, labels=["slow", "fast"], baseline="fast")
    arms = [(arm.label, arm.baseline) for arm in named.panels[0].arms]
    assert arms == [("fast", True), ("slow", False)]
    assert "model.optim.lr" in named.warnings[0]


def test_own_figure_without_a_shared_seed_has_no_pairs(runs: Path) -> None:
    figure = own_figure([runs / "llama0", runs / "unified1"])
    assert figure.panels[0].pairs == [] and "share no seed" in figure.warnings[-1]


def test_own_figure_without_a_run_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        own_figure([])
    write_report([own_figure([runs])], tmp_path / "report", "")
    with pytest.raises(ConfigError, match=r"report .*folder of runs"):
        own_figure([tmp_path / "report"])


def test_report_incomparable_runs_refused(runs: Path, tmp_path: Path, refused: Refused) -> None:
    """In one sentence with the key or the directory, before a file is written."""
    (tmp_path / "empty").mkdir()
    tokens = write_run(tmp_path / "tokens", "hg", 0)
    edit_json(tokens / "summary.json", tokenizer_sha256="7002")
    corpus = write_run(tmp_path / "corpus", "hg", 0, corpus="dead")
    val = write_run(tmp_path / "val", "hg", 0, val_sequences=9)
    diverged = write_run(tmp_path / "exploded", "hg", 0)
    (diverged / "summary.json").rename(diverged / "nonfinite.jsonl")
    one = runs / "llama0"
    wrong: dict[str, list[object]] = {
        "nowhere": [tmp_path / "nowhere"],
        "empty": [tmp_path / "empty"],
        "exploded diverged": [one, diverged],
        "'x' with seed 0": [one, runs / "unified0", "--labels", "x", "x"],
        "--baseline": [one, "--baseline", "hg"],
        "--labels": [one, runs / "unified0", "--labels", "a"],
        f"corpus_hash of {corpus}": [one, corpus],
        "tokenizer_sha256": [one, tokens],
        f"data.val_sequences of {val}": [one, val],
    }
    for name, words in wrong.items():
        error = refused("report", *map(str, words), "--out", str(tmp_path / "never"))
        assert name in error and error.count("\n") == 1
    assert not (tmp_path / "never").exists()
