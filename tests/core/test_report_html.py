"""The page about a run: every section, units, words for what is not real, and what it does without its files."""

from __future__ import annotations

import argparse
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from accelerate_poplar import cli_report
from accelerate_poplar.errors import ConfigError
from accelerate_poplar.plan import Plan, RankPlan
from accelerate_poplar.profiles import ClusterProfile
from accelerate_poplar.report_html import SECTIONS, write_report
from accelerate_poplar.run_files import read_run
from tests.core.report_run import STEPS, history_line, simulated, write_run

ELSEWHERE = re.compile(r"""(?:src|href)\s*=\s*["']?(?!#)|url\((?!#)|@import|<script|<link|<iframe""", re.IGNORECASE)
"""Anything that would load or lead to something outside the page."""


class Page(HTMLParser):
    """The text of every section, and the ids of the whole page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.ids: list[str] = []
        self.pictures: dict[str, int] = {}
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "section":
            self._open = str(values["id"])
            self.sections[self._open] = ""
        if tag == "svg" and self._open:
            self.pictures[self._open] = self.pictures.get(self._open, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.sections[self._open] += " " + data.strip()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def text(run_folder: Path) -> str:
    return (run_folder / "poplar_report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_every_section_is_there_in_order(page: Page) -> None:
    assert tuple(page.sections) == SECTIONS
    assert all(content.strip() for content in page.sections.values())
    assert page.pictures == {"curves": 2, "memory": 1, "timeline": 1, "history": 1}


def test_the_page_stands_alone(text: str) -> None:
    # Names of XML formats look like addresses and load nothing.
    bare = re.sub(r'xmlns(:xlink)?="[^"]*"', "", text)
    assert ELSEWHERE.search(re.sub(r'href="#', "", bare)) is None
    assert "http" not in bare
    assert len(text) < 500_000


def test_the_check_for_standing_alone_can_fail(text: str) -> None:
    for bad in ('<img src="a.png">', '<link rel="x" href="y.css">', "@import 'a'", "<script>", "url(http://a)"):
        assert ELSEWHERE.search(text.replace('href="#', "") + bad)


def test_ids_are_unique_and_references_lead_somewhere(text: str, page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    targets = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    assert {a or b for a, b in targets} <= set(page.ids)


def test_units_are_on_every_axis_and_column(page: Page) -> None:
    for section, words in {
        "cluster": ("memory (GiB)", "peak (TFLOP/s)", "best speed (samples/s)", "(samples)"),
        "curves": ("micro-batch size (samples)", "forward and backward (s)"),
        "memory": ("memory (GiB)", "device has (GiB)"),
        "timeline": ("time in one optimizer step (s, predicted)", "samples/s"),
        "history": ("step time (s)", "optimizer step", "compute a step (s)"),
        "summary": ("samples/s", "tokens/s", "samples an optimizer step"),
    }.items():
        for word in words:
            assert word in page.sections[section], (section, word)


def test_the_summary_compares_with_the_even_split_and_with_what_was_measured(page: Page) -> None:
    summary = page.sections["summary"]
    assert "The even split would take" in summary
    assert "Measured step time was 1.10 times the prediction (median of 3 entries)." in summary
    assert "4.125 at step 200" in summary
    assert "31.0%" in summary


def test_the_timeline_shows_the_even_split_above_the_plan(page: Page) -> None:
    timeline = page.sections["timeline"]
    assert timeline.index("even split:") < timeline.index("this plan:")
    assert "waiting" in timeline


def test_events_are_listed_with_their_step(page: Page) -> None:
    events = page.sections["events"]
    assert f"Step {STEPS[1]}, slow rank: rank 1 takes 1.40x the time it was profiled at" in events
    assert f"Step {STEPS[2]}, new plan: rank 1 gets 3 samples fewer" in events


def test_advice_is_the_planners(page: Page) -> None:
    assert "One more A100-80GB (like rank 0)" in page.sections["advice"]


def test_figures_that_are_not_real_are_said_to_be(text: str, page: Page, tmp_path: Path) -> None:
    assert "No figure on this page is one of real hardware." in " ".join(text.split())
    assert "predicted (emulated)" in page.sections["summary"]
    assert "measured on emulated ranks" in page.sections["history"]

    write_run(tmp_path)
    profile = json.loads((tmp_path / "profiles.json").read_text())
    del profile["emulated"]
    profile["model"] = "llama"
    (tmp_path / "profiles.json").write_text(json.dumps(profile))
    assert "mulated" not in write_report(tmp_path).read_text()
    lines = (tmp_path / "poplar_history.jsonl").read_text().replace('"emulated": false', '"emulated": true')
    (tmp_path / "poplar_history.jsonl").write_text(lines)
    assert "<strong>Emulated.</strong>" in write_report(tmp_path).read_text()


def test_pictures_take_the_colours_of_the_page(text: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert "prefers-color-scheme: dark" in text
    for picture in pictures:
        # White is what draws the white parts of hatch patterns; nothing else may be fixed.
        assert set(re.findall(r"#[0-9a-f]{6}\b", picture)) <= {"#ffffff", "#000000"}
        assert "var(--ink)" in picture
        assert 'role="img" aria-label="' in picture


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("poplar_plan.json", "poplar_plan.json is missing"),
        ("profiles.json", "profiles.json is missing"),
        ("poplar_history.jsonl", "Nothing was measured while training."),
        ("trainer_state.json", "trainer_state.json"),
    ],
)
def test_a_missing_file_leaves_its_part_out(tmp_path: Path, name: str, said: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).unlink()
    page = Page(write_report(tmp_path).read_text())
    assert tuple(page.sections) == SECTIONS
    assert said in " ".join(page.sections.values())


@pytest.mark.parametrize("name", ["poplar_plan.json", "profiles.json", "poplar_history.jsonl", "trainer_state.json"])
@pytest.mark.parametrize("content", ["{", '{"version": 99, "step": 5, "step_time_s": -1}'])
def test_a_broken_file_never_stops_the_report(tmp_path: Path, name: str, content: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_text(content)
    page = Page(write_report(tmp_path).read_text())
    assert tuple(page.sections) == SECTIONS


def test_a_plan_by_hand_has_no_prediction(tmp_path: Path) -> None:
    plan = Plan(
        zero_stage=1,
        global_batch_size=4,
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=(RankPlan(rank=0, micro_batch_sizes=(3,)), RankPlan(rank=1, micro_batch_sizes=(1,))),
    )
    plan.save(tmp_path)
    line = history_line(5, 0.5, plan, predicted_step_time_s=None, mfu=None)
    (tmp_path / "poplar_history.jsonl").write_text(json.dumps(line) + "\n")
    page = Page(write_report(tmp_path).read_text())
    assert "there is no prediction to compare with" in page.sections["summary"]
    assert "500 ms (median)" in page.sections["summary"]
    assert page.pictures == {"history": 1}


@pytest.mark.parametrize("known", [True, False])
def test_uneven_training_state_is_shown(tmp_path: Path, known: bool) -> None:
    plan = write_run(tmp_path)
    assert "training state" not in Page(write_report(tmp_path).read_text()).sections["cluster"]
    plan.with_state((0.4, 0.4, 0.1, 0.1)).save(tmp_path)
    if known:
        data = json.loads((tmp_path / "profiles.json").read_text())
        states = {"optimizer": 2**30, "gradients": 2**29, "parameters": 2**33, "buffers": 7, "step": 7}
        data["memory"] = [{"states": {"2": states}}]
        (tmp_path / "profiles.json").write_text(json.dumps(data))
    cluster = Page(write_report(tmp_path).read_text()).sections["cluster"]
    unit, even, most, least = ("GiB", "1.5", "2.4", "0.6") if known else ("share", "25.0%", "40.0%", "10.0%")
    assert f"training state, even ({unit})" in cluster
    assert f"training state, planned ({unit})" in cluster
    for figure in (even, most, least):
        assert figure in cluster


def test_a_profile_of_another_cluster_is_not_used(tmp_path: Path) -> None:
    write_run(tmp_path)
    profile, _ = simulated(zero_stage=3)
    profile.save(tmp_path / "profiles.json")
    page = Page(write_report(tmp_path).read_text())
    assert "profiles.json does not belong to this plan" in page.sections["files"]


def test_an_even_split_that_does_not_fit_is_said(tmp_path: Path) -> None:
    write_run(tmp_path)
    data = json.loads((tmp_path / "profiles.json").read_text())
    data["zero_stages"]["2"]["max_micro_batch_size"][3] = 0
    profile = ClusterProfile.from_dict(data)
    profile.save(tmp_path / "profiles.json")
    plan = Plan.load(tmp_path)
    moved = (32, 22, 10, 0)
    ranks = tuple(RankPlan(rank=rank, micro_batch_sizes=(size,)) for rank, size in enumerate(moved))
    Plan(
        zero_stage=2,
        global_batch_size=64,
        predicted_step_time_s=plan.predicted_step_time_s,
        strategy="optimal",
        ranks=ranks,
    ).save(tmp_path)
    page = Page(write_report(tmp_path).read_text())
    assert "does not fit" in page.sections["timeline"]
    assert "Nothing fits at ZeRO stage 2." in page.sections["curves"]


def test_a_resumed_run_replaces_the_steps_it_ran_again(tmp_path: Path) -> None:
    plan = write_run(tmp_path)
    with (tmp_path / "poplar_history.jsonl").open("a") as file:
        file.write(json.dumps(history_line(125, 9.0, plan)) + "\n")
    record = read_run(tmp_path)
    assert [entry.step for entry in record.entries] == [50, 100, 125]
    assert [event.step for event in record.events] == [100]


def test_the_newest_checkpoint_tells_the_loss(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-100").mkdir()
    state = {"log_history": [{"step": 100, "loss": 6.5}]}
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text(json.dumps(state))
    assert read_run(tmp_path).last_loss == (100, 6.5)


def test_names_are_escaped(tmp_path: Path) -> None:
    write_run(tmp_path)
    data = json.loads((tmp_path / "profiles.json").read_text())
    data["model"] = "<b>bold</b> & co"
    data["ranks"][0]["device"] = "<script>alert(1)</script>"
    (tmp_path / "profiles.json").write_text(json.dumps(data))
    text = write_report(tmp_path).read_text()
    assert "<script>" not in text
    assert "<b>bold" not in text


# The command


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    cli_report.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args(["report", *map(str, arguments)])
    code: int = args.run(args)
    return code


def test_the_command_prints_the_path_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert command(tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'poplar_report.html'}\n"
    (tmp_path / "profiles.json").unlink()
    assert command(tmp_path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert Path(report["report"]).is_file()
    assert report["emulated"] is False
    assert "profiles.json is missing" in report["remarks"][0]


def test_the_command_refuses_a_folder_that_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none of poplar_plan\.json, profiles\.json and poplar_history\.jsonl"):
        command(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        command(tmp_path / "nowhere")
