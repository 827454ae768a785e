"""`kv tokenize`: sources, forms of output, refusals."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import tinyvocab
from calling import Runner

from kvcli.runtime.text.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "data"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A vocabulary-only file whose model wants a BOS, which is <|endoftext|>."""
    metadata = tinyvocab.byte_level("smollm")[0] | {"tokenizer.ggml.add_bos_token": True}
    return str(tinyvocab.write_vocabulary(tmp_path / "tiny.gguf", metadata))


def ids_of(text: str, special: bool = False) -> list[int]:
    return Tokenizer.from_gguf(tinyvocab.byte_level("smollm")[0]).encode(text, parse_special=special)


@pytest.fixture
def kv(monkeypatch, capfdbinary, tmp_path):
    monkeypatch.chdir(tmp_path)
    return Runner(monkeypatch, capfdbinary)


def run(kv: Runner, model: str, *args: str, stdin: bytes = b"", code: int = 0) -> subprocess.CompletedProcess[bytes]:
    """In this process, which is fast."""
    done = kv("tokenize", "-m", model, *args, stdin=stdin)
    assert done.code == code, done.err
    return subprocess.CompletedProcess(args, done.code, done.out.encode(), done.err.encode())


def test_the_table(kv, model):
    out = run(kv, model, 'the "pages" ñ\n\x1b[1m').stdout.decode()
    lines = out.splitlines()
    assert lines[0].endswith("0  <|endoftext|>") and lines[-1] == f"{len(lines) - 1} tokens"
    assert '"\\n"' in out and '\\"' in out and "\x1b" not in out
    assert "<0xC3>" in out or '"ñ"' in out or '" ñ"' in out
    assert [int(line.split()[0]) for line in lines[1:-1]] == ids_of('the "pages" ñ\n\x1b[1m')
    one = run(kv, model, "--no-bos", "a").stdout.decode()
    assert one == f'{ids_of("a")[0]}  "a"\n1 token\n'


def test_json(kv, model):
    done = run(kv, model, "--json", "the pages")
    ids = [0, *ids_of("the pages")]
    value = json.loads(done.stdout)
    assert value.pop("pieces")[0] == "<|endoftext|>"
    assert value == {"kv_schema": 2, "model": model, "tokens": len(ids), "ids": ids, "count": len(ids)}
    assert done.stdout.count(b"\n") == 1 and done.stderr == b""


def test_bytes_have_one_form(kv, model):
    """In the table and in JSON: a rare character is several tokens, each of bytes that are none."""
    pieces = json.loads(run(kv, model, "--json", "--no-bos", "a🜁").stdout)["pieces"]
    table = run(kv, model, "--no-bos", "a🜁").stdout.decode().splitlines()[:-1]
    assert len(pieces) > 2 and [line.split("  ")[-1] for line in table] == ['"a"', *pieces[1:]]
    assert bytes.fromhex("".join(pieces[1:]).replace("<0x", "").replace(">", "")).decode() == "🜁"


def test_ids_alone(kv, model):
    ids = " ".join(map(str, ids_of("the pages")))
    assert run(kv, model, "--ids", "--no-bos", "the pages").stdout == f"{ids}\n".encode()
    assert run(kv, model, "--ids", "--no-bos", "").stdout == b"\n"


def test_control_tokens_only_when_asked(kv, model):
    typed = run(kv, model, "--ids", "--no-bos", "<|im_end|>").stdout.split()
    assert len(typed) > 1 and b"2" not in typed
    assert run(kv, model, "--ids", "--no-bos", "--special", "<|im_end|>").stdout == b"2\n"
    assert run(kv, model, "--ids", "--special", "<|endoftext|>").stdout == b"0\n"  # one BOS


def test_files_and_stdin_are_taken_exactly(kv, model, tmp_path):
    text = "\ufeffthe pages\r\n\n"
    (tmp_path / "t.txt").write_bytes(text.encode())
    expected = (" ".join(map(str, [0, *ids_of(text)])) + "\n").encode()
    assert run(kv, model, "--ids", "-f", "t.txt").stdout == expected
    assert run(kv, model, "--ids", stdin=text.encode()).stdout == expected
    assert run(kv, model, "--ids", "-f", "-", stdin=text.encode()).stdout == expected
    assert run(kv, model, "--ids").stdout == b"0\n"  # nothing: the BOS


