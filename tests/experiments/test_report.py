"""Reports: self-contained, safe to open, with the numbers of the event files."""

import json
import re
import shutil
import subprocess
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
from lightning_sv.experiments.report.content import Section, report_content
from lightning_sv.experiments.report.markdown import markdown_report
from lightning_sv.experiments.report.page import html_page
from lightning_sv.experiments.report.steps import steps_table
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Verdict
from lightning_sv.experiments.sources.from_runs import own_figure
from lightning_sv.runs.events import read_run
from tests.conftest import Refused, Told
from tests.experiments.fake_fit import write_scalars
from tests.experiments.fake_results import figure, rows, write_run


class Page(HTMLParser):
    """Tags, attributes that load something, and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.attrs: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attrs += attrs
        self.loads += [
            value or "" for key, value in attrs if key in ("src", "href", "srcset", "data")
        ]
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
    assert page.open == [] and page.tags.count("script") == 1 and "<script>alert" not in text
    assert not any(name.startswith("on") or name == "style" for name, _ in page.attrs)
    pictures = [source for source in page.loads if not source.startswith("#")]
    assert page.tags.count("img") == len(pictures) == 15
    assert all(source.startswith("data:image/svg+xml;base64,") for source in pictures)
    assert not re.search(
        r"url\(|@import|https?://|fetch\(|import ", re.sub(r"base64,[\w+/=]+", "", text)
    )
    assert 'name="viewport"' in text
    assert ["#" + value for name, value in page.attrs if name == "id"] == [
        x for x in page.loads if x[0] == "#"
    ]
    for words in (
        "What <script>alert(1)</script> does.",
        "-0.0500 (-0.0600 to -0.0400; 90%, 3 pairs)",
        "0.003; 0.06 of the primary claims",
        *(
            f"{word}: 1"
            for word in ("holds", "equal within 0.01", "not resolved", "not testable here")
        ),
        "lightning-sv paper placement --scale 'a b'",
        "7.68 (the paper's are 100)",
        "falls faster",
    ):
        assert words in page.text, words
    head = page.text[: page.text.index("Contents\n")]
    checkout = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert checkout.returncode or checkout.stdout.strip() in head
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", head) and re.search(
        r"\d+ cores, .*torch \d", head
    )


VISIBLE = st.text(min_size=1).filter(lambda text: text.split() and "\0" not in text)
MARKUP = (
    "`",
    "```",
    "~~~",
    "|",
    "\\",
    "\n",
    "<b>",
    "&lt;",
    "![x](y)",
    "1. ",
    "- ",
    "# ",
    "***",
    "__",
    "a",
)
NASTY = st.lists(st.sampled_from(MARKUP)).map("".join)


@given(words=VISIBLE | NASTY.filter(str.strip), command=NASTY)
@example(words="\\| <script>alert(1)</script>", command="a\n```\n<script>")
@example(words="1. a", command="")
@settings(max_examples=40, deadline=None)
def test_both_pages_have_any_text_escaped(words: str, command: str) -> None:
    """In headings, paragraphs, warnings, cells, alternative texts and commands."""
    verdict = Verdict(words, "holds", words, None, None, None, 0, None, words)
    made = figure()
    spec = replace(made.spec, title=words)
    result = replace(
        made, spec=spec, verdicts=(verdict,), warnings=(words,), command=command, panels=()
    )
    section = Section(words, table=pd.DataFrame({words: [words]}), notes=[words])
    content = report_content([result], [[section]], {words: words})
    html = html_page(content, Path("nowhere"))
    markdown = (
        MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown_report(content))
    )
    assert Page(html).open == []

    html = html[html.index("<body>") : html.index("<script>")]
    found, expected = texts(html), texts(markdown)
    # title, 2 facts, 4 of all claims, heading, 3 of its claims, panel, column, cell, note
    assert found[" ".join(words.split())] >= 13
    assert found - expected == Counter({"Contents": 1}) and set(expected - found) <= {""}
    for page in (html, markdown):
        (code,) = re.findall(r"<pre><code.*?>(.*)</code></pre>", page, re.DOTALL)
        assert unescape(code).rstrip("\n") == command.rstrip("\n")


def texts(html: str) -> Counter[str]:
    """Return the texts of the headings, cells and paragraphs of a page."""
    found = re.findall(r"<(h[123]|td|th|p)\b[^>]*>(.*?)</\1>", html, re.DOTALL)
    plain = [unescape(re.sub("</?strong>", "", text)) for _, text in found]
    return Counter(" ".join(text.split()) for text in plain)


def test_markdown_report_links_existing_pictures(report: Path) -> None:
    text = (report / "report.md").read_text()
    links = re.findall(r"!\[.*\]\((.*?)\)", text)
    assert len(links) == 15 and {Path(link).suffix for link in links} == {".png"}
    for link in links:
        assert (
            imread(report / link).shape[1] == 750 and (report / link).with_suffix(".svg").is_file()
        )
    assert "<script" not in text
    blocks = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_write_report_csv_files_have_all_numbers(report: Path) -> None:
    given = figure()
    assert len(rows(report / "results.csv")) == sum(
        len(arm.runs) for panel in given.panels for arm in panel.arms
    )
    differences = rows(report / "differences.csv")
    quantities = [row["quantity"] for row in differences]
    # 2 arms of curves, in nats and in tokens, 2 arms at 4 sizes; 2 arms, 2 laws, offset and slope
    # each
    assert (
        quantities.count("final loss") == 2 + 8
        and quantities.count("token factor") == 2
        and len(quantities) == 20
    )
    assert {row["baseline"] for row in differences if "law" in row["quantity"]} == {"llama"}
    assert {row["n"] for row in differences} == {"3", ""}  # the laws have none
    verdicts = rows(report / "verdicts.csv")
    assert [row["claim"] for row in verdicts] == [verdict.claim for verdict in given.verdicts]
    assert verdicts[3]["estimate"] == "" and verdicts[0]["p_corrected"] == "0.06"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own")
    for scale in ("unified", "llama"):
        for seed in range(3):
            write_run(root / f"{scale}{seed}", scale, seed)
    return root


def test_report_command_numbers_are_those_of_the_event_files(
    runs: Path, tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("begun", "exploded"):
        (runs / name).mkdir()
        (runs / name / "config.yaml").touch()
    (runs / "exploded/nonfinite.jsonl").touch()
    out = told("report", str(runs), "--baseline", "llama", "--out", str(tmp_path))
    assert "complete:" in out and "diverged:" in out
    listed = {
        row["run"]: (row["complete"], row["diverged"])
        for row in json.loads(told("runs", str(runs), "--json"))
    }
    assert listed[str(runs / "begun")] == (False, False) and listed[str(runs / "exploded")] == (
        False,
        True,
    )
    assert listed[str(runs / "llama0")] == (True, False)
    for name in ("begun", "exploded"):
        shutil.rmtree(runs / name)
    assert "unified is lower than llama by 0.030 nats" in out and "report.html" in out
    found = rows(tmp_path / "results.csv")
    assert len(found) == 6 and [row["arm"] for row in found] == ["llama"] * 3 + ["unified"] * 3
    for row in found:
        run = read_run(tmp_path / row["run"])
        assert (
            float(row["val_loss"]) == run.curve("val/loss").values[-1]
            and int(row["tokens"]) == 10_000
        )
        assert (row["baseline"] == "True") == (row["arm"] == "llama")
        assert row["epochs"] == "2.5"
        assert float(row["relative_step/role/matrix"]) == pytest.approx(0.02)
        assert float(row["train_loss_last_tenth"]) == pytest.approx(run.val_loss)
    assert main(["report", str(runs), "--baseline", "llama", "--out", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    made = json.loads(said.out)
    assert (
        made["report"] == str(tmp_path / "report.html")
        and made["report"] in said.err
        and made["a"] == "llama"
    )
    (shown,) = made["differences"]
    assert (shown["b"], shown["difference"]["verdict"], made["warnings"]) == (
        "unified",
        "B lower",
        [],
    )
    difference, factor = (float(row["estimate"]) for row in rows(tmp_path / "differences.csv"))
    assert (shown["difference"]["mean"], shown["tokens_to_higher_final_loss"]["factor"]) == (
        difference,
        factor,
    )
    text = Page((tmp_path / "report.html").read_text()).text
    assert (
        f"lightning-sv report {runs} --baseline llama" in text
        and "not stated (the paper's are 100)" in text
    )
    assert "epochs over the training text\n2.5\n" in text and "training loss, last tenth" in text
    assert len(list((tmp_path / "figures").glob("*.svg"))) == 2


def test_report_command_of_one_run_shows_its_steps_and_gammas(tmp_path: Path, told: Told) -> None:
    run = write_run(tmp_path / "run", "unified", 0)
    told("report", str(run), "--out", str(tmp_path / "without"))
    assert not list((tmp_path / "without").glob("figures/*gamma*"))

    write_scalars(run, "clipped_steps", [(5_000, 0.5), (10_000, 0.0)], wall_time=1.0)
    write_scalars(
        run, "branch_norm/layer0/q_proj/gamma_in", [(0, 1.0), (10_000, 1.2)], wall_time=1.0
    )
    told("report", str(run), "--out", str(tmp_path / "with"))
    lines = (tmp_path / "with/report.md").read_text().splitlines()
    assert "| arm | clipped steps | relative step, matrix |" in lines
    assert "| unified | 25.0% | 2.00e-02 |" in lines
    assert {path.suffix for path in (tmp_path / "with").glob("figures/*gamma*")} == {".png", ".svg"}


def test_steps_table_value_that_a_run_lacks_is_empty(tmp_path: Path) -> None:
    for seed in range(2):
        for label in ("llama", "dp"):
            write_run(tmp_path / f"{label}{seed}", label, seed)
    write_scalars(tmp_path / "dp0", "clipped_steps", [(5_000, 0.5)], wall_time=1.0)
    for seed in range(2):
        write_scalars(
            tmp_path / f"llama{seed}", "clipped_steps", [(5_000, 0.5 * seed)], wall_time=1.0
        )
    panel = own_figure([tmp_path], baseline="llama").panels[0]
    table = steps_table(panel).to_numpy().tolist()
    assert table == [["llama", "25.0%", "2.00e-02"], ["dp", "", "2.00e-02"]]


def test_report_command_report_of_other_runs_not_replaced(
    runs: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder given by --out is overwritten only if its report has some of these runs."""
    monkeypatch.chdir(tmp_path)
    one, other = (f"{runs}/{name}" for name in ("llama0", "unified0"))
    assert main(["report", one, "--out", "mine"]) == 0
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    said = refused("report", other, "--out", "mine")
    assert one in said and "--out" in said
    assert {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()} == before
    assert main(["report", one, other, "--out", "mine"]) == 0  # more runs of the same report
    assert (
        main(["report", one]) == main(["report", other]) == 0
    )  # the default folder is overwritten
    for name in ("results.csv", "report.md", "report.html"):
        Path(name).write_text("mine,too\n1,2\n")
        assert name in refused("report", one, "--out", ".")
        Path(name).unlink()


