"""Charts and tables say what the results files say, and nothing where these are silent."""

import contextlib
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fabricated import benchmark_rows, policy_rows, write, write_all
from matplotlib.figure import Figure
from matplotlib.text import Text

import charts
import documents
import summary
import tables
import visualize
from findings import COMMANDS, Findings, NoData, ratio, speed

ROOT = Path(__file__).parent.parent
CHARTS = sorted(charts.CHARTS)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("results"))


def svg_texts(path: Path) -> list[str]:
    """The words of a chart file; SVG keeps text as text."""
    found = re.findall(r"<text.*?</text>", path.read_text("utf-8"), re.DOTALL)
    return [re.sub("<[^>]+>", "", text).strip() for text in found]


def words(figure: Figure) -> list[str]:
    """The words of a chart that was not written."""
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]


class TestCharts:
    def test_all_from_one_folder(self, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A chart was forgotten, or was not written to --output-dir."""
        assert visualize.main(["--results", str(full), "--output-dir", str(tmp_path / "new")]) == 0
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
            f"{name}.{kind}" for name in CHARTS for kind in ("png", "svg"))
        assert "skipped" not in capsys.readouterr().err
        assert not list(full.glob("*.png"))
        for name in CHARTS:  # each says how it was measured
            caption = " ".join(svg_texts(tmp_path / "new" / f"{name}.svg"))
            assert "Imaginary(R) Xeon(R)" in caption
            assert "commit 0123456789ab" in caption
            assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    def test_order_of_rows_does_not_show(self, tmp_path: Path) -> None:
        """Shuffled rows paired one prompt's speed with another's baseline, or moved the interval's last digit."""
        rows = benchmark_rows(repeats=2)
        for name in ("a", "b"):
            write(tmp_path / name / "benchmark.jsonl", rows)
            figure = charts.throughput(Findings(tmp_path / name))
            visualize.save(figure, tmp_path / name, "throughput")
            random.Random(3).shuffle(rows)
        assert (tmp_path / "a" / "throughput.svg").read_bytes() == (tmp_path / "b" / "throughput.svg").read_bytes()
        assert (tmp_path / "a" / "throughput.png").read_bytes() == (tmp_path / "b" / "throughput.png").read_bytes()

    @pytest.mark.parametrize("variant", ["dynamic", "plain", "hf-greedy", "k4"])
    def test_one_variant_only(self, tmp_path: Path, variant: str) -> None:
        """Trial 50: without a baseline the chart showed a speed-up of 1.0 that nobody had measured."""
        write(tmp_path / "benchmark.jsonl", benchmark_rows(variants=(variant,)))
        found = Findings(tmp_path)
        for name in CHARTS:  # none may fail in another way
            with contextlib.suppress(NoData):
                charts.CHARTS[name](found)
        texts = words(charts.throughput(found))
        assert not any("1.0" in text and "×" in text for text in texts)
        assert texts.count("n/a") == len({"dynamic", "plain", "hf-greedy", "hf-assisted"} - {variant})
        assert any("(baseline)" in text if variant == "hf-greedy" else "(n/a)" in text for text in texts)

    def test_ratio_below_one_is_shown(self, tmp_path: Path) -> None:
        """Trial 46: a speed-up below 1 was cut off at 1."""
        rows = benchmark_rows(variants=("hf-greedy", "dynamic"))
        for row in rows:
            if row.get("variant") == "dynamic" and row["type"] == "run":
                row["seconds"] *= 20
        write(tmp_path / "benchmark.jsonl", rows)
        assert any("(0.30×)" in text for text in words(charts.throughput(Findings(tmp_path))))

    def test_no_display_needed(self, tmp_path: Path) -> None:
        """Trial 50: MPLBACKEND=TkAgg without a display ended in a TclError."""
        write(tmp_path / "policies.jsonl", policy_rows())
        environment = {key: value for key, value in os.environ.items() if key != "DISPLAY"} | {"MPLBACKEND": "TkAgg"}
        command = [sys.executable, str(ROOT / "visualize.py"), "--results", str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "policy_regret.png").is_file()

    def test_what_is_missing_is_skipped_with_its_command(self, full: Path, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
        """One missing file ended everything with a traceback."""
        (tmp_path / "card.jsonl").write_bytes((full / "card.jsonl").read_bytes())
        assert visualize.main(["--results", str(tmp_path)]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(CHARTS) - 2
        assert all(line.startswith("skipped ") and "python benchmark.py" in line for line in lines)
        step, predicted = (" ".join(svg_texts(tmp_path / f"{name}.svg")) for name in ("step_time", "predicted_and_measured"))
        assert "proven widths: n/a" in step
        assert "measured: n/a" in predicted

    def test_nothing_at_all_is_an_error(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """An empty folder gave exit code 0 and no chart (cli.run makes 1 of the ValueError)."""
        with pytest.raises(ValueError, match=r"no results to draw; measure first: python benchmark\.py"):
            visualize.main(["--results", str(tmp_path)])
        write(tmp_path / "benchmark.jsonl", [])
        assert visualize.main(["--results", str(tmp_path)]) == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: no chart could be drawn")

    def test_interrupted_file(self, full: Path, tmp_path: Path) -> None:
        """Trial 49: a line cut off by Ctrl-C made the finished rows unreadable."""
        whole = (full / "benchmark.jsonl").read_text()
        (tmp_path / "benchmark.jsonl").write_text(whole[:len(whole) // 3])
        assert "32 prompts" not in " ".join(words(charts.throughput(Findings(tmp_path))))

    def test_a_prompt_that_one_side_lacks_is_left_out_of_the_ratio(self) -> None:
        """After an interruption the mean over 3 prompts was divided by the mean over 4 others."""
        rows = benchmark_rows(variants=("plain", "dynamic"))
        ours, plain = ([r for r in rows if r["type"] == "run" and r["variant"] == name] for name in ("dynamic", "plain"))
        found = ratio(ours, plain[3:])
        assert found is not None
        assert found.n == len(ours) - 3
        assert found == ratio(ours[3:], plain)
        assert ratio(ours, []) is None

    def test_predicted_and_measured_mean_the_same_by_acceptance(self, tmp_path: Path) -> None:
        """Accepted / drafted, which counts tokens behind a rejection, on the axis of the chance of a token that is looked at."""
        rows = benchmark_rows(variants=("plain", "dynamic"), prompts=1)
        for row in rows:
            if row.get("variant") == "dynamic":
                row |= {"acceptance_rate": 0.5, "acceptance_by_position": [[8, 10], [6, 8], [6, 6]]}
        write(tmp_path / "benchmark.jsonl", rows)
        assert {acceptance for acceptance, _ in charts.measured_points(Findings(tmp_path), "dynamic")} == {20 / 24}

    def test_single_prompt_has_no_interval(self) -> None:
        """The bootstrap of one prompt gave an interval of width 0, which reads as certainty."""
        found = speed(benchmark_rows(variants=("plain",), prompts=1)[:1])
        assert found is not None
        assert (found.low, found.n) == (None, 1)


def document(folder: Path, text: str) -> Path:
    path = folder / "README.md"
    path.write_text(text, "utf-8")
    return path


def filled(folder: Path, full: Path, marker: str) -> str:
    """What --tables puts between a marker's ends."""
    path = document(folder, f"before <!-- {marker} --><!-- /{marker.split(':')[0]} --> after")
    assert visualize.main(["--results", str(full), "--tables", "--documents", str(path)]) == 0
    found = re.fullmatch(r"before <!-- .+? -->(.*)<!-- /\w+ --> after", path.read_text("utf-8"), re.DOTALL)
    assert found
    return found[1].strip()


class TestDocuments:
    @pytest.mark.parametrize("name", list(documents.TABLES))
    def test_every_table(self, full: Path, tmp_path: Path, name: str) -> None:
        """A table had more cells in a line than in its head, so that it was not shown as one."""
        lines = filled(tmp_path, full, f"table:{name}").split("\n\n")[0].splitlines()
        assert len(lines) > 2
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1

    def test_headline_says_what_the_benchmark_said(self, full: Path, tmp_path: Path) -> None:
        """Two programs computed the same ratio in two ways."""
        last = summary.summarize([row for row in benchmark_rows() if row["type"] == "run"])
        line = next(line for line in filled(tmp_path, full, "table:headline").splitlines() if line.startswith("| dynamic"))
        for name in ("ratio_vs_hf_greedy", "ratio_vs_hf_assisted", "ratio_vs_plain"):
            found = last[name]
            assert f"{found['mean']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" in line

    def test_same_output_means_the_bits_where_they_were_compared(self) -> None:
        """'24 of 24, to the bit' beside runs whose logits differed."""
        for bits, ids, said in ((None, True, "1 of 1"), (True, True, "1 of 1"), (False, True, "0 of 1"), (None, None, "n/a")):
            assert tables.same_output([{"same_bits": bits, "same_ids": ids}]) == said

    def test_missing_baseline_is_not_available(self, tmp_path: Path) -> None:
        """A missing baseline gave 1.00."""
        write(tmp_path / "benchmark.jsonl", benchmark_rows(variants=("plain", "dynamic")))
        table = filled(tmp_path, tmp_path, "table:headline")
        assert [cell.strip() for cell in table.splitlines()[2].split("|")][1:6] == ["hf-greedy", "0", "n/a", "n/a", "n/a"]
        dynamic = next(line for line in table.splitlines() if line.startswith("| dynamic"))
        assert [cell.strip() for cell in dynamic.split("|")][5:7] == ["n/a", "n/a"]

    @pytest.mark.parametrize(("path", "text"), [
        ("summary.differences|d", "0"), ("card.bandwidth.read_gbps|.1f", "21.4"),
        ("card.step[model=target,width=4].seconds|.0f*1000", "161"),
        ("card.step[model=draft,weights=int4,width=1].share_of_machine|.0%", "78%"),
        ("policies.policy[policy=heuristic].regret|.1%", "11.2%"), ("benchmark.header.commit|s", "0123456789ab"),
        ("benchmark.header.versions.torch|s", "2.13.0"), ("variant[dynamic].n|d", "32"), ("count[verify,equal=True]|d", "16"),
        ("count[verify,equal=False]|d", "0"), ("sampling[variant=gumbel,prompt_id=code-1].acceptance_rate|.2f", "0.54"),
    ])
    def test_numbers_in_prose(self, full: Path, tmp_path: Path, path: str, text: str) -> None:
        """A figure in the abstract was typed by hand and stayed when the results changed."""
        assert filled(tmp_path, full, f"num:{path}") == text

    @pytest.mark.parametrize(("text", "words"), [
        ("<!-- table:best --><!-- /table -->", r"README\.md, marker table:best.*no such table"),
        ("<!-- num:summary.ratio|.2f --><!-- /num -->", "has no 'ratio'"),
        ("<!-- num:card.step.seconds|.2f --><!-- /num -->", "rows fit .* where one is needed"),
        ("<!-- num:summary.differences|q --><!-- /num -->", "cannot be written in the format 'q'"),
        ("<!-- num:variant[k99].n|d --><!-- /num -->", "'k99' has no rows; make it with"),
        ("<!-- num:cards.step.seconds|.2f --><!-- /num -->", r"cards\.jsonl is missing"),
        ("<!-- table:headline -->", "no counterpart"), ("<!-- /num -->", "no counterpart"),
        ("<!-- table:headline --> <!-- num:summary.differences|d --><!-- /num -->", "end marker"),
        ("<!-- table:headline --><!-- /num -->", "end marker"),
    ])
    def test_wrong_marker_is_named(self, full: Path, tmp_path: Path, text: str, words: str) -> None:
        """A misspelt marker was left as it was, and the number after it drifted unseen; or it swallowed the text between."""
        path = document(tmp_path, text)
        with pytest.raises(ValueError, match=words):
            visualize.main(["--results", str(full), "--tables", "--documents", str(path)])
        assert path.read_text("utf-8") == text

    def test_missing_results_file_names_its_command(self, tmp_path: Path) -> None:
        """The error named a path and left the reader to find out what makes it."""
        path = document(tmp_path, "<!-- table:policies --><!-- /table -->")
        with pytest.raises(ValueError, match=r"policies\.jsonl is missing; make it with: python benchmark\.py --policies"):
            visualize.main(["--results", str(tmp_path), "--tables", "--documents", str(path)])

    def test_check_says_what_is_stale_and_changes_nothing(self, full: Path, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
        """A check that rewrote the document always passed at the second try."""
        stale = "<!-- table:card -->\nold\n<!-- /table --> <!-- num:summary.differences|d -->0<!-- /num -->\n"
        path = document(tmp_path, stale)
        arguments = ["--results", str(full), "--tables", "--documents", str(path)]
        assert visualize.main([*arguments, "--check"]) == 1
        error = capsys.readouterr().err
        assert "README.md: table:card is stale" in error
        assert "num:" not in error
        assert path.read_text("utf-8") == stale
        assert visualize.main(arguments) == 0
        assert visualize.main([*arguments, "--check"]) == 0

    def test_abstract_with_a_bare_figure_fails(self, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A number in the abstract that no results file holds."""
        text = ("# Report\n\n## 1. Abstract\n\nQwen2.5-1.5B with a 0.5B draft, K = 4, 24 prompts: {}\n\n## Method\n\n3.5x is "
                "allowed here.\n")
        path = document(tmp_path, text.format("<!-- num:summary.differences|d --><!-- /num --> and 4.2x, 11% or 3.75 GiB."))
        arguments = ["--results", str(full), "--tables", "--documents", str(path)]
        assert visualize.main(arguments) == 0
        assert visualize.main([*arguments, "--check"]) == 1
        assert re.findall("abstract's '(.+?)'", capsys.readouterr().err) == ["4.2x", "11%", "3.75 GiB"]
        document(tmp_path, text.format("<!-- num:variant[dynamic].n|d -->32<!-- /num --> prompts."))
        assert visualize.main([*arguments, "--check"]) == 0

    def test_text_outside_markers_is_kept(self, full: Path, tmp_path: Path) -> None:
        """Everything after the last marker was lost; or a replacement's backslash was read as a group."""
        path = document(tmp_path, "a \\1 | b\n<!-- table:shapes --><!-- /table -->\nc ✓\n")
        visualize.main(["--results", str(full), "--tables", "--documents", str(path)])
        assert path.read_text("utf-8").startswith("a \\1 | b\n<!-- table:shapes -->\n| backend")
        assert path.read_text("utf-8").endswith("<!-- /table -->\nc ✓\n")

    def test_check_without_tables_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        """--check alone drew charts and said that all was well."""
        with pytest.raises(SystemExit):
            visualize.main(["--check"])
        assert "--tables" in capsys.readouterr().err

    @pytest.mark.skipif(not any((ROOT / name).is_file() for name in documents.DOCUMENTS), reason="no documents yet")
    def test_the_remedy_is_a_command_of_the_readme(self) -> None:
        """A printed command whose settings make another table than the documents'."""
        readme = " ".join((ROOT / "README.md").read_text("utf-8").replace("\\\n", " ").split())
        assert [command for command in COMMANDS.values() if command not in readme] == []

    def test_documents_of_this_repository_are_not_stale(self, capsys: pytest.CaptureFixture[str]) -> None:
        """README or report shows figures that the results files no longer hold."""
        assert visualize.main(["--tables", "--check"]) == 0, capsys.readouterr().err