def test_nul_separated_texts(kv, model, tmp_path):
    texts = ["the\npages", "", "ñ <|im_end|>"]
    data = "\0".join(texts).encode()
    for form, stdin in ((data, data), (data + b"\0", data + b"\0")):
        lines = run(kv, model, "-0", "--no-bos", stdin=stdin).stdout.splitlines()
        assert [json.loads(line)["ids"] for line in lines] == [ids_of(text) for text in texts], form
    (tmp_path / "t.txt").write_bytes(data)
    assert len(run(kv, model, "--null", "--json", "-f", "t.txt").stdout.splitlines()) == 3
    assert run(kv, model, "-0", "--ids", "--no-bos", stdin=b"a\0b\0").stdout.count(b"\n") == 2
    assert run(kv, model, "-0").stdout == b""
    assert run(kv, model, "-0", "--ids", stdin=b"\0").stdout == b"0\n"


@pytest.mark.parametrize(
    "args, stdin, code, what",
    [
        ((), b"ab\xffc", 65, "stdin is not UTF-8: byte 0xff at offset 2"),
        (("-0",), b"ab\0\xc3", 65, "at offset 3"),
        (("-f", "missing.txt"), b"", 2, "cannot read missing.txt"),
        (("-f", "."), b"", 2, "cannot read ."),
        (("a", "-f", "x"), b"", 2, "TEXT and --file"),
        (("a", "-0"), b"", 2, "TEXT and -0"),
        (("--json", "--ids", "a"), b"", 2, "--json and --ids"),
    ],
)
def test_refusals_are_one_line_and_a_code(kv, model, args, stdin, code, what):
    done = run(kv, model, *args, stdin=stdin, code=code)
    shown = done.stdout if "--json" in args else done.stderr
    assert what in shown.decode()
    assert "Traceback" not in done.stderr.decode()


def test_an_argument_that_is_not_utf8(kv_command, kv_env, model):
    words = [*map(os.fsencode, kv_command), b"tokenize", b"-m", os.fsencode(model), b"a\xff"]
    done = subprocess.run(words, env=kv_env, capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 65 and b"offset 1" in done.stderr


def test_a_terminal_is_not_waited_for(kv_command, kv_env, model):
    master, slave = pty.openpty()
    try:
        done = subprocess.run(
            [*kv_command, "tokenize", "-m", model], env=kv_env, stdin=slave, capture_output=True, timeout=60
        )
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == 2 and b"no text" in done.stderr


def test_a_reader_that_leaves_early(kv_command, kv_env, model):
    data = b"the pages\0" * 30_000
    words = [*kv_command, "tokenize", "-m", model, "-0"]
    process = subprocess.Popen(words, env=kv_env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(data)
    process.stdin.close()
    first = process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) in (141, -13) and errors == b""
    assert json.loads(first)["count"] > 1


def test_an_unknown_pretokenizer_is_named_and_can_be_forced(kv, tmp_path):
    metadata = tinyvocab.byte_level("superfast-2099")[0]
    path = str(tinyvocab.write_vocabulary(tmp_path / "odd.gguf", metadata))
    refused = run(kv, path, "the", code=3).stderr.decode()
    assert "superfast-2099" in refused and "--force-pretokenizer" in refused
    assert run(kv, path, "--force-pretokenizer", "--ids", "the").stdout


def test_torch_and_jinja_stay_unimported(kv_env, model):
    code = (
        "import sys; from kvcli.cli.main import run_command; "
        f"code = run_command(['tokenize', '-m', {model!r}, 'the']); "
        "assert code == 0 and not {'torch', 'jinja2', 'transformers'} & set(sys.modules)"
    )
    import kvcli

    root = str(Path(kvcli.__file__).parent.parent)
    subprocess.run([sys.executable, "-c", code], env=kv_env | {"PYTHONPATH": root}, check=True, capture_output=True)


@pytest.mark.models
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_golden_ids_by_the_command(kv, name, request):
    path = str(request.getfixturevalue(f"{name}_path"))
    goldens = json.loads((GOLDENS / f"goldens_{name}.json").read_text())
    texts = [golden for key, golden in goldens.items() if key != "chatml"]
    stdin = "\0".join(golden["text"] for golden in texts).encode()
    lines = run(kv, path, "-0", stdin=stdin).stdout.splitlines()
    assert [json.loads(line)["ids"] for line in lines] == [golden["ids"] for golden in texts]
    if "chatml" in goldens:
        chatml = goldens["chatml"]
        out = run(kv, path, "--special", "--ids", stdin=chatml["text"].encode()).stdout
        assert [int(word) for word in out.split()] == chatml["ids"]