def test_own_figure_arm_of_one_seed_keeps_other_pairs(runs: Path, tmp_path: Path) -> None:
    (whole,) = own_figure([runs], baseline="llama").panels[0].pairs
    few = write_run(tmp_path / "hg", "hg", 1)
    figure = own_figure(
        [*(runs / f"{arm}{seed}" for arm in ("llama", "unified") for seed in range(3)), few]
    )
    of_three, of_one = figure.panels[0].pairs
    assert (of_three.sentences[0], of_three.difference.n) == (whole.sentences[0], 3)
    assert of_one.difference.n == 1 and of_one.sentences[0].startswith("Not resolved: one pair")
    assert figure.warnings == (
        "hg and llama are paired on seed 1; only one of them has seeds 0, 2.",
    )
    assert figure.spec.summary == "3 arms, one seed or 3 seeds."
    write_report([figure], tmp_path / "out", "")
    text = (tmp_path / "out/report.md").read_text()
    assert "; 3 pairs |" in text and "| no interval; 1 pair |" in text and ", one pair" in text
    pair, _ = [row for row in rows(tmp_path / "out/differences.csv") if row["arm"] == "hg"]
    a, b = (read_run(path).val_loss for path in (runs / "llama1", few))
    assert float(pair["estimate"]) == b - a


