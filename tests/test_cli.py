"""Shared flags, prompt files, and errors as one line."""

import argparse
import errno
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cli
from models import ModelError

ROOT = Path(__file__).parent.parent


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser()
    cli.add_model_arguments(result)
    cli.add_runtime_arguments(result)
    cli.add_prompts_argument(result)
    return result


class TestFlags:
    def test_defaults_run_on_any_machine(self) -> None:
        """A default of cuda or a path relative to the working directory fails on the first try."""
        args = parser().parse_args([])
        assert (args.pair, args.target, args.draft, args.raw) == ("auto", None, None, False)
        assert args.device.type in ("cpu", "cuda")
        assert args.dtype is torch.bfloat16
        assert args.prompts.is_file()

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--pair", "best"], "invalid choice"),
            (["--device", "gpu"], "not one of cpu, cuda"),
            (["--device", "cuda:99"], "not among the"),
            (["--dtype", "int7"], "not one of bf16"),
            (["--threads", "0"], "at least 1"),
            (["--threads", "-2"], "whole number"), (["--threads", "100000"], "choose 1 to"),
        ],
    )
    def test_bad_value_is_a_usage_error(self, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
        """A wrong flag value was noticed only after the models were loaded."""
        with pytest.raises(SystemExit) as caught:
            parser().parse_args(flags)
        assert caught.value.code == 2
        assert words in capsys.readouterr().err

    @pytest.mark.skipif(torch.backends.mps.is_available(), reason="this is a Mac")
    def test_mps_off_a_mac(self, capsys: pytest.CaptureFixture[str]) -> None:
        """--device mps elsewhere gave a traceback from the first tensor."""
        with pytest.raises(SystemExit):
            parser().parse_args(["--device", "mps"])
        assert "use cpu" in capsys.readouterr().err

    def test_pytorchs_names_for_dtypes(self) -> None:
        """--dtype float16 is what people type."""
        assert parser().parse_args(["--dtype", "float16"]).dtype is torch.float16

    def test_pair_and_warnings_are_announced(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Results without the names of the models that made them; the line must not go into piped output."""
        cli.pair_from(parser().parse_args(["--pair", "tiny"]))
        captured = capsys.readouterr()
        assert "tiny-target + tiny-draft" in captured.err
        assert captured.out == ""


class TestPrompts:
    def write(self, path: Path, *lines: str) -> Path:
        path.write_text("\n".join(lines), "utf-8")
        return path

    def test_default_set(self) -> None:
        """A prefix of the file must be a fair sample: eight prompts, eight categories."""
        prompts = cli.load_prompts(cli.DEFAULT_PROMPTS)
        assert set(Counter(prompt.category for prompt in prompts).values()) == {4}
        for start in range(0, 32, 8):
            assert len({prompt.category for prompt in prompts[start : start + 8]}) == 8
        assert all(prompt.id.startswith(prompt.category) for prompt in prompts)

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("{", "not JSON"),
            ('["a", "b"]', "'id'"),
            ('{"id": "b", "prompt": "x"}', "'category'"),
            ('{"id": "b", "category": "c", "prompt": ""}', "'prompt'"),
            ('{"id": "b", "category": "c", "prompt": 3}', "'prompt'"),
            ('{"id": "a", "category": "c", "prompt": "x"}', "used twice"),
        ],
    )
    def test_error_names_the_line(self, line: str, words: str, tmp_path: Path) -> None:
        """One bad line among hundreds, and no word about which."""
        good = json.dumps({"id": "a", "category": "c", "prompt": "p"})
        path = self.write(tmp_path / "p.jsonl", good, "", line)
        with pytest.raises(ValueError, match="line 3") as caught:
            cli.load_prompts(path)
        assert words in str(caught.value)
        assert str(path) in str(caught.value)

    def test_number_as_id_byte_order_mark_and_line_separators(self, tmp_path: Path) -> None:
        """str.splitlines cuts a prompt in two at U+2028; editors on Windows write a byte order mark."""
        line = json.dumps({"id": 7, "category": "c", "prompt": "one\u2028two"}, ensure_ascii=False)
        (prompt,) = cli.load_prompts(self.write(tmp_path / "p.jsonl", "\ufeff" + line))
        assert prompt == cli.Prompt("7", "c", "one\u2028two")

    @pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe"])
    def test_no_prompts(self, content: bytes | None, tmp_path: Path) -> None:
        """An empty file ran nothing and reported success."""
        path = tmp_path / "p.jsonl"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=r"p\.jsonl"):
            cli.load_prompts(path)


class TestRun:
    @staticmethod
    def exit_of(main: Callable[[], int | None]) -> int | str | None:
        with pytest.raises(SystemExit) as caught:
            cli.run(main)
        return caught.value.code

    @pytest.mark.parametrize(
        ("error", "code", "words"),
        [
            (ModelError("model x: missing; check"), 1, "error: model x: missing; check"),
            (ValueError("two\nlines"), 1, "error: two lines"),
            (
                OSError(errno.ENOSPC, "No space left on device", "out.jsonl"),
                1,
                "out.jsonl: No space left on device; free",
            ),
            (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 1, "x: No such file"),
            (torch.OutOfMemoryError("CUDA out of memory"), 1, "the GPU's memory is full"),
            (MemoryError("no memory left for a pass"), 1, "error: no memory left for a pass"),
            (KeyboardInterrupt(), 130, "error: interrupted"),
        ],
    )
    def test_error_is_one_line(
        self, error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A user's mistake ended in a traceback."""

        def main() -> None:
            raise error

        assert self.exit_of(main) == code
        message = capsys.readouterr().err
        assert words in message
        assert message.count("\n") == 1

    def test_a_bug_keeps_its_traceback(self) -> None:
        """Swallowing every exception makes bugs unfindable."""

        def main() -> None:
            raise AssertionError("invariant")

        with pytest.raises(AssertionError):
            cli.run(main)

    def test_exit_code_of_main(self) -> None:
        """verify.py found differences and exited with 0."""
        assert self.exit_of(lambda: 1) == 1
        assert self.exit_of(lambda: None) == 0

    def test_closed_pipe_and_narrow_console(self, tmp_path: Path) -> None:
        """`script | head -1` printed a BrokenPipeError at exit; a narrow console raised on the first emoji."""
        code = (
            "import sys, cli\n"
            "def main():\n"
            "    assert sys.stdin.read() == 'half \\ufffd\\ufffd'\n"
            "    print('\\U0001f600', flush=True)\n"
            "    sys.stderr.write('ok\\n'); sys.stderr.flush()\n"
            "    while True: print('x' * 1000)\n"
            "cli.run(main)\n"
        )
        environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"half \xf0\x9f")
        process.stdin.close()
        assert process.stdout.readline() == b"?\n"
        process.stdout.close()
        assert process.stderr.read().decode().splitlines() == ["ok", "error: the reader of the output went away"]
        assert process.wait() == 1
