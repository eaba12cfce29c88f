"""run_spec.py and run_baseline.py as a user meets them, on the tiny pair."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cli
import results
import run_baseline
import run_spec
from models import Pair
from text import decode
from tiny import tiny_pair

ROOT = Path(__file__).parent.parent
SPEC = ["--pair", "tiny", "--prompt", "hello", "--max-new-tokens", "40"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a script's main as from the command line: exit code, stdout, stderr."""

    def run(script, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, flags)])
        with pytest.raises(SystemExit) as caught:
            cli.run(script.main)
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return run


def spec_json(call, *flags: str) -> dict:
    code, out, err = call(run_spec, *SPEC, "--json", *flags)
    assert code == 0, err
    return json.loads(out)


def piped(content: bytes) -> io.TextIOWrapper:
    """A standard input that is a pipe."""
    end, other = os.pipe()
    os.write(other, content)
    os.close(other)
    return io.TextIOWrapper(os.fdopen(end, "rb"), encoding="cp1252")


class TestOutput:
    def test_json_is_all_of_stdout_and_agrees_with_plain_decoding(self, call) -> None:
        """A progress line in front of the object; counts that differ from the ids; a text that differs from the stream."""
        spec, plain = spec_json(call), spec_json(call, "-K", "0")
        assert spec["ids"] == plain["ids"]
        assert len(spec["ids"]) == 40
        assert spec["text"] == decode(tiny_pair().tokenizer, spec["ids"])
        assert spec["statistics"]["emitted"] == 40
        assert spec["statistics"]["drafted"] > 0
        assert plain["statistics"]["acceptance_rate"] is None
        assert plain["models"]["draft"] is None
        assert call(run_spec, *SPEC)[1] == spec["text"] + "\n"

    def test_statistics_follow_the_text_with_their_definitions(self, call) -> None:
        """Tokens/s without saying whether prefill counts; a rate of 0% or a division by zero where nothing was drafted."""
        _, _, err = call(run_spec, *SPEC, "-K", "4")
        for words in ("prefill included", "accepted / drafted", "emitted / target passes", "GiB", "draft weights"):
            assert words in err
        _, _, err = call(run_spec, *SPEC, "-K", "0")
        assert "n/a" in next(line for line in err.split("\n") if line.startswith("acceptance rate"))
        assert "draft weights" not in err

    def test_no_new_tokens(self, call) -> None:
        """Means over no rounds, and taking back a piece from an empty list, raised."""
        code, out, err = call(run_spec, *SPEC, "--max-new-tokens", "0")
        assert (code, out) == (0, "\n")
        assert "n/a" in err
        assert spec_json(call, "--max-new-tokens", "0")["ids"] == []

    def test_sampling_with_a_seed_is_that_of_plain_decoding(self, call) -> None:
        """Sampling flags that were parsed and not passed on."""
        flags = ("--temperature", "0.9", "--seed")
        assert spec_json(call, *flags, "5")["ids"] == spec_json(call, *flags, "5", "-K", "0")["ids"]
        assert spec_json(call, *flags, "5")["ids"] != spec_json(call, *flags, "6")["ids"]


class TestStop:
    @pytest.mark.parametrize("tokens", ["0", "4"])
    def test_nothing_after_a_stop_string_is_shown_or_counted(self, call, tokens: str) -> None:
        """The round that completed the stop string was printed whole, or its later tokens stayed in the ids."""
        whole = spec_json(call, "-K", "0")
        text = whole["text"]
        stops = [text[start:start + 3] for start in (9, 17)]
        assert "\ufffd" not in "".join(stops)
        cut = min(text.index(stop) for stop in stops)
        stopped = spec_json(call, "-K", tokens, "--stop", stops[1], "--stop", stops[0])
        assert stopped["text"] == text[:cut]
        count = len(stopped["ids"])
        assert stopped["ids"] == whole["ids"][:count]
        assert stopped["statistics"]["emitted"] == count
        assert stopped["statistics"]["finish_reason"] == "stop"
        decoded = [decode(tiny_pair().tokenizer, whole["ids"][:n]) for n in (count - 1, count)]
        assert [stops[0] in part for part in decoded] == [False, True], "the last id counted is the one that completes it"
        assert call(run_spec, *SPEC, "-K", tokens, "--stop", stops[0])[1] == text[:cut] + "\n"

    def test_what_is_held_back_appears_at_the_end(self, call) -> None:
        """The beginning of a stop string at the very end of the output was lost."""
        text = spec_json(call)["text"]
        assert spec_json(call, "--stop", text[-2:] + "never")["text"] == text


