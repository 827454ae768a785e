"""What of bytes is text, and what is said of those that are not."""

from __future__ import annotations

import codecs
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import KvHere

from kvcli.cli.commands.chat import messages
from kvcli.cli.inputs import decode
from kvcli.errors import InputBytesError, UsageError

TEXT = "Füße – “quoted”, 12 € \n" * 3


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (TEXT.encode("utf-16"), "f is UTF-16, not UTF-8", "iconv -f utf-16 -t"),
        (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), "f is UTF-16, not UTF-8", "iconv -f utf-16 -t"),
        (TEXT.encode("utf-32"), "f is UTF-32, not UTF-8", "iconv -f utf-32 -t"),
        (codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"), "f is UTF-32, not UTF-8", "iconv -f utf-32 -t"),
        (TEXT.encode("utf-16-le"), "f is not text: it has a NUL byte at offset 1", "iconv -f utf-16le -t"),
        (TEXT.encode("utf-16-be"), "f is not text: it has a NUL byte at offset 0", "iconv -f utf-16be -t"),
        ("Füße".encode("latin1"), "f is not UTF-8: byte 0xfc at offset 1", "if it is latin1: iconv -f latin1 -t"),
        ("“Füße”".encode("cp1252"), "f is not UTF-8: byte 0x93 at offset 0", "iconv -f windows-1252 -t"),
        (codecs.BOM_UTF16_LE, "f is not UTF-8: byte 0xff at offset 0", "if it is latin1"),
        (codecs.BOM_UTF16_LE + b"abc", "f is not UTF-8: byte 0xff at offset 0", "if it is latin1"),
        (b"one\0two\0", "f is not text: it has a NUL byte at offset 3", "only text can be read"),
        (b"GGUF\3\0\0\0\1\0\0\0", "f is not text: it has a NUL byte at offset 5", "only text can be read"),
        (b"\0", "f is not text: it has a NUL byte at offset 0", "only text can be read"),
    ],
)
def test_what_is_not_text(data: bytes, message: str, hint: str) -> None:
    with pytest.raises(InputBytesError) as raised:
        decode(data, "f")
    assert (raised.value.message, raised.value.exit_code) == (message, 65) and hint in raised.value.hint
    if "iconv" in hint:
        words = raised.value.hint.partition(": ")[2].removesuffix(" FILE").split()
        assert decode(subprocess.run(words, input=data, capture_output=True, check=True).stdout, "f") in (
            TEXT,
            "Füße",
            "“Füße”",
        )


def test_text_is_taken_as_it_is() -> None:
    assert decode(b"\xef\xbb\xbf" + TEXT.encode(), "f") == "\ufeff" + TEXT
    assert decode(b"one\0two", "f", nul=True) == "one\0two"
    assert decode(b"", "f") == ""


@pytest.mark.parametrize(
    "words",
    [
        ("run", "-f", "FILE"),
        ("run", "hello", "-sysf", "FILE"),
        ("tokenize", "-f", "FILE"),
        ("perplexity", "-f", "FILE"),
        ("cache", "build", "-o", "out", "-f", "FILE"),
    ],
    ids=" ".join,
)
def test_every_command_refuses_what_is_not_text(words: tuple[str, ...], kv_here: KvHere, tmp_path: Path) -> None:
    path = tmp_path / "text"
    for data, told in ((TEXT.encode("utf-16"), "is UTF-16, not UTF-8"), (b"a\0b", "is not text: it has a NUL byte at")):
        path.write_bytes(data)
        code, out, err = kv_here(*(str(path) if word == "FILE" else word for word in words), "-m", "missing.gguf")
        assert (code, out) == (65, "") and f"{path} {told}" in err


@pytest.mark.parametrize("words", [("run", "-f", "/dev/zero"), ("tokenize",)], ids=" ".join)
def test_what_has_no_end_is_not_read_forever(
    words: tuple[str, ...], kv_command: list[str], kv_env: dict[str, str]
) -> None:
    with open("/dev/zero", "rb") as endless:
        command = [*kv_command, *words, "-m", "missing.gguf"]
        done = subprocess.run(command, stdin=endless, env=kv_env, capture_output=True, text=True, timeout=120)
    name = "/dev/zero" if "-f" in words else "stdin"
    assert (done.returncode, done.stdout) == (2, "") and f"{name} has more than 32 MiB" in done.stderr


def test_a_message_has_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(messages, "TEXT_BYTES", 100_000)
    (tmp_path / "script").write_text("one\n" + "x" * 200_000)
    with open(tmp_path / "script") as script:
        monkeypatch.setattr(sys, "stdin", script)
        found = messages.of_stdin(null=False)
        assert next(found) == ("line 1", "one")
        with pytest.raises(UsageError, match="line 2 has more than"):
            next(found)


@pytest.mark.slow
def test_loops_keep_their_lines(kv_command: list[str], kv_env: dict[str, str], tmp_path: Path) -> None:
    """A file that a loop reads is left to it; of a pipe, which does not tell, it is said how much was read."""
    (tmp_path / "questions").write_text("one\ntwo\n")
    ask = 'while read -r q; do echo "$q"; "$@" run "$q" -m missing.gguf; done'

    def loop(script: str, **more: str) -> tuple[str, str]:
        words = ["bash", "-c", script, "bash", *kv_command]
        done = subprocess.run(words, env=kv_env | more, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.stdout, done.stderr.replace("kv: error: no such file: missing.gguf\n", "")

    out, err = loop(f"{ask} < questions")
    assert out == "one\ntwo\n"
    assert [f"has read {at} of its 8 bytes" in err for at in (4, 8)] == [True, False]
    out, err = loop(f"cat questions | {ask}")
    assert out == "one\n" and "kv: read 1 line (4 bytes) from stdin into the prompt; --no-stdin" in err
    out, err = loop(f"cat questions | {ask}", KV_NO_STDIN="1")
    assert out == "one\ntwo\n" and "stdin" not in err
    out, err = loop('cat questions | "$@" run hello -m missing.gguf')
    assert (out, "stdin" in err) == ("", False)
