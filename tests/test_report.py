"""The README's figures are those of the result files, and every benchmark can be started."""

from __future__ import annotations

import importlib.util
import re
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as every
from benchmarks.report import CASES, README, RESULTS, load, place, plot, sections


def test_the_readme_holds_the_results():
    text = README.read_text()
    assert place(text, sections()) == text, "run: python -m benchmarks.report"


@pytest.mark.parametrize("case", CASES)
def test_a_table_says_what_was_measured(case):
    result = load(f"unet-{case}")
    rows = [line.split(" | ") for line in sections()[case].splitlines()[2:]]
    assert {row[0].strip("|* ") for row in rows} == set(result["ms"])
    medians = [float(row[1]) for row in rows]
    assert medians == sorted(medians, reverse=True)
    for row in rows:
        time = result["ms"][row[0].strip("|* ")]
        low, high = map(float, row[2].split(" to "))
        assert low <= float(row[1]) <= high
        assert abs(float(row[1]) - time["median"]) <= 0.005
    for engine in result["engines"].values():
        assert engine["parity"]["worst"] <= engine["parity"]["limit"]  # none is shown that is wrong


def test_results_name_their_machine():
    for path in RESULTS.glob("*.json"):
        assert {"date", "gpu", "torch"} <= set(load(path.stem)), path.name


def test_a_table_without_a_place_is_an_error():
    with pytest.raises(ValueError, match="no place '<!-- table starts -->"):
        place("<!-- table starts -->\nno end", {"starts": "| |"})
    once = place("a\n<!-- table t -->\nold\n<!-- end -->\nb\n<!-- end -->", {"t": "| 1 |"})
    assert once == "a\n<!-- table t -->\n| 1 |\n<!-- end -->\nb\n<!-- end -->"


def test_the_plot_shows_every_peer(tmp_path):
    results = [load(f"unet-{case}") for case in CASES]
    plot(results, tmp_path / "speed.svg")
    drawn = (tmp_path / "speed.svg").read_text()
    ElementTree.fromstring(drawn)
    for result in results:
        for name in result["ms"]:
            assert f"<!-- {name} -->" in drawn


def test_every_benchmark_is_started(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COMFYUI_ROOT", str(tmp_path))
    monkeypatch.setattr(every, "find_host", lambda name: (object(), ""))
    named = {command[1].split(".")[1] for command in every.commands() if "." in command[1]}
    texts = {path.stem: path.read_text() for path in README.parent.glob("benchmarks/*.py")}
    assert named == {
        name for name, text in texts.items() if "__main__" in text and name != "__main__"
    }
    for command in every.commands():
        assert command[1] == "extension" or importlib.util.find_spec(command[1])
    monkeypatch.setattr(every, "commands", lambda: [["-c", "raise SystemExit(3)"]])
    with pytest.raises(SystemExit, match="raise SystemExit"):
        every.main()
    assert re.search(r"^python -c", capsys.readouterr().out)
