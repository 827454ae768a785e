"""What a shell completes, asked as the scripts of bash, zsh and fish ask it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PACKAGE_ROOT, KvHere
from test_helptext import COMMANDS, options

from kvcli.cli import completion
from kvcli.codecs import CODECS
from kvcli.runtime.promptcache import sessions

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(kv_here: KvHere, kv_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Complete:
    """complete("run", "--ca") -> what bash shows for the last word."""
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"):
        monkeypatch.setenv(name, kv_env[name])

    def ask(*words: str) -> list[str]:
        monkeypatch.setenv("_KV_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(["kv", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        code, out, err = kv_here()
        assert (code, err) == (0, "")
        return out.split()

    return ask


def test_commands_and_options(complete: Complete) -> None:
    assert {"run", "chat", "models", "config", "completion"} <= set(complete(""))
    assert complete("ch") == ["chat"] and complete("-v", "--offline", "mod") == ["models"]
    assert {"ls", "path", "verify", "rm"} <= set(complete("models", ""))
    assert complete("run", "--temp") == ["--template-var", "--temp", "--temperature"]
    assert set(complete("run", "--no-st")) == {"--no-stdin", "--no-stats"}
    assert complete("--version", "ru") == ["run"] and complete("run", "--help", "--tem")


def test_values(complete: Complete, kv_env: dict[str, str]) -> None:
    assert "smollm2" in complete("run", "-m", "") and complete("run", "-m", "smoll") == ["smollm2"]
    integers = [name for name in CODECS if name.startswith("int")]
    assert complete("run", "-ct", "int") == integers
    assert complete("bench", "--cache-type", "f16,int8/int") == [f"f16,int8/{name}" for name in integers]
    assert complete("run", "--evict", "") == [
        "none",
        "expected",
        "h2o",
        "keydiff",
        "kvzip",
        "random",
        "shift",
        "sink",
        "snapkv",
        "tova",
        "window",
    ]
    assert complete("run", "--device", "c") == ["cpu", "cuda"] and complete("--color", "al") == ["always"]
    assert "llama-3.1-8b" in complete("estimate", "llama-3.1") and "rtx4090-24g" in complete("estimate", "--gpu", "rtx")
    assert complete("models", "rm", "") == []
    assert "hub" in complete("storage", "rm", "") and complete("completion", "") == ["bash", "zsh", "fish"]
    assert complete("config", "set", "cache-type") == ["cache-type-k", "cache-type-v", "cache-type"]
    assert complete("config", "show", "ben") == ["bench"]
    assert complete("run", "-f", "") == []  # files, which the shell knows


def test_chats(complete: Complete, kv_env: dict[str, str]) -> None:
    path = sessions.path_of("trip")
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert complete("chat", "--resume", "") == complete("chat", "rm", "tr") == ["trip"]


def test_what_is_named_for_completion_exists() -> None:
    names = {name for command in COMMANDS.values() for param in options(command) for name in param.opts}
    assert set(completion._OPTIONS) <= names
    arguments = {(*words, param.name) for words, command in COMMANDS.items() for param in command.params}
    assert set(completion._ARGUMENTS) <= arguments


def test_torch_is_not_imported() -> None:
    code = (
        f"import atexit, sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        "sys.argv = ['kv']\nfrom kvcli.cli.main import main; main()"
    )
    asked = {"_KV_COMPLETE": "complete_bash", "COMP_WORDS": "kv run -m s", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "False\n") and "smollm2\n" in done.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_ask_in_their_way(shell: str, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_KV_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "kv run --evict si")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    code, out, err = kv_here()
    assert (code, err) == (0, "") and "sink" in out and "window" not in out
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "kv run -ct f16/int4")
    code, out, err = kv_here()
    assert (code, err) == (0, "") and "f16/int4" in out and CODECS["int4"].help in out


def test_the_scripts(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in completion.SHELLS:
        code, out, err = kv_here("completion", shell)
        assert (code, err) == (0, "") and "_KV_COMPLETE" in out and f"complete_{shell}" in out
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert kv_here("completion") == kv_here("completion", "fish")
    for wrong in ("/bin/tcsh", ""):
        monkeypatch.setenv("SHELL", wrong)
        code, out, err = kv_here("completion")
        assert (code, out) == (2, "") and err.endswith("name it: kv completion bash\n")


def test_installing_it(kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text("alias x=y\n")
    for _ in range(2):
        code, out, err = kv_here("completion", "bash", "--install")
        assert code == 0 and err == "kv: new shells complete kv\n" and Path(out.strip()).is_file()
    rc = (tmp_path / ".bashrc").read_text()
    assert rc.startswith("alias x=y\n") and rc.count(out.strip()) == 1
    for shell in ("zsh", "fish"):
        code, out, _ = kv_here("completion", shell, "--install")
        assert code == 0 and "_KV_COMPLETE" in Path(out.strip()).read_text()
    (tmp_path / ".bashrc").unlink()
    (tmp_path / ".bashrc").mkdir()
    code, _, err = kv_here("completion", "bash", "--install")
    assert code == 74 and err.startswith(f"kv: error: cannot write {tmp_path}/.bashrc: ")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_itself(kv_env: dict[str, str], tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    code = f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\nfrom kvcli.cli.main import main\nmain()\n"
    kv.write_text(f"#!{sys.executable}\n{code}")
    kv.chmod(0o755)
    text = f"source <({kv} completion bash)\nCOMP_WORDS=(kv run --evict si) COMP_CWORD=3\n"
    text += f'_kv_completion {kv}\necho "${{COMPREPLY[*]}}"\n'
    done = subprocess.run(["bash", "-c", text], env=kv_env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("sink\n", "")