class TestPrompt:
    def test_sources(self) -> None:
        """An empty --prompt fell through to the default; /dev/null counted as an empty prompt; broken bytes raised."""
        with open(os.devnull) as nothing:
            assert run_spec.read_prompt(None, nothing) == run_spec.DEFAULT_PROMPT
        assert run_spec.read_prompt("a\udcffb", None) == "a\ufffdb"
        assert run_spec.read_prompt(None, piped("grüße 🙂".encode()[:-1])) == "grüße \ufffd"
        for blank in (" ", "\n"):
            assert run_spec.read_prompt(blank, None) == run_spec.read_prompt(None, piped(blank.encode())) == blank
        for empty in (("", None), (None, piped(b""))):
            with pytest.raises(ValueError, match="the prompt is empty; give"):
                run_spec.read_prompt(*empty)

    @pytest.mark.parametrize("prompt", [" ", "\n"])
    def test_white_space_is_a_prompt(self, call, prompt: str) -> None:
        """A prompt of white space was stripped and then refused."""
        for flags in ([], ["--raw"]):
            code, _, err = call(run_spec, "--pair", "tiny", "--max-new-tokens", "2", "--prompt", prompt, *flags)
            assert code == 0, err

    def test_empty_prompt_is_one_line(self, call) -> None:
        """A traceback from the first forward pass, after both models were loaded."""
        code, out, err = call(run_spec, "--pair", "tiny", "--prompt", "")
        assert (code, out) == (1, "")
        assert err.startswith("error: the prompt is empty")
        assert err.count("\n") == 1