def edited(run: Path, settings: str) -> Path:
    """Return the run, with these words instead of the setting `hidden.off`."""
    config = run / "config.yaml"
    config.write_text(config.read_text().replace('"off": false', settings))
    return run


def test_own_figure_labels_keep_different_settings_apart(tmp_path: Path) -> None:
    """Also if the three settings that a label names are equal."""
    changes = [
        '"off": false',
        *(f'"off": true, "two": 2, "three": 3, "four": {i}' for i in (4, 5)),
        '"none": 0',
    ]
    paths = [
        edited(write_run(tmp_path / f"{i}{seed}", "hg", seed), change)
        for i, change in enumerate(changes) for seed in (0, 1)
    ]  # fmt: skip
    arms = own_figure(paths).panels[0].arms
    assert [len(arm.runs) for arm in arms] == [2, 2, 2, 2] and arms[0].label == "hg"


def test_report_incomparable_runs_refused(runs: Path, tmp_path: Path, refused: Refused) -> None:
    """In one sentence with the key or the directory, before a file is written."""
    (tmp_path / "empty").mkdir()
    tokens = write_run(tmp_path / "tokens", "hg", 0)
    summary = tokens / "summary.json"
    summary.write_text(summary.read_text().replace("7001", "7002"))
    corpus = write_run(tmp_path / "corpus", "hg", 0, corpus="dead")
    val = write_run(tmp_path / "val", "hg", 0, val_sequences=9)
    one = runs / "llama0"
    for words, name in (
        ([tmp_path / "nowhere"], "nowhere"),
        ([tmp_path / "empty"], "empty"),
        ([one, one], "'llama' with seed 0"),
        ([one, runs / "unified1"], "seed"),
        ([one, "--baseline", "hg"], "--baseline is 'hg'"),
        ([one, runs / "unified0", "--labels", "a"], "--labels"),
        ([one, corpus], f"corpus_hash of {corpus} is dead"),
        ([one, tokens], "tokenizer_sha256"),
        ([one, val], f"data.val_sequences of {val} is 9"),
    ):
        error = refused("report", *map(str, words), "--out", str(tmp_path / "never"))
        assert name in error and error.count("\n") == 1 and not (tmp_path / "never").exists()


def test_own_figure_warns_about_different_settings_and_takes_labels(
    runs: Path, tmp_path: Path
) -> None:
    one = runs / "llama0"
    (warning,) = own_figure([one, write_run(tmp_path / "rate", "hg", 0, lr=0.5)]).warnings
    assert "model.optim.lr" in warning
    again = own_figure([one, write_run(tmp_path / "llama-seed0-2", "llama", 0, lr=0.5)])
    assert [arm.label for arm in again.panels[0].arms] == ["llama", "llama, lr 0.5"]
    other = edited(write_run(tmp_path / "other", "hg", 1), '"off": true')
    assert "hidden.off" in own_figure([one, other], labels=["x", "x"]).warnings[0]
    named = own_figure([one, runs / "unified0"], labels=["x", "y"], baseline="y")
    assert [(arm.label, arm.baseline) for arm in named.panels[0].arms] == [
        ("y", True),
        ("x", False),
    ]
