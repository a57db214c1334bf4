from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyball.cli.reach.this_host import EVERYWHERE, is_here, is_here_only, listen_address
from flyball.client_tls import ClientTls
from flyball.contracts.errors import UsageError
from flyball.launch.launch_flags import ALL_FLAGS
from flyball.launch.launch_grammar import help_text
from flyball.launch.launcher import default_job_name, parse_run


def parse(line: str, **environ: str):
    return parse_run(line.split(), environ)


def test_a_plain_command_line_has_safe_defaults() -> None:
    request = parse("train.py --lr 3e-4")
    assert request.argv == ("train.py", "--lr", "3e-4")
    assert (request.nnodes, request.nproc_per_node, request.max_restarts) == (1, "1", 3)
    assert request.notices == ()
    assert request.checkpoint.every_steps == 1


def test_flags_after_the_script_belong_to_the_script() -> None:
    request = parse("--nproc-per-node 2 train.py --nproc-per-node 8 --nnodes 9 -m -- -x")
    assert request.argv == ("train.py", "--nproc-per-node", "8", "--nnodes", "9", "-m", "--", "-x")
    assert request.nproc_per_node == "2"
    assert not request.module


def test_module_and_equals_and_underscores() -> None:
    request = parse("--nproc_per_node=2 --max_restarts=0 -m package.train --lr 1")
    assert request.module
    assert request.argv == ("package.train", "--lr", "1")
    assert request.max_restarts == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "No script"),
        ("--nnodes two train.py", "--nnodes two"),
        ("--nnodes 3:2 train.py", "--nnodes 3:2"),
        ("--nnodes 0 train.py", "--nnodes 0"),
        ("--nnodes 2 --min-nodes 3 train.py", "--min-nodes 3 contradicts --nnodes 2"),
        ("--nnodes 2:4 --min-nodes 3 train.py", "--min-nodes 3 contradicts --nnodes 2:4"),
        ("--nnodes 2 --min-nodes 0 train.py", "--min-nodes 0"),
        ("--spares -1 train.py", "--spares -1"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node 0"),
        ("--nproc-per-node many train.py", "--nproc-per-node many"),
        ("--max-restarts x train.py", "max-restarts"),
        ("--max-restarts -1 train.py", "--max-restarts -1"),
        ("--no-such-flag train.py", "no-such-flag"),
        ("--nnodes 2 train.py", "--nnodes 2"),
        ("--nnodes 2 --supervisor http://h:1 train.py", "needs a name"),
        ("--nnodes 1:2 --standalone train.py", "--standalone"),
        ("--nnodes 2 --standalone train.py", "--standalone"),
        ("--supervisor h:1 train.py", "not an address"),
        ("--supervisor http://h:1 --standalone train.py", "contradict"),
        ("--use-supervisor train.py", "FLYBALL_SUPERVISOR"),
        ("--job Über train.py", "Über"),
        ("--host-id a/b train.py", "a/b"),
        ("--local-ckpt-interval 5 train.py", "needs a folder"),
        ("--redirects x train.py", "--redirects x"),
        ("--local-ranks-filter a train.py", "--local-ranks-filter a"),
        ("--signals-to-handle SIGKILL train.py", "SIGKILL"),
        ("--no-python -m train", "--no-python"),
        ("--logs-specs x train.py", "--logs-specs"),
        ("-o yaml train.py", "yaml"),
        ("--start-method thread train.py", "thread"),
        ("--ckpt-every -1 train.py", "--ckpt-every"),
    ],
)
def test_invalid_command_lines_are_usage_errors(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert message in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_several_hosts_without_an_address_get_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        parse("--nnodes 2 train.py")
    assert "--supervisor" in caught.value.hint
    assert "--rdzv-endpoint" in caught.value.hint


def test_a_rendezvous_address_is_where_the_supervisor_listens() -> None:
    assert parse("--nnodes 2 --rdzv-endpoint h0:29400 --rdzv-id Run_7 train.py").rendezvous == "h0:29400"
    assert parse("--nnodes 2 --rdzv-endpoint h0 --rdzv-id r train.py").rendezvous == "h0:29400"
    static = parse("--nnodes 2 --node-rank 1 --master-addr h0 --master-port 1234 --job j train.py")
    assert (static.rendezvous, static.node_rank) == ("h0:1234", 1)
    assert parse("--nnodes 2 --rdzv-endpoint [::1]:29400 --rdzv-id r train.py").rendezvous == "[::1]:29400"
    one = parse("--nnodes 1 --rdzv-endpoint localhost:0 train.py")
    assert one.rendezvous == ""
    assert any(n.startswith("--rdzv-endpoint localhost:0: not needed") for n in one.notices)


def test_hosts_meet_as_under_torchrun() -> None:
    """With torchrun's defaults for everything left out."""
    static = parse("--nnodes 2 --node-rank 0 --master-addr h0 pkg/train_gpt.py --lr 1")
    assert (static.rendezvous, static.node_rank, static.job) == ("h0:29500", 0, "")
    assert parse("--nnodes 2 --node_rank 1 --master_port 1234 -m pkg.train").rendezvous == "127.0.0.1:1234"
    c10d = parse("--nnodes 2 --node-rank 0 --rdzv-backend c10d --rdzv-endpoint h0 train.py")
    assert (c10d.rendezvous, c10d.node_rank, c10d.job) == ("h0:29400", None, ""), (
        "with c10d the node rank does not matter"
    )
    elastic = parse("--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint h0 --rdzv-id r train.py")
    assert (elastic.rendezvous, elastic.min_nnodes, elastic.nnodes) == ("h0:29400", 1, 2)
    alone = parse("--nnodes 1:2 train.py")
    assert (alone.rendezvous, alone.nnodes) == ("", 1)
    assert any(n.startswith("--nnodes 1:2: the job runs on this host alone") for n in alone.notices)
    assert parse("--nnodes 2 --rdzv-endpoint h0 --trusted-network train.py").trusted_network
    with pytest.raises(UsageError, match="etcd"):
        parse("--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint etcd:2379 train.py")


def resolve(monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> None:
    def lookup(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(None, None, None, "", (names.get(host, host), 0))]

    monkeypatch.setattr("flyball.cli.reach.this_host.socket.getaddrinfo", lookup)


def test_a_host_listens_where_others_can_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = next(
        a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET
        and not a.address.startswith("127.")
    )  # fmt: skip
    resolve(monkeypatch, {"debian": "127.0.1.1", "me": mine, "gateway": "192.0.2.7", "localhost": "127.0.0.1"})
    listens = {name: listen_address(name) for name in ("debian", "me", "gateway", "localhost", "127.0.0.1", "[::1]")}
    assert listens == {
        "debian": EVERYWHERE,
        "me": "me",
        "gateway": EVERYWHERE,
        "localhost": "localhost",
        "127.0.0.1": "127.0.0.1",
        "[::1]": "::1",
    }
    assert [is_here(name) for name in ("debian", "me", "localhost", "gateway")] == [True, True, True, False]


def test_the_run_id_names_the_job() -> None:
    assert parse("--rdzv-id Run/7 train.py").job == "run-7"
    assert parse("--rdzv-id none train.py").job == ""
    assert parse("--rdzv-id x --job y train.py").job == "y"


def test_tls_files_for_the_supervisor_become_absolute_paths() -> None:
    request = parse("--ca-file ca.pem --client-cert-file /me.crt --client-key-file /me.key train.py")
    assert request.tls == ClientTls("ca.pem", "/me.crt", "/me.key")
    assert request.tls.environment() == {
        "FLYBALL_CA_FILE": str(Path("ca.pem").absolute()),
        "FLYBALL_CLIENT_CERT_FILE": "/me.crt",
        "FLYBALL_CLIENT_KEY_FILE": "/me.key",
    }
    assert parse("train.py").tls.environment() == {}


@pytest.mark.parametrize(("host", "alone"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False)])
def test_an_address_that_only_this_machine_can_reach(host: str, alone: bool) -> None:
    assert is_here_only(host) is alone


@pytest.mark.parametrize("flags", ["--nnodes 2:4", "--nnodes 4 --min-nodes 2", "--nnodes 2:4 --min-nodes 2"])
def test_a_job_may_go_on_with_fewer_hosts(flags: str) -> None:
    request = parse(f"{flags} --use-supervisor --job j train.py", FLYBALL_SUPERVISOR="http://h:1/")
    assert (request.min_nnodes, request.nnodes, request.spares) == (2, 4, 0)
    assert not request.notices


def test_spares_are_asked_for() -> None:
    request = parse("--nnodes 2 --spares 3 --supervisor http://h:1 --job j train.py")
    assert (request.min_nnodes, request.nnodes, request.spares) == (2, 2, 3)
    assert parse("--nnodes 1 --spares 1 --rdzv-endpoint h0 --rdzv-id r train.py").rendezvous == "h0:29400"


def test_torchruns_variables_replace_flags() -> None:
    request = parse("--nnodes 1 train.py", PET_NNODES="5", PET_NPROC_PER_NODE="4", PET_STANDALONE="1", PET_MODULE="0")
    assert (request.nnodes, request.nproc_per_node, request.module) == (1, "4", False)
    with pytest.raises(UsageError, match="PET_MAX_RESTARTS"):
        parse("train.py", PET_MAX_RESTARTS="many")


def test_flags_for_the_terminal() -> None:
    assert parse("train.py").console.raw(3) == 3
    assert parse("-r 3 train.py").console.shows(0) == 0
    only = parse("-r 1:3 --local-ranks-filter 0,1,2 train.py").console
    assert [only.shows(r) for r in range(4)] == [3, 0, 3, 0]
    tee = parse("-t 3 -r 3 train.py").console
    assert (tee.raw(0), tee.prefixed(0)) == (0, 3)
    assert parse("-r 1 train.py").console.raw(0) == 2
    one = parse("-t 1:2 train.py").console
    assert [(one.raw(r), one.prefixed(r)) for r in (0, 1)] == [(3, 0), (1, 2)]
    assert one.line_prefix(rank=5, local_rank=1, role="default") == b"[default1]:"
    mine = parse("-t 3 train.py", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${rank} ${x}>").console
    assert mine.line_prefix(rank=5, local_rank=1, role="default") == b"<5 ${x}>"


def test_checkpoint_flags() -> None:
    spec = parse(
        "--enable-optimized-async-ckpt --local-ckpt-dir /a --local-ckpt-interval 5 --persistent-ckpt-dir /b "
        "--persistent-ckpt-interval -1 --ckpt-every 2 --replicas 0 train.py"
    ).checkpoint
    assert (spec.disk_dir, spec.disk_every_steps, spec.persistent_dir) == ("/a", 5, "/b")
    assert (spec.persistent_every_steps, spec.every_steps, spec.replicas) == (0, 2, 0)


def test_grace_and_signals() -> None:
    assert parse("train.py").stop_grace_s == 10.0
    assert parse("--shutdown-timeout 30 train.py").stop_grace_s == 30.0
    assert parse("--term-timeout 1.5 train.py").stop_grace_s == 1.5
    assert parse("--signals-to-handle SIGUSR1,sigterm train.py").stop_signals == ("SIGUSR1", "SIGTERM")


def test_any_script_gives_a_job_name() -> None:
    def named(words: str, workdir: str = "/w") -> str:
        return default_job_name(parse(words), workdir)

    assert re.fullmatch("train_gpt-[0-9a-f]{6}", named("/x/Train_GPT.py"))
    assert re.fullmatch("train-[0-9a-f]{6}", named("-m pkg.sub.train"))
    assert re.fullmatch("job-[0-9a-f]{6}", named("___.py"))
    assert len(named("x" * 200 + ".py")) <= 63
    assert named("train.py --lr 1") == named("--max-restarts 7 train.py --lr 1"), "the same command, run differently"
    others = {named(words) for words in ("train.py", "train.py --lr 2", "-m train.py", "--nproc-per-node 2 train.py")}
    assert len({*others, named("train.py", "/elsewhere")}) == 5


@given(st.lists(st.sampled_from([s for f in ALL_FLAGS for s in f.spellings] + ["1", "x", "--", "train.py", "-1", ""])))
def test_any_command_line_is_a_request_or_a_usage_error(words: list[str]) -> None:
    try:
        request = parse_run(words, {})
    except UsageError as error:
        assert error.message
    else:
        assert request.help or request.argv or request.resume


def test_no_spelling_is_used_twice_and_help_lists_all() -> None:
    spellings = [s for f in ALL_FLAGS for s in f.spellings]
    assert len(spellings) == len(set(spellings))
    text = help_text(everything=True)
    assert all(f.names[0] in text for f in ALL_FLAGS)
    assert "examples:" in text


def test_help_is_one_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = help_text(everything=False)
    assert len(short.splitlines()) <= 45 and all(word in short for word in ("--help-all", "--nnodes", "examples:"))
    assert parse("--help-all train.py").help_all and not parse("--help train.py").help_all


@pytest.mark.processes
def test_the_launcher_imports_nothing_heavy() -> None:
    heavy = ("torch", "httpx", "typer", "services")
    code = f"import sys, flyball.launch.launcher; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_job_can_be_forbidden_to_restart_from_scratch() -> None:
    assert not parse("t.py").never_from_scratch
    assert parse("--never-from-scratch t.py").never_from_scratch


def test_a_hang_timeout_is_a_sensible_number_of_seconds() -> None:
    assert parse("t.py").hang_timeout_s == parse("--hang-timeout 0 t.py").hang_timeout_s == 0.0
    assert parse("--hang-timeout 90.5 t.py").hang_timeout_s == 90.5
    for wrong in ("-1", "0.1", "nan", "inf", "1e12"):
        with pytest.raises(UsageError, match=r"--hang-timeout .* is not a number of seconds from 1 to"):
            parse(f"--hang-timeout {wrong} t.py")


@pytest.mark.parametrize(
    ("line", "endpoint"),
    [
        ("--master-addr ::1 --master-port 29463", "[::1]:29463"),
        ("--master-addr [::1]", "[::1]:29500"),
        ("--rdzv-endpoint ::1", "[::1]:29400"),
        ("--rdzv-endpoint [fd00::1]", "[fd00::1]:29400"),
        ("--rdzv-endpoint [fd00::1]:7", "[fd00::1]:7"),
        ("--rdzv-endpoint fd00::1:29411", "[fd00::1]:29411"),
        ("--rdzv-endpoint node-1", "node-1:29400"),
    ],
)
def test_addresses_of_ipv6_get_the_brackets_that_they_lack(line: str, endpoint: str) -> None:
    assert parse(f"--nnodes 2 {line} train.py").rendezvous == endpoint


@pytest.mark.parametrize("line", ["--nnodes 2 --rdzv-endpoint a:b:7", "--supervisor http://::1:7370"])
def test_an_address_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        parse(f"{line} train.py")


def test_a_folder_without_an_interval_is_written_every_ten_minutes() -> None:
    given = parse("--persistent-ckpt-dir d --local-ckpt-dir e train.py")
    assert (given.checkpoint.persistent_every_s, given.checkpoint.disk_every_s) == (600.0, 600.0)
    assert sum("every 10 minutes" in notice for notice in given.notices) == 2
    off = parse("--persistent-ckpt-dir d --persistent-ckpt-interval 0 train.py")
    assert (off.checkpoint.persistent_every_s, off.checkpoint.persistent_every_steps) == (0.0, 0)
