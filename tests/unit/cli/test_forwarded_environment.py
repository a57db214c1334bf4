"""Variables forwarded to workers on other hosts, and how the secrets among them travel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flyball.contracts.cluster import JobSpec
from flyball.contracts.credentials import host_credential, reader_token
from flyball.contracts.errors import ConfigurationError, UsageError
from flyball.launch.forwarded_environment import ALLOWED, ALLOWED_PREFIXES, MAX_BYTES, explicit, is_secret, select
from flyball.sealed_values import seal, unseal
from host_daemon.workers.worker_environment import job_environment

SECRET = "the-cluster's-secret"
SHELL = {
    "PYTHONPATH": "/code", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "HF_HOME": "/hf", "LC_ALL": "C.UTF-8",
    "TOKENIZERS_PARALLELISM": "false", "WANDB_PROJECT": "p", "LD_LIBRARY_PATH": "/lib", "https_proxy": "http://proxy:1",
    "HTTP_PROXY": "http://user:word@proxy:1",
    "HF_TOKEN": "hf_x", "WANDB_API_KEY": "w", "AWS_SECRET_ACCESS_KEY": "a", "AWS_REGION": "eu",
    "CUDA_VISIBLE_DEVICES": "", "PATH": "/bin", "HOME": "/home/me", "RANK": "3", "SLURM_PROCID": "1", "MY_FLAG": "on",
    "FLYBALL_TOKEN": "t", "TORCHELASTIC_RUN_ID": "x", "PYTHONHOME": "/opt", "BASH_FUNC_x%%": "() { :; }",
}  # fmt: skip
LISTED = {
    *("PYTHONPATH", "NCCL_DEBUG", "OMP_NUM_THREADS", "HF_HOME", "LC_ALL", "TOKENIZERS_PARALLELISM", "WANDB_PROJECT"),
    *("LD_LIBRARY_PATH", "https_proxy"),
}


def test_the_default_is_the_list_without_secrets() -> None:
    found = select(SHELL, ())
    assert set(found.plain) == LISTED
    assert found.secret == {"HTTP_PROXY": SHELL["HTTP_PROXY"]}, "its address has a password"


def test_named_variables_are_added() -> None:
    found = select(SHELL, ("MY_FLAG", "LR=a=b", "EMPTY=", "HF_TOKEN", "CUDA_VISIBLE_DEVICES=0", "NCCL_DEBUG=WARN"))
    assert found.plain["NCCL_DEBUG"] == "WARN"
    assert {n: found.plain[n] for n in set(found.plain) - LISTED} == {
        "MY_FLAG": "on", "LR": "a=b", "EMPTY": "", "CUDA_VISIBLE_DEVICES": "0"
    }  # fmt: skip
    assert found.secret == {"HTTP_PROXY": SHELL["HTTP_PROXY"], "HF_TOKEN": "hf_x"}


def test_the_page_has_the_whole_list() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "worker-environment.md").read_text()
    named = set(re.findall(r"[A-Z_]+", page))
    assert {name.upper() for name in ALLOWED} | set(ALLOWED_PREFIXES) <= named


def test_all_and_nothing() -> None:
    assert select(SHELL, ("NONE",)) == ({}, {})
    assert select(SHELL, ("NONE", "PATH")).plain == {"PATH": "/bin"}
    everything = select(SHELL, ("ALL",))
    assert set(everything.plain) == LISTED | {"MY_FLAG"}
    assert set(everything.secret) == {"HTTP_PROXY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("UNSET",), "not set"),
        (("1x=2",), "is not the name"),
        (("=x",), "is not the name"),
        (("FLYBALL_JOB=x",), "itself"),
        (("ALL", "NONE"), "contradict"),
        (("HF_TOKEN=hf_verysecret",), "do not put a secret on the command line"),
        (("BIG=" + "x" * MAX_BYTES,), "bytes"),
        (("BAD=\udcff",), "UTF-8"),
    ],
)
def test_variables_that_cannot_be_forwarded(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        select(SHELL, words)
    assert caught.value.hint
    assert "udcff" not in caught.value.message
    assert "verysecret" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "api_key", "APIKEY", "MY_SECRET_2", "DB_PASSWORD", "PGPASSWORD", "GITHUB_PAT"]
)
def test_secrets_are_recognized_by_their_names(name: str) -> None:
    assert is_secret(name, "x")
    assert not is_secret("TOKENIZERS_PARALLELISM", "x")
    assert not is_secret("MAX_TOKENS", "512")
    assert not is_secret("PATH", "/a:/b@c")


def test_only_hosts_of_the_cluster_can_unseal() -> None:
    sealed = seal({"HF_TOKEN": "größe", "EMPTY_KEY": ""}, secret=SECRET, job="gpt")
    assert not any(part in text for text in sealed.values() for part in ("größe", "Z3LDtsOfZQ"))  # plain, and in base64
    assert sealed != seal({"HF_TOKEN": "größe", "EMPTY_KEY": ""}, secret=SECRET, job="gpt"), "a new nonce each time"
    key = host_credential(SECRET, "node-7").peer_key
    assert unseal(sealed, peer_key=key, job="gpt") == {"HF_TOKEN": "größe", "EMPTY_KEY": ""}
    moved = {"HF_TOKEN": sealed["EMPTY_KEY"]}
    cut = {"HF_TOKEN": sealed["HF_TOKEN"][:-8]}
    other = host_credential("another", "node-7").peer_key
    for values, peer_key, job in (
        (sealed, other, "gpt"),
        (sealed, key, "gpt2"),
        (moved, key, "gpt"),
        (cut, key, "gpt"),
    ):
        with pytest.raises(ConfigurationError, match="cannot be decrypted here"):
            unseal(values, peer_key=peer_key, job=job)
    with pytest.raises(ConfigurationError, match="operator"):
        seal({"HF_TOKEN": "x"}, secret=reader_token(SECRET), job="gpt")
    assert seal({}, secret="", job="gpt") == unseal({}, peer_key="", job="gpt") == {}


def test_forwarded_variables_override_the_daemons_own() -> None:
    spec = JobSpec("j", ("t.py",), "/", user_env={"A": "user", "B": "user", "C": "user"}, env={"C": "job"})
    found = job_environment({"A": "daemon", "D": "daemon", "FLYBALL_TOKEN": "t"}, spec, {"B": "secret"})
    assert {name: found[name] for name in "ABCD"} == {"A": "user", "B": "secret", "C": "job", "D": "daemon"}
    assert "FLYBALL_TOKEN" not in found
    assert explicit({}, ("A=1",)) == {"A": "1"}
