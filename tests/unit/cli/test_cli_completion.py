"""Shell completion, through real shells if they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.commands.left_runs import left
from support.commands.terminal import UserTerminal

from flyball.cli import completion
from flyball.cli.commands import as_click
from flyball.cli.completion import VARIABLE
from flyball.cli.main import run_cli
from flyball.launch.launch_flags import ALL_FLAGS, Use


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FLYBALL_STATE_DIR", str(tmp_path / "state"))
    left(tmp_path / "state", "llama", at=1000.0)
    left(tmp_path / "state", "gpt", at=2000.0)
    return tmp_path / "cache"


def answer(environ: Mapping[str, str]) -> tuple[str, int]:
    return completion.answer(environ, as_click)


def offered(line: str) -> list[str]:
    words = line.split(" ")
    return [word for word, _ in completion.candidates(words[:-1], words[-1], os.environ, as_click)]


def test_commands_options_and_choices_are_offered() -> None:
    assert {"run", "status", "stop", "ls", "goodput"} <= set(offered(""))
    assert offered("st") == ["stop", "status"]
    assert "--job" in offered("status --") and "--no-wait" in offered("stop --n")
    assert offered("status -o ") == ["table", "wide", "json", "yaml"]
    assert offered("goodput comp") == ["compare"]
    assert "--gpu-hour-price" in offered("goodput --gp"), "goodput alone means goodput report"


def test_arguments_that_are_words_are_offered() -> None:
    assert offered("simulate run ll") == ["llama3"] == offered("simulate compare small ll")
    assert offered("inject fault host-r") == ["host-reboot"]
    assert offered("get inc") == ["incidents"]
    assert "torch" in offered("doctor python t"), "it takes several"
    assert offered("simulate run ./m") == [], "a file"


@pytest.mark.parametrize(
    "line", ["stop ", "logs ", "status --job ", "explain dec-1 --job ", "goodput --job ", "run --resume ", "run --job "]
)
def test_job_names_are_offered_newest_first(line: str) -> None:
    assert offered(line) == ["gpt", "llama"]
    assert offered(f"{line}l") == ["llama"]


def test_run_offers_flags_only_before_the_script() -> None:
    assert set(offered("run -")) >= {name for f in ALL_FLAGS if f.use is not Use.REFUSED for name in f.names}
    assert offered("run --nproc-per-node 2 --ckpt-every-s") == ["--ckpt-every-s"]
    assert offered("run --nproc-per-node 2 train.py --ck") == [], "words after the script belong to the script"
    assert offered("run --nproc-per-node ") == offered("run tr") == offered("explain d") == [], "a file, or anything"


def test_answers_in_each_shells_format() -> None:
    bash = {VARIABLE: "complete_bash", "COMP_WORDS": "flyball status --job = g", "COMP_CWORD": "4"}
    assert answer(os.environ | bash) == ("gpt", 0)
    zsh = {VARIABLE: "complete_zsh", "_TYPER_COMPLETE_ARGS": "flyball stop "}
    assert answer(os.environ | zsh)[0] == '_arguments \'*: :(("gpt":"interrupted"\n"llama":"interrupted"))\''
    assert answer(os.environ | zsh | {"_TYPER_COMPLETE_ARGS": "flyball run tr"}) == ("_files", 0)
    fish = {
        VARIABLE: "complete_fish",
        "_TYPER_COMPLETE_ARGS": "flyball stop l",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    assert answer(os.environ | fish) == ("llama\tinterrupted", 0)
    asks = {"_TYPER_COMPLETE_FISH_ACTION": "is-args"}
    assert answer(os.environ | fish | asks)[1] == 0
    assert answer(os.environ | fish | asks | {"_TYPER_COMPLETE_ARGS": "flyball run tr"})[1] == 1


def test_an_unclosed_quote_is_accepted() -> None:
    line = {VARIABLE: "complete_bash", "COMP_WORDS": "flyball stop 'g", "COMP_CWORD": "2"}
    assert answer(os.environ | line)[1] == 0


@pytest.mark.processes
def test_commands_are_not_imported_once_cached(cache: Path) -> None:
    offered("status --")
    assert len(list((cache / "flyball").glob("completion-*.json"))) == 1
    look = (
        "import sys, os; from flyball.cli.completion import answer; from flyball.cli.main import _load_commands; "
        "print(answer(os.environ, _load_commands)); print(*sys.modules)"
    )
    line = {VARIABLE: "complete_bash", "COMP_WORDS": "flyball stop g", "COMP_CWORD": "2"}
    out = subprocess.run(
        [sys.executable, "-c", look], check=True, capture_output=True, text=True, env=os.environ | line
    ).stdout
    assert out.startswith("('gpt', 0)")
    heavy = {"typer", "rich", "httpx", "sqlalchemy", "fastapi", "structlog", "torch"}
    assert not heavy & set(out.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_prints_the_script_of_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["--show-completion", shell]) == 0
    script = capsys.readouterr().out
    assert VARIABLE in script and f"complete_{shell}" in script
    assert run_cli(["--show-completion", "cmd"]) == 2


def put_into(folder: Path) -> dict[str, str]:
    """Puts a `flyball` into a folder. Returns an environment in which shells find it."""
    (folder / "flyball").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flyball.cli.main "$@"\n')
    (folder / "flyball").chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def offered_by_bash(folder: Path, *before: str, home: Path, interactive: bool = False) -> str:
    """What a Tab after `flyball stop l` offers in a bash that first runs these lines."""
    bash = shutil.which("bash")
    assert bash
    press = "COMP_WORDS=(flyball stop l); COMP_CWORD=2; _flyball_completion flyball; echo ${COMPREPLY[@]}"
    environ = put_into(folder) | {"HOME": str(home)}
    line = [bash, *(["-i"] if interactive else []), "-c", "; ".join((*before, press))]
    found = subprocess.run(
        line, check=True, capture_output=True, text=True, env=environ, timeout=60, stdin=subprocess.DEVNULL
    )
    return found.stdout.strip()


@pytest.mark.processes
def test_the_script_works_in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["--show-completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)

    assert offered_by_bash(tmp_path, f'. "{tmp_path}/script"', home=tmp_path) == "llama"


@pytest.mark.processes
def test_installed_into_a_home_it_works_in_the_next_bash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("alias mine=true\n")
    monkeypatch.setenv("HOME", str(home))

    assert run_cli(["--install-completion", "bash"]) == run_cli(["--install-completion", "bash"]) == 0

    assert f"installed bash completion in {home}" in capsys.readouterr().err
    assert (home / ".bashrc").read_text().count("source") == 1 and "alias mine" in (home / ".bashrc").read_text()
    assert offered_by_bash(tmp_path, home=home, interactive=True) == "llama"


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh")
def test_installed_into_a_home_it_works_at_the_first_tab_of_a_zsh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = put_into(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_cli(["--install-completion", "zsh"]) == 0

    shell = UserTerminal(["zsh", "-i"], cwd=tmp_path, environ=environ | {"TERM": "dumb", "HOME": str(tmp_path)})
    try:
        shell.type(b"PS1=rea'dy> '\n")
        shell.until(b"ready> ")
        shell.type(b"flyball stop l\t")
        shell.until(b"lama")
        shell.type(b"\x15exit\n")  # Ctrl-U empties the line
        shell.end()
    finally:
        shell.close()


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("fish"), reason="there is no fish")
def test_installed_into_a_home_it_works_in_the_next_fish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = put_into(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_cli(["--install-completion", "fish"]) == 0

    line = ["fish", "-c", 'complete -C "flyball stop l"']
    found = subprocess.run(
        line, check=True, capture_output=True, text=True, env=environ | {"HOME": str(tmp_path)}, timeout=60
    )
    assert found.stdout.split() == ["llama", "interrupted"]


@pytest.mark.parametrize(
    ("shell", "file"), [("zsh", ".zfunc/_flyball"), ("fish", ".config/fish/completions/flyball.fish")]
)
def test_other_shells_get_their_files(shell: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_cli(["--install-completion", shell]) == 0
    assert f"complete_{shell}" in (tmp_path / file).read_text()
    assert run_cli(["--install-completion", "cmd"]) == 2
