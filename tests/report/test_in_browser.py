"""Pages in a real browser: plots are drawn, the console is silent, axe finds nothing serious, keys suffice."""

import html
import json
import re
import threading

import pytest

from browser import judged, look
from hotrow.data import DataSet
from hotrow.plan.budget import count_keys, plan_data_set
from hotrow.profile import Profile
from hotrow.profile.summary import summarise
from hotrow.report import draw_profile
from hotrow.report.access_curve import draw_curve
from hotrow.report.live import LiveServer
from hotrow.report.report import page_of, report
from hotrow.report.runs import read_runs
from hotrow.report.section import Section
from hotrow.table import Table

PROBE = """
const probing = setInterval(() => {
  if (!document.documentElement.dataset.drawn) return;
  clearInterval(probing);
  document.querySelector(".skip").focus();
  const skip = document.querySelector(".skip").getBoundingClientRect();
  const summary = document.querySelector("summary");
  summary.focus();
  summary.click();
  document.documentElement.dataset.probe = JSON.stringify({
    skip: skip.left >= 0, opened: summary.parentElement.open, wide: document.documentElement.scrollWidth,
    screen: document.documentElement.clientWidth, back: getComputedStyle(document.body).backgroundColor });
}, 50);
"""


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    pytest.importorskip("plotly")
    path = tmp_path_factory.mktemp("pages") / "report.html"
    report(list(runs)).write(path)
    return path


def test_a_page_is_drawn_in_silence_and_axe_has_no_serious_findings(page, runs, tmp_path):
    findings, seen = judged(page, tmp_path)
    plots = report(list(runs)).plots
    assert findings == [] and seen.console == []
    assert f'data-drawn="{len(plots)}"' in seen.dom
    assert seen.dom.count('class="main-svg"') >= len(plots)
    assert not re.search(r'src="https?:', seen.dom)


def test_so_it_is_in_the_dark_on_a_narrow_screen_and_by_keyboard(page, tmp_path):
    findings, seen = judged(page, tmp_path, PROBE, dark=True, width=500)
    assert findings == [] and seen.console == []
    found = re.search(r'data-probe="([^"]*)"', seen.dom)
    assert found is not None
    told = json.loads(html.unescape(found.group(1)))
    assert told["skip"] and told["opened"] and told["back"] == "rgb(15, 20, 25)"
    assert told["wide"] <= told["screen"]  # nothing sticks out


def test_the_pictures_of_profile_and_plan_are_drawn_too(data, tmp_path):
    pytest.importorskip("plotly")
    dataset = DataSet.open(data)
    profile, _ = Profile.of_data_set(dataset)
    draw_profile(summarise(dataset, profile, batch_size=64, batches=2), tmp_path / "profile.html")
    tables = [Table(name=name, dim=4) for name in profile.tables]
    _, shown = plan_data_set(dataset, tables, 1000, count_keys(dataset))
    draw_curve(shown, tmp_path / "plan.html")
    for name, plots in (("profile", 4), ("plan", 2)):
        findings, seen = judged(tmp_path / f"{name}.html", tmp_path)
        assert findings == [] and seen.console == [] and f'data-drawn="{plots}"' in seen.dom, name


def test_an_error_and_text_that_cannot_be_read_would_be_found(page, tmp_path):
    poor = tmp_path / "poor.html"
    poor.write_text(page.read_text("utf-8").replace("--soft: #57606a", "--soft: #eeeeee"), "utf-8")
    findings, seen = judged(poor, tmp_path, "nowhereDefined()")
    assert "color-contrast" in {finding["id"] for finding in findings}
    assert "nowhereDefined" in seen.console[0]


def test_a_live_page_takes_over_what_is_new(runs, tmp_path):
    """The server's second look gives one more evaluation; the page shows it without being loaded again."""
    pytest.importorskip("plotly")
    (run,) = read_runs([runs[0]])
    looks = threading.Semaphore(0)

    def page():
        looks.release()
        now = page_of([run], [Section("rest", "Rest", lines=["The rest."])], live=0.5)
        run.lines["evaluate"][-1]["auc"] = 0.7777
        return now

    with LiveServer(page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            seen = look(server.url, tmp_path, seconds=3)
        finally:
            server.shutdown()
            thread.join()
    assert seen.console == []
    assert "AUC 0.7777" in seen.dom and "0.7777</td>" in seen.dom and "Stop updating" in seen.dom
    assert looks.acquire(timeout=0) and looks.acquire(timeout=0)