class TestFlags:
    @pytest.mark.parametrize("flags", [["-K", "-1"], ["--drafter", "magic"], ["--stop", ""], ["--max-new-tokens", "x"]])
    def test_unsupported_value_is_a_usage_error(self, call, flags: list[str]) -> None:
        """A wrong value was noticed only after the models were loaded, with a traceback."""
        assert call(run_spec, *SPEC, *flags)[0] == 2

    @pytest.mark.parametrize("value", ["-1", "nan", "inf"])
    def test_impossible_temperature_is_one_line(self, call, value: str) -> None:
        """Sampling settings were checked only once the models were there."""
        code, out, err = call(run_spec, *SPEC, "--temperature", value)
        assert (code, out) == (1, "")
        assert err.startswith("error: temperature")
        assert err.count("\n") == 1


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestColours:
    @pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), (None, "")])
    def test_only_on_a_terminal_that_wants_them(self, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
        """Escape sequences in a log file, or in spite of NO_COLOR."""
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        if variable:
            monkeypatch.setenv(variable, value)
        screen = Screen() if variable else io.StringIO()
        run_spec.Printer(screen).write(["a", "b"], ["accepted", "corrected"])
        assert screen.getvalue() == "ab"

    def test_legend_and_origins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Colours without a legend; a token without text still switched colours; model text that steers the terminal."""
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        screen = Screen()
        run_spec.Printer(screen).write(["a", "", "\x1b[2J\n", "d"], ["accepted", "accepted", "corrected", "plain"])
        legend, _, text = screen.getvalue().partition("\n")
        assert "accepted" in legend
        assert "corrected" in legend
        assert "right throughout" in legend
        assert text == "\x1b[32ma\x1b[0m\x1b[31m\ufffd[2J\n\x1b[0md"


class TestTrace:
    def test_rows_join_to_the_text(self, call, tmp_path: Path) -> None:
        """Token texts decoded one by one, so that characters in pieces became replacement characters."""
        path = tmp_path / "trace.jsonl"
        answer = spec_json(call, "-K", "4", "--trace", path)
        header, rows = results.read(path)
        rounds, summary = rows[:-1], rows[-1]
        assert header["prompt"] == "hello"
        assert header["num_speculative_tokens"] == 4
        tokens = [token for row in rounds for token in row["tokens"]]
        assert [token["id"] for token in tokens] == answer["ids"]
        assert "".join(token["text"] for token in tokens) == summary["text"] == answer["text"]
        assert (summary["type"], summary["prompt"], summary["emitted"]) == ("summary", "hello", 40)
        assert answer["ids"] == spec_json(call, "-K", "0")["ids"], "recording changed the output"

    def test_rows_say_how_sure_both_were(self, call, tmp_path: Path) -> None:
        """Draft figures attached to the token after; counts that contradict the origins."""
        path = tmp_path / "trace.jsonl"
        spec_json(call, "-K", "4", "--trace", path)
        rounds = results.read(path)[1][:-1]
        for index, row in enumerate(rounds):
            origins = [token["origin"] for token in row["tokens"]]
            assert row["index"] == index
            assert row["k"] == len(row["drafted"])
            assert origins.count("accepted") == row["num_accepted"] <= row["k"]
            assert [token["id"] for token in row["tokens"]][:row["num_accepted"]] == [
                token for token, _ in row["drafted"]][:row["num_accepted"]]
            assert row["total_ms"] >= row["draft_ms"] + row["verify_ms"] - 1e-6 > 0
            for token in row["tokens"]:
                assert token["target_top"][0][0] == token["id"]
                assert token["target_top"][0][2] == token["target_prob"]
                assert (token["draft_confidence"] is not None) == (token["origin"] in ("accepted", "corrected"))
        assert {row["source"] for row in rounds} & {"model", "lookup"}

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    def test_full_disk_is_one_line(self, call) -> None:
        """A traceback from flush, a message without the file's name; the device moved aside like an older file."""
        code, _, err = call(run_spec, *SPEC, "--trace", "/dev/full")
        assert code == 1
        assert err.rstrip().split("\n")[-1] == "error: /dev/full: No space left on device; free some space"
        assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize(("flags", "draft"), [(["--drafter", "lookup"], None), (["--drafter", "self"], None), (["-K", "0"], None),
                                              (["--drafter", "model"], "tiny-draft"), ([], "tiny-draft")])
def test_the_header_names_the_models_that_were_loaded(call, tmp_path: Path, flags: list[str], draft: str | None) -> None:
    """A draft model in the header of a trace that no draft model had a part in."""
    assert call(run_spec, *SPEC, *flags, "--trace", tmp_path / "trace.jsonl")[0] == 0
    header, _ = results.read(tmp_path / "trace.jsonl")
    assert (header["target"], header["draft"], header["draft_digest"] is None) == ("tiny-target", draft, draft is None)


class TestBaseline:
    def run(self, call, tmp_path: Path, *flags: str) -> tuple[str, list[dict]]:
        path = tmp_path / "out.jsonl"
        code, out, err = call(run_baseline, "--pair", "tiny", "--limit", "2", "--output", path, *flags)
        assert code == 0, err
        header, rows = results.read(path)
        assert (header["script"], header["draft"]) == ("run_baseline.py", None)
        assert header["max_new_tokens"] == int(flags[1])
        return out, rows

    def test_rows_hold_the_reference(self, call, tmp_path: Path) -> None:
        """Digests missing for the prefill's token; ids that are not those of run_spec for the same prompt."""
        out, rows = self.run(call, tmp_path, "--max-new-tokens", "12")
        assert [row["prompt_id"] for row in rows] == [prompt.id for prompt in cli.load_prompts(cli.DEFAULT_PROMPTS)[:2]]
        for row in rows:
            assert row["new_tokens"] == len(row["ids"]) == len(row["digests"]) == 12
            assert (row["type"], row["variant"], row["finish_reason"]) == ("run", "plain", "length")
            assert row["seconds"] >= row["first_token_seconds"] > 0
            assert row["decode_tokens_per_second"] > 0
        flags = ["--pair", "tiny", "--json", "--max-new-tokens", "12", "--prompt", rows[1]["prompt"]]
        answer = json.loads(call(run_spec, *flags)[1])
        assert (answer["ids"], answer["text"]) == (rows[1]["ids"], rows[1]["text"])
        assert out.startswith("2 prompts, tokens/s")
        assert str(tmp_path) in out
        assert out.count("\n") == 1

    def test_no_new_tokens(self, call, tmp_path: Path) -> None:
        """A mean over nothing raised after the last prompt."""
        out, rows = self.run(call, tmp_path, "--max-new-tokens", "0")
        assert "mean n/a" in out
        assert [row["ids"] for row in rows] == [[], []]

    def test_missing_prompt_file_leaves_older_results(self, call, tmp_path: Path) -> None:
        """A typing error moved the older results aside before it was noticed."""
        path = tmp_path / "out.jsonl"
        path.write_text("older\n")
        code, _, err = call(run_baseline, "--pair", "tiny", "--prompts", tmp_path / "none", "--output", path)
        assert code == 1
        assert "check --prompts" in err
        assert path.read_text() == "older\n"


@pytest.mark.parametrize("script", [run_spec, run_baseline])
@pytest.mark.parametrize("unknown", [-1, 259])
def test_a_tokenizer_that_is_not_the_models(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script, unknown: int) -> None:
    """Ids beyond the model's vocabulary ended in an IndexError and its traceback; -1 was read as the last id."""
    monkeypatch.setattr(Pair, "encode", lambda self, *rest: [72, unknown])
    flags = ["--output", tmp_path / "out.jsonl"] if script is run_baseline else ["--prompt", "x"]
    code, _, err = call(script, "--pair", "tiny", *flags)
    assert code == 1
    assert f"error: the prompt has the token id {unknown}, outside 0 to 258" in err.rstrip().split("\n")[-1]


class TestProcess:
    """What only a process of its own shows."""

    def test_narrow_console_and_broken_input(self) -> None:
        """UnicodeEncodeError on a Windows console; UnicodeDecodeError for half an emoji on standard input."""
        done = subprocess.run(
            [sys.executable, ROOT / "run_spec.py", "--pair", "tiny", "--max-new-tokens", "60"], capture_output=True,
            input=b"ol\xc3\xa9 \xf0\x9f\x99", env=os.environ | {"PYTHONIOENCODING": "cp1252"}, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        assert b"Traceback" not in done.stderr
        assert b"tokens/s" in done.stderr
        assert b"\x1b[3" not in done.stdout

    def test_interrupt_keeps_what_was_made(self, tmp_path: Path) -> None:
        """Ctrl-C lost the text, or left a trace whose rows do not add up to it."""
        path = tmp_path / "trace.jsonl"
        child = subprocess.Popen(
            [sys.executable, ROOT / "run_spec.py", *SPEC[:4], "--max-new-tokens", "3500", "-K", "0", "--trace", path],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)  # communicate() would not see what a buffer holds
        assert child.stdout is not None
        first = child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=300)
        assert child.returncode == 130, err
        assert b"acceptance rate" in err
        assert err.endswith(b"error: interrupted\n")
        rows = results.read(path)[1]
        text = "".join(token["text"] for row in rows[:-1] for token in row["tokens"])
        assert (first + out).decode() == text + "\n"
        assert rows[-1]["text"] == text
        assert rows[-1]["finish_reason"] == "interrupted"
        assert 0 < rows[-1]["emitted"] < 3500
