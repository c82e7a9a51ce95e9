"""`vllm-mp completion`: what shells offer."""

import subprocess

import pytest

from vllm_mp import cli


@pytest.fixture(scope="module")
def script():
    """The script for bash, in a file of its own."""
    return printed("bash")


def printed(shell):
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda text: lines.append(text))
        assert cli.main(["completion", shell]) == 0
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("ser",), ["serve"]),
        (("bench", "thr"), ["throughput"]),
        (("serve", "--api-k"), ["--api-key", "--api-key-file"]),
        (("serve", "--dtype", "float1"), ["float16"]),
        (("serve", "--config", "a-fi"), ["a-file.yaml"]),
        (("serve", "a-f"), ["a-file.yaml"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
        # Accepted for callers of vLLM, without effect.
        (("serve", "--swap-sp"), []),
    ],
)
def test_bash_offers_commands_options_values_and_files(script, tmp_path, words, offered):
    (tmp_path / "a-file.yaml").touch()
    call = '\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_vllm_mp; printf "%s\\n" "${COMPREPLY[@]}"'
    answer = subprocess.run(
        ["bash", "-c", script + call, "bash", "vllm-mp", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert [line.strip() for line in answer.stdout.splitlines() if line.strip()] == offered, answer.stderr


@pytest.mark.parametrize(("shell", "first"), [("zsh", "#compdef vllm-mp"), ("fish", "complete -c vllm-mp")])
def test_other_shells_get_scripts_of_their_own(shell, first):
    text = printed(shell)
    assert first in text
    assert "api-server-count" in text


def test_unknown_shell_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["completion", "tcsh"])
    assert "must be one of bash, zsh, fish, got 'tcsh'" in capsys.readouterr().err
